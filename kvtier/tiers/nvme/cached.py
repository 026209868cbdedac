"""Long frames out of the page cache: copied from a mapping of their file, not by the kernel.

What the kernel copies (`read`) costs twice as much as what we copy and hash out of a mapping, if
the page cache holds the file in large pages: a fault for each 64 KiB would eat up the gain. So what
is missing is asked for in large pages too (`warm`); short frames are read, as asking for them that
way would read much more than the frame. A mapping lives as long as its copy: the address space
taken is that of the frames being read, and no file is held by one. A disk that fails under the
copy, or a file that is cut, is an OSError (kvtier._native guards the copy against SIGBUS; every
other SIGBUS goes where it went before).
What must not live here: what is right about a frame (`segments`).
"""

import errno
import os
from collections.abc import Sequence
from typing import Final

from kvtier import _native
from kvtier.core.checksum import checksum

MAPPED_BYTES_MIN: Final = 1 << 20
"""Of a frame that is mapped."""
_UNCACHED: Final = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS})


def is_mapped(size: int) -> bool:
    """Whether a frame of `size` bytes is copied out of a mapping."""
    return size >= MAPPED_BYTES_MIN


def copy_cached(descriptor: int, offset: int, head: memoryview, body: memoryview) -> int | None:
    """Fill both with a file's bytes from `offset`, without waiting for the disk.

    Returns the checksum of what is in `body` then; None where the page cache lacks some of it, and
    the memory holds anything. Between the question and the copy the kernel may take a page back:
    that page, in the microseconds of one copy, is the one wait for a disk that can happen. Raises
    OSError where the disk fails or the file is cut meanwhile.
    """
    if not is_mapped(head.nbytes + body.nbytes):
        return read_cached(descriptor, offset, head, body)
    return _native.copy_from_file_cached(descriptor, offset, head, body)


def read_cached(descriptor: int, offset: int, head: memoryview, body: memoryview) -> int | None:
    """`copy_cached` by a plain read: its twin, and the way of short frames."""
    parts = [head, body] if body.nbytes else [head]
    if present_cached(descriptor, offset, parts) < head.nbytes + body.nbytes:
        return None
    return checksum(body)


def present_cached(descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
    """Fill the parts with what the page cache has, and return how many bytes that were.

    Where something is missing the kernel begins to read ahead, in small pages.
    """
    try:
        return os.preadv(descriptor, parts, offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _UNCACHED:
            return 0
        raise


def warm(descriptor: int, offset: int, size: int) -> bool:
    """Have the disk fill the page cache with a long frame, and wait for it.

    False where it did not: the frame is short, the disk failed, the file ends earlier, or the
    kernel is older than 5.14. A plain read says which.
    """
    return is_mapped(size) and _native.warm_from_file(descriptor, offset, size)
