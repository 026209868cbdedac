"""How a listener stops without cutting off who has just connected.

The kernel finishes handshakes by itself and resets, when a listening socket is closed, whoever was
connected and not accepted yet, perhaps with a request under way. So first new handshakes are no
longer begun (a client tries again and is refused, or reaches another process), then those that are
connected are accepted, then the socket is closed. What must not live here: what becomes of them.
"""

import ctypes
import socket
import struct
import sys
from contextlib import suppress
from typing import Final

SETTLE_S: Final = 0.05
"""Time for handshakes under way to end, and for the loop to accept them."""
_SO_ATTACH_FILTER: Final = 26
_SYN: Final = 0x02
_PROGRAM: Final = (
    (0x30, 0, 0, 13),  # load the byte of the TCP header that has the flags
    (0x45, 0, 1, _SYN),  # a SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)
"""A classic BPF program: (code, jump if true, jump if false, operand)."""


def begin_no_more(listening: socket.socket) -> None:
    """Have the kernel drop what begins a handshake; does nothing where it cannot. Never blocks."""
    if sys.platform != "linux" or listening.family == socket.AF_UNIX:
        return
    program = b"".join([struct.pack("HBBI", *line) for line in _PROGRAM])
    held = ctypes.create_string_buffer(program, len(program))
    with suppress(OSError):  # a kernel without it: as any server, the last moment may lose some
        described = struct.pack("HP", len(_PROGRAM), ctypes.addressof(held))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
