"""Settings of a bridge, and what they describe. What must not live here: ceilings (limits.py)."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from kvtier.config import Root
from kvtier.core.encoding import Symbol, Value, digest
from kvtier.core.engine_holdings import HoldingsTerms, Reports
from kvtier.core.engine_sequence import SequenceConfig
from kvtier.core.model_card import Adapter, ModelCard
from kvtier.engines.events import DecodePolicy, Dialect, HiddenSalts
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import BLOCK_TOKENS_MAX, ENGINE_DIGESTS_MAX, ENGINE_RANKS_MAX
from kvtier.sections import DialConfig, Reach, TelemetryConfig, parse_address
from kvtier.types import Fingerprint, Role

_ADAPTER: Final = re.compile(r"(?P<digest>[0-9a-f]{64}):(?P<generation>[0-9]{1,19}):(?P<name>.+)")
_NAMESPACE_DOMAIN: Final = "kvtier.bridge-namespace.v1"
_PORT_MAX: Final = 65_535
TOLD: Final = "told"
"""As `model.namespace`: what the connector says."""


@dataclass(frozen=True, slots=True)
class EngineSection:
    """The engine and where it says what it holds."""

    kind: Dialect = Dialect.VLLM
    """vllm, sglang or trtllm."""
    version: str = ""
    """Version of the engine, for operators."""
    http: str = "127.0.0.1:8000"
    """Address of its OpenAI endpoint, as routers reach it."""
    events: str = "tcp://127.0.0.1:5557"
    """Where it publishes events; rank r of several does so r ports further on."""
    replay: str | None = None
    """Where it answers for its last events; not set: nowhere, and what is lost stays lost."""
    residents: Path | None = None
    """Folder where the engine's kvtier connector tells what is resident (its setting of this name);
    with it `events` and `replay` are only what is fallen back to."""
    ranks: int = 1
    """Data-parallel ranks."""
    topic: str = ""
    """Of its events, as it was configured."""
    insecure: bool = False
    """Take events from another machine: ZMQ knows no credentials and no encryption."""
    blocks: int = 0
    """Blocks of one rank's GPU pool; 0: not known."""
    block_bytes: int = 0
    """KV bytes of one block; 0: not known."""
    hidden_salts: HiddenSalts = HiddenSalts.REFUSE
    """refuse, or assume_none: of versions that do not publish salts, whether blocks are indexed."""
    reports: Reports = Reports.COPIES
    """copies, or repeats: whether a prompt that is stored again is a second copy of it."""
    window_tokens: int | None = None
    """Of TensorRT-LLM with several window sizes: the largest one."""
    gone_ms: int = 3_000
    """Out of reach for so long, the engine leaves the fleet until it is back."""
    probe_ms: int = 5_000
    """Silent for so long, it is asked whether something was missed."""
    load_ms: int = 1_000
    """How often the engine's /metrics are read for its load; 0: never."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= ENGINE_RANKS_MAX:
            raise ConfigError(f"ranks must be in 1..{ENGINE_RANKS_MAX}")
        if min(self.blocks, self.block_bytes) < 0 or min(self.gone_ms, self.probe_ms) < 1:
            raise ConfigError("blocks, block_bytes, gone_ms, probe_ms: a value is too small")
        if self.load_ms < 0:
            raise ConfigError("load_ms must not be negative")
        parse_address(self.http)
        for endpoint in (self.events, self.replay):
            if endpoint is not None:
                self._check(endpoint)

    def _check(self, endpoint: str) -> None:
        if endpoint.startswith("ipc:///"):
            if self.ranks > 1:
                raise ConfigError(f"{endpoint}: several ranks need tcp")
            return
        if not endpoint.startswith("tcp://"):
            raise ConfigError(f"{endpoint} is neither tcp://host:port nor ipc:///path")
        address = parse_address(endpoint.removeprefix("tcp://"))
        if not 1 <= address.port <= _PORT_MAX + 1 - self.ranks:
            raise ConfigError(f"{endpoint}: no port for each of {self.ranks} ranks")
        if address.reach is Reach.NETWORK and not self.insecure:
            raise ConfigError(
                f"{endpoint} is another machine, and anybody there could pose as the engine: run "
                "the bridge beside it, or set insecure"
            )

    def feed_path(self, rank: int) -> Path | None:
        """The socket of rank `rank`'s connector; None: it is not to be listened to."""
        return None if self.residents is None else self.residents / f"residents-{rank}.sock"

    def endpoints(self, rank: int) -> tuple[str, str | None]:
        """Where rank `rank` publishes, and where it answers."""
        replay = None if self.replay is None else _of_rank(self.replay, rank)
        return _of_rank(self.events, rank), replay


