"""Under which terms an engine shares its blocks, as a record that engines of one model compare.

Blocks of engines that differ lie in namespaces of their own, and so never meet: a fleet whose
engines differ by mistake would only be slow. The record, which an engine leaves in the store under
the model's name, lets the next one say in which terms it differs.
What must not live here: the store (lookups.py), what is shared (facts.py).
"""

import hashlib
import json
from typing import Final

from kvtier.core.frame import FrameName, KeyKind
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.types import Fingerprint

RECORD_BYTES: Final = 4096
"""Of every record: tiers that other nodes wrote are asked for blocks of a known length."""
_NAMESPACE: Final = Fingerprint(hashlib.sha256(b"kvtier vllm terms 1").digest())
_SHOWN: Final = 12


def record_name(model_id: str) -> FrameName:
    """By what the record of a model is found."""
    key = hashlib.sha256(model_id.encode()).digest()
    return FrameName(KeyKind.ENGINE_DIGEST, key, _NAMESPACE)


def record_of(facts: EngineFacts) -> bytes:
    """The record, `RECORD_BYTES` long."""
    terms = {
        "revision": facts.revision,
        "KV dtype": facts.kv_dtype.name.lower(),
        "block size": facts.pool.block_tokens,
        "layers": facts.layers,
        "KV heads": facts.kv_heads,
        "head size": facts.head_dim,
        "ranks": facts.ranks,
        "rope": facts.rope_digest.hex(),
        "vLLM": facts.engine.format_version,
        "hash": facts.engine.hash_algorithm,
        "hash seed": hashlib.sha256(facts.engine.seed.encode()).hexdigest(),
    }
    return json.dumps(terms).encode().ljust(RECORD_BYTES)


def differences(ours: bytes, theirs: bytes) -> tuple[str, ...]:
    """`block size 32 here, 64 there`, term by term; nothing of a record that cannot be read."""
    here, there = _read(ours), _read(theirs)
    if there is None or here is None:
        return ()
    return tuple(
        f"{name} {_short(here.get(name))} here, {_short(there.get(name))} there"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    )


def _read(record: bytes) -> dict[str, object] | None:
    try:
        terms = json.loads(record)
    except ValueError:
        return None
    return terms if isinstance(terms, dict) else None


def _short(value: object) -> str:
    return str(value)[:_SHOWN]
