"""Flips bits of what a running store has: in the memory that it shares, and in its files.

What must not live here: what a test expects of a store that has been spoilt.
"""

from pathlib import Path

FLIP_EVERY = 64 << 10
_OFFSET = 777


def spoil_store(pid: int, data_dir: Path) -> int:
    """Flip a bit in each 64 KiB of a store's slots and of its segments; returns how many."""
    slots = [
        line.split()[0].split("-")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/memfd:kvtier-slots" in line
    ]
    memory = Path(f"/proc/{pid}/mem")
    flipped = sum(flip(memory, int(begin, 16), int(end, 16)) for begin, end in slots)
    segments = list(data_dir.rglob("*.segment"))
    return flipped + sum(flip(path, 4096, path.stat().st_size) for path in segments)


def flip(path: Path, begin: int, end: int, every: int = FLIP_EVERY) -> int:
    """Flip a bit at regular places of a file; returns how many."""
    places = range(begin + _OFFSET, end, every)
    with path.open("r+b", buffering=0) as file:
        for at in places:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
    return len(places)
