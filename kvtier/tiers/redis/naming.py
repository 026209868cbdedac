"""Block names as Redis keys: hex of fixed length behind a prefix of ours, and back.

    kvtier:1:<namespace, 64><key kind, 2><key length, 2><codec id, 8><key, zeros after it, 64>

A key is made of digests and numbers only, so that no name from outside (tenant, model, scope) can
reach it, and everything under the prefix that has another form is not ours and is left alone.
What must not live here: what the value holds (`values`).
"""

import re
from typing import Final

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.types import Fingerprint

PREFIX: Final = b"kvtier:1:"
"""1: the version of the form of keys and values. Another version is another key."""
META_PREFIX: Final = b"kvtier:meta:1:"
"""Keys that are no blocks: the server's id, the announcer's lock and what it announces."""
KEY_BYTES: Final = len(PREFIX) + 140
_DIGEST_CHARS: Final = 64
_FORM: Final = re.compile(
    re.escape(PREFIX) + rb"([0-9a-f]{64})([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{8})([0-9a-f]{64})"
)


def block_key(name: FrameName) -> bytes:
    """The key of a block. Two names never share one."""
    key = name.key.hex().ljust(_DIGEST_CHARS, "0")
    fields = f"{name.namespace.hex()}{name.key_kind:02x}{len(name.key):02x}{name.codec_id:08x}{key}"
    return PREFIX + fields.encode()


def name_of_key(key: bytes) -> FrameName | None:
    """The block that `block_key` gives this key to; None for any other bytes."""
    match = _FORM.fullmatch(key)
    if match is None:
        return None
    namespace, kind, length, codec_id, digest = (group.decode() for group in match.groups())
    raw = bytes.fromhex(digest)
    used = int(length, 16)
    if used > len(raw) or any(raw[used:]):
        return None
    try:
        return FrameName(
            KeyKind(int(kind, 16)),
            raw[:used],
            Fingerprint(bytes.fromhex(namespace)),
            int(codec_id, 16),
        )
    except (CallerError, ValueError):
        return None


def pattern(namespace: Fingerprint | None = None) -> bytes:
    """A SCAN pattern that fits the keys of a namespace, or of all; `name_of_key` decides."""
    fixed = PREFIX if namespace is None else PREFIX + namespace.hex().encode()
    return fixed + b"?" * (KEY_BYTES - len(fixed))
