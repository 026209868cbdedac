"""What an operator says of one vLLM server. What must not live here: vLLM's own settings."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from kvtier.config import CONFIG_FLAG, PRINT_FLAG, Loaded, Root, load, settings
from kvtier.engines.vllm.settings import SavePolicy
from kvtier.errors import ConfigError
from kvtier.limits import BLOCK_TOKENS_MAX
from kvtier.sections import DialConfig, TelemetryConfig, parse_address

_SHORT: Final = {"--index": "--index-targets"}
_END: Final = "--"
BRIDGE_STOP_S: Final = 10.0
"""How long the bridge may take to end when vLLM has."""


@dataclass(frozen=True, slots=True)
class VllmConfig(Root):
    """`kvtier vllm serve MODEL [FLAGS]`: vLLM with kvtier's connector inside, its bridge beside it.

    `--index` is short for `--index-targets`. All other flags are passed on to vLLM; behind `--`
    everything is.
    """

    SECTION: ClassVar[str] = "vllm"

    model: str = ""
    """A directory, or an id on the model hub."""
    python: Path | None = None
    """A Python with vLLM and kvtier[engine]; not set: the one that runs this."""
    store: str = ""
    """host:port or unix:/path of this node's store; not set: where a `kvtier store` that was told
    nothing has its socket."""
    store_instance: str = ""
    """Name of that store in the fleet; not set: the node's name."""
    index: DialConfig = field(default_factory=DialConfig)
    """Index replicas to tell what the engine holds."""
    bridge: bool = True
    """Off: nothing is told to any index."""
    bind: str | None = None
    """host:port of vLLM's endpoint; not set: as its flags --host and --port say, else
    127.0.0.1:8000."""
    advertise: str = ""
    """host:port of the endpoint as routers reach it; not set: bind."""
    model_id: str = ""
    """By which name blocks of this model are shared; not set: the directory's name, or the id."""
    revision: str = ""
    """Of the weights; not set: digest of the files, or the hub's commit."""
    block_tokens: int | None = None
    """Tokens of one block; not set: 32."""
    save: SavePolicy = SavePolicy.PROMPT
    """prompt, all or none: which blocks go to the store."""
    adapters: tuple[str, ...] = ()
    """DIGEST:GENERATION:NAME of each LoRA adapter that the index shall know."""
    instance: str | None = None
    """Name of the engine in the fleet; not set: its address."""
    node: str | None = None
    """Name of the machine, as its store says it; not set: the host's name."""
    zone: str = ""
    """Failure or network zone, for routers."""
    run_dir: Path | None = None
    """Where its sockets are; not set: a directory of its own, gone with the server."""
    data_dir: Path | None = None
    """What outlives a bridge; not set: in run_dir."""
    kv_memory_bytes: int | None = None
    """Of the KV cache; not set: vLLM's choice."""
    cpus: str = ""
    """Of a server that computes on CPUs: which ones, such as 0-3, or nobind; not set: vLLM's
    choice."""
    eager: bool = False
    """Do not compile the model: starts sooner, computes slower on GPUs."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Logs, metrics and traces of the bridge."""
    stop_s_max: float = 60.0
    """How long vLLM may take to end before it is killed."""
    flags: tuple[str, ...] = ()
    """Further flags of vLLM, one argument an entry."""

    def __post_init__(self) -> None:
        for address in (self.bind, self.store or None, self.advertise or None):
            if address is not None:
                parse_address(address)
        if self.block_tokens is not None and not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise ConfigError(f"block_tokens must be in 1..{BLOCK_TOKENS_MAX}")
        if self.kv_memory_bytes is not None and self.kv_memory_bytes < 1:
            raise ConfigError("kv_memory_bytes must be positive")
        if not 0 < self.stop_s_max < 1e6:
            raise ConfigError("stop_s_max must be positive")


def read_vllm(argv: Sequence[str]) -> Loaded[VllmConfig]:
    """Read `[MODEL] [FLAGS]`; flags that are not ours, and all behind `--`, are vLLM's."""
    ours, theirs = _parted(argv)
    if theirs and not theirs[0].startswith("-"):
        ours += [f"--model={theirs.pop(0)}"]
    loaded = load(VllmConfig, ours)
    flags = (*loaded.config.flags, *theirs)
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, flags=flags))


def _parted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags with their values, and the rest in order."""
    takes_value = {CONFIG_FLAG: True, PRINT_FLAG: False, "--help": False, "-h": False}
    for setting in settings(VllmConfig):
        switch = setting.kind is bool and not setting.optional
        for flag in setting.flags:
            takes_value[flag] = not switch
            if switch:
                takes_value[f"--no-{flag[2:]}"] = False
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == _END:
            theirs += rest
            break
        head, equals, value = argument.partition("=")
        name = _SHORT.get(head, head)
        if name not in takes_value:
            theirs.append(argument)
            continue
        ours.append(f"{name}{equals}{value}")
        if takes_value[name] and not equals and rest:
            ours.append(rest.pop(0))
    return ours, theirs
