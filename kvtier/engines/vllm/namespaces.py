"""The namespace of an engine's blocks, told to the bridge beside it by a file.

Only the engine knows it (dtype, layout, release, seed); a bridge that tells it to the index lets
routers count what the node's store has for this engine. What must not live here: how it is made up.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.types import Fingerprint

FILE: Final = "namespace"
_HEX_CHARS: Final = 64


def tell_namespace(folder: Path, namespaces: Sequence[Fingerprint]) -> None:
    """Write it where all ranks have one; several have no single name. OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / FILE
    if len(set(namespaces)) != 1:
        path.unlink(missing_ok=True)
        return
    path.write_text(namespaces[0].hex(), encoding="ascii")


def told_namespace(folder: Path) -> str:
    """What the engine wrote, in hex; empty where it wrote none."""
    try:
        text = (folder / FILE).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    is_name = len(text) == _HEX_CHARS and all(char in "0123456789abcdef" for char in text)
    return text if is_name else ""
