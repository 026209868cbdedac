"""`kvtier store drop`: has stores drop what an operator names, from all their tiers.

What must not live here: what a drop does (`kvtier.store`), who may (`service`).
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from kvtier.client.store_link import Pauses, StoreLink
from kvtier.config import Root, describe, load
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.keys import KEY_BYTES
from kvtier.errors import ConfigError, KvtierError
from kvtier.limits import STORE_DEADLINE_MS_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.sections import DialConfig
from kvtier.types import Fingerprint
from kvtier.wire import blocks
from kvtier.wire import messages as pb

_WRITER: Final = re.compile(r"(0x)?[0-9a-fA-F]{1,16}")
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class DropConfig(Root):
    """Drop blocks at each of the stores: those of one writer, namespace or scope, or by key."""

    SECTION: ClassVar[str] = "store_drop"

    dial: DialConfig = field(default_factory=lambda: DialConfig(targets=("127.0.0.1:7720",)))
    """The stores: a drop is for one store, so name all of them."""
    writer: str = ""
    """Id of a writer, in hexadecimal, as workers and audits log it."""
    scope: str = ""
    """Salt of a scope."""
    namespace: str = ""
    """Fingerprint of a model's blocks, 64 hexadecimal digits."""
    keys: tuple[str, ...] = ()
    """Of the namespace only the blocks with these prefix keys, 64 hexadecimal digits each."""
    deadline_ms: int = 60_000
    """How long each of them may take."""
    json: bool = False
    """Print one JSON object instead of lines."""

    def __post_init__(self) -> None:
        if not 1 <= self.deadline_ms <= STORE_DEADLINE_MS_MAX:
            raise ConfigError(f"deadline_ms must be in 1..{STORE_DEADLINE_MS_MAX}")
        if not self.dial.targets:
            raise ConfigError("dial.targets is empty: there is nobody to ask")
        if sum(map(bool, (self.writer, self.scope, self.namespace))) != 1:
            raise ConfigError("say what to drop: one of writer, scope and namespace")
        if self.writer and not _WRITER.fullmatch(self.writer):
            raise ConfigError("writer must be up to 16 hexadecimal digits")
        if self.keys and not self.namespace:
            raise ConfigError("keys are of a namespace: give it too")
        if len(self.keys) > TIER_BATCH_BLOCKS_MAX:
            raise ConfigError(f"keys: more than {TIER_BATCH_BLOCKS_MAX}")
        for digest in (self.namespace, *self.keys):
            if digest and not _DIGEST.fullmatch(digest):
                raise ConfigError("namespace and keys must be 64 hexadecimal digits each")


def drop_command(argv: list[str]) -> int:
    """Entry point of `kvtier store drop`; 1 where a store did not drop all of it.

    Raises what the only target raised, so that the command line says it in one line.
    """
    loaded = load(DropConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    return asyncio.run(drop(loaded.config, sys.stdout.write))


async def drop(config: DropConfig, write: Callable[[str], object]) -> int:
    """Have every target drop, and write what they said; 1 where one has to be asked again."""
    request = drop_request(config)
    documents: list[dict[str, str | int]] = []
    for target in config.dial.targets:
        try:
            answer = await _ask(config, target, request)
        except KvtierError as error:
            if len(config.dial.targets) == 1:
                raise
            documents.append({"target": target, "error": str(error)})
            continue
        document: dict[str, str | int] = {"target": target, "dropped": answer.dropped}
        if answer.undone:
            document["undone"] = answer.undone
        documents.append(document)
    if config.json:
        write(json.dumps({"stores": documents}) + "\n")
    else:
        write("".join(f"{_line(document)}\n" for document in documents))
    return int(any("error" in one or "undone" in one for one in documents))


def drop_request(config: DropConfig) -> pb.DropBlocksRequest:
    """What a store is asked. Pure."""
    if config.writer:
        return pb.DropBlocksRequest(writer_id=int(config.writer, 16))
    if config.scope:
        return pb.DropBlocksRequest(scope=config.scope)
    namespace = Fingerprint(bytes.fromhex(config.namespace))
    if not config.keys:
        return pb.DropBlocksRequest(namespace=namespace)
    keys = [bytes.fromhex(key) for key in config.keys]
    assert all(len(key) == KEY_BYTES for key in keys)
    names = [FrameName(KeyKind.PREFIX_KEY, key, namespace) for key in keys]
    return pb.DropBlocksRequest(names=blocks.names_to(names))


async def _ask(
    config: DropConfig, target: str, request: pb.DropBlocksRequest
) -> pb.DropBlocksResponse:
    link = StoreLink(replace(config.dial, targets=(target,)), Pauses())
    try:
        answer: pb.DropBlocksResponse = await link.ask("Drop", request, config.deadline_ms / 1000)
    finally:
        await link.close()
    return answer


def _line(document: dict[str, str | int]) -> str:
    told = f"store {document['target']}: "
    if "error" in document:
        return told + _shown(str(document["error"]))
    told += f"dropped {document['dropped']} blocks"
    if "undone" in document:
        told += f", not everywhere ({_shown(str(document['undone']))}): call again"
    return told


def _shown(text: str) -> str:
    """Words from outside, without characters that a terminal would obey."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
