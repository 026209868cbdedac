"""Digests of LoRA adapters by their files: engines hash an adapter's name and path only.

What must not live here: vLLM's objects, what is cached under an adapter.
"""

from pathlib import Path

from kvtier.engines.vllm.facts import files_digest

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_CACHED_MAX = 1_024


class AdapterDigests:
    """Digest of each adapter directory, computed again when a file of it changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, bytes]] = {}

    def digest(self, directory: str) -> bytes | None:
        """32 bytes over the adapter's weights and configuration; None where it is no directory.

        Reads the files at the first question and after a change: adapters are megabytes.
        """
        folder = Path(directory)
        try:
            files = [path for kind in _WEIGHTS for path in folder.glob(kind)]
            if not files:
                return None
            files += folder.glob("adapter_config.json")
            state = tuple(
                (path.name, path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino)
                for path in sorted(files)
            )
            known = self._known.get(directory)
            if known is not None and known[0] == state:
                return known[1]
            found = bytes.fromhex(files_digest(files))
        except OSError:
            return None
        if len(self._known) >= _CACHED_MAX:
            self._known.clear()
        self._known[directory] = (state, found)
        return found