def _of_rank(endpoint: str, rank: int) -> str:
    if endpoint.startswith("ipc:"):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


@dataclass(frozen=True, slots=True)
class CardSection:
    """The model card: what routers must know to name a prompt's blocks."""

    served_names: tuple[str, ...] = ()
    """Names that requests use, the first one canonical; not set: model_id."""
    model_id: str = ""
    """The model's id, equal for all that serve it; required."""
    revision: str = ""
    """Digest or commit of its weights; required."""
    block_tokens: int = 16
    """Tokens of one block, as the engine publishes them."""
    directory: Path | None = None
    """Tokenizer and chat template are read from here where their digests are not given."""
    tokenizer_digest: str = ""
    """64 hex digits."""
    chat_template_digest: str = ""
    """64 hex digits; empty: none, or that of the directory."""
    adapters: tuple[str, ...] = ()
    """DIGEST:GENERATION:NAME each; adapters that are not here are not indexed."""
    namespace: str = ""
    """Fingerprint (64 hex digits) of the blocks that the engine's connector writes; `told`: what it
    says itself, in the folder engine.residents; empty: none."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise ConfigError(f"block_tokens must be in 1..{BLOCK_TOKENS_MAX}")
        for name in ("tokenizer_digest", "chat_template_digest"):
            _digest_of(name, getattr(self, name))
        if self.namespace != TOLD:
            _digest_of("namespace", self.namespace)
        for adapter in self.adapters:
            _adapter_of(adapter)

    def card(self) -> ModelCard:
        """The card; reads the directory where digests are missing. ConfigError for bad content."""
        tokenizer = _digest_of("tokenizer_digest", self.tokenizer_digest)
        template = _digest_of("chat_template_digest", self.chat_template_digest)
        if tokenizer is None:
            if self.directory is None:
                raise ConfigError("model: tokenizer_digest or directory is required")
            tokenizer, of_directory = _read(self.directory)
            template = template or of_directory
        try:
            return ModelCard(
                served_names=self.served_names or (self.model_id,),
                model_id=self.model_id,
                revision=self.revision,
                tokenizer_digest=tokenizer,
                chat_template_digest=template,
                block_tokens=self.block_tokens,
                adapters=tuple(map(_adapter_of, self.adapters)),
            )
        except CallerError as error:
            raise ConfigError(f"model: {error}") from error

    def fingerprint(self, engine: EngineSection, card: ModelCard) -> Fingerprint:
        """The namespace of the worker; without a connector one that no store has."""
        given = _digest_of("namespace", self.namespace)
        if given is not None:
            return Fingerprint(given)
        fields: dict[int, Value] = {1: Symbol(engine.kind.value), 2: card.digest()}
        return Fingerprint(digest(_NAMESPACE_DOMAIN, fields))


@dataclass(frozen=True, slots=True)
class MemorySection:
    """What the bridge remembers, and for how long."""

    data_dir: Path | None = None
    """Directory for what outlives the bridge, of one bridge at a time; not set: nothing does."""
    residents_max: int = 1 << 20
    """Blocks of one rank."""
    keys_max: int = 1 << 19
    """Engine hashes whose prefix keys are known, resident or not; some 200 bytes each."""
    pending_tokens_max: int = 1 << 22
    """Tokens of blocks whose parent was never seen."""
    file_bytes_max: int = 1 << 30
    """Of the file in data_dir."""
    save_ms: int = 500
    """How often it is brought up to date."""

    def __post_init__(self) -> None:
        HoldingsTerms(
            pool=_SOME_POOL,
            residents_max=self.residents_max,
            pending_tokens_max=self.pending_tokens_max,
        )
        if not 1 <= self.keys_max <= ENGINE_DIGESTS_MAX:
            raise ConfigError(f"keys_max must be in 1..{ENGINE_DIGESTS_MAX}")
        if self.file_bytes_max < 1 << 20 or self.save_ms < 1:
            raise ConfigError("file_bytes_max must be 1 MiB or more, save_ms positive")


_SOME_POOL: Final = ModelCard(("any",), "any", "any", bytes(32), None, 1).pool


@dataclass(frozen=True, slots=True)
class BridgeConfig(Root):
    """A bridge: tells the index what a vLLM, SGLang or TensorRT-LLM server holds."""

    SECTION: ClassVar[str] = "bridge"

    model: CardSection = field(default_factory=CardSection)
    """The model card."""
    engine: EngineSection = field(default_factory=EngineSection)
    """The engine."""
    memory: MemorySection = field(default_factory=MemorySection)
    """What is remembered."""
    instance: str | None = None
    """Name of the engine in the fleet; not set: its HTTP address."""
    node: str | None = None
    """Name of the machine, as its store says it; not set: the host's name."""
    zone: str = ""
    """Failure or network zone, for routers."""
    store: str = ""
    """Name of the store that the engine's connector is attached to; empty: none."""
    role: Role = Role.BOTH
    """prefill, decode or both."""
    index: DialConfig = field(default_factory=DialConfig)
    """Index replicas to tell what the engine holds."""
    resolver: DialConfig = field(default_factory=DialConfig)
    """The store of the engine's connector, to be asked for blocks of which nobody told the tokens;
    none: it is not asked. Needs `model.namespace`, and engines that publish whole digests."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Logs, metrics and traces."""

    def __post_init__(self) -> None:
        if self.resolver.targets and not self.model.namespace:
            raise ConfigError("resolver: model.namespace is needed to name blocks to a store")
        if len(self.resolver.targets) > 1:
            raise ConfigError("resolver: one store is enough")
        if self.model.namespace == TOLD and self.engine.residents is None:
            raise ConfigError("namespace = told needs engine.residents, where it is told")

    def policy(self) -> DecodePolicy:
        return DecodePolicy(
            dialect=self.engine.kind,
            block_tokens=self.model.block_tokens,
            hidden_salts=self.engine.hidden_salts,
            has_adapters=bool(self.model.adapters),
            window_tokens=self.engine.window_tokens,
        )

    def sequence(self) -> SequenceConfig:
        return SequenceConfig(has_replay=self.engine.replay is not None)

    def terms(self, card: ModelCard) -> HoldingsTerms:
        return HoldingsTerms(
            pool=card.pool,
            adapters={one.name: one.ref for one in card.indexable_adapters},
            reports=self.engine.reports,
            residents_max=self.memory.residents_max,
            pending_tokens_max=self.memory.pending_tokens_max,
        )


def _digest_of(name: str, text: str) -> bytes | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ConfigError(f"{name} is not 64 hex digits")
    return bytes.fromhex(text)


def _adapter_of(text: str) -> Adapter:
    found = _ADAPTER.fullmatch(text)
    if found is None:
        raise ConfigError(f"adapters: {text!r} is not DIGEST:GENERATION:NAME")
    return Adapter(found["name"], bytes.fromhex(found["digest"]), int(found["generation"]))


def _read(directory: Path) -> tuple[bytes, bytes | None]:
    try:
        from kvtier.text import TextModel
    except ImportError as error:
        raise ConfigError(
            f"directory {directory} is read with kvtier[router], which is not installed: "
            "give tokenizer_digest and chat_template_digest"
        ) from error
    try:
        digests = TextModel.load(directory).digests
    except CallerError as error:
        raise ConfigError(f"directory: {error}") from error
    return digests.tokenizer, digests.chat_template
