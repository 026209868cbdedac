"""Digests of LoRA adapters by their files: engines hash an adapter's name and path only.

What must not live here: vLLM's objects, what is cached under an adapter.
"""

from pathlib import Path

from kvtier.engines.vllm.facts import Refusal, files_digest

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_STAT = tuple[tuple[str, int, int, int], ...]


class AdapterDigests:
    """Digest of each adapter directory, for the life of one engine.

    An engine reads an adapter when it likes, and keeps what it has computed under the same path. So
    a directory whose bytes change while the engine runs may stand for either weights from then on:
    it is refused until the engine starts anew. Weights at a path of their own are told apart.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[_STAT, bytes | Refusal]] = {}

    def digest(self, directory: str) -> bytes | Refusal:
        """32 bytes over the adapter's weights and configuration.

        Reads the files at the first question and after a change: adapters are megabytes.
        """
        try:
            files = _files(Path(directory))
            if not files:
                return Refusal(f"adapter {directory}: no weights in this directory")
            state = tuple(
                (path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino)
                for path, stat in ((path, path.stat()) for path in files)
            )
            known = self._known.get(directory)
            if known is not None and (known[0] == state or isinstance(known[1], Refusal)):
                return known[1]
            found: bytes | Refusal = bytes.fromhex(files_digest(files))
        except OSError as error:
            return Refusal(f"adapter {directory}: {error}")
        if known is not None and known[1] != found:
            found = Refusal(f"adapter {directory}: files changed under a running engine")
        self._known[directory] = (state, found)
        return found


def _files(folder: Path) -> list[Path]:
    files = sorted(path for kind in _WEIGHTS for path in folder.glob(kind))
    return files and [*files, *sorted(folder.glob("adapter_config.json"))]
