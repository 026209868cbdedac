"""What TCP itself does between two processes over loopback, in batches like those of the bench.

Run as a module it is the other process. Asked to, both ends hash what they send and receive, with
our own code for that: nothing that verifies can be quicker. What must not live here: anything of
ours on the wire.
"""

import socket
import struct
import sys
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.checksum import checksum

Area = npt.NDArray[np.uint8]

_HEAD: Final = struct.Struct("<cQI")
_SEND, _TAKE, _TAKE_HASHED = b"s", b"t", b"h"


class Hashing(Enum):
    """What is done with the bytes besides moving them."""

    NONE = "none"
    VERIFIED = "verified"
    """Who receives hashes each part; of a put who sends does too, to say what it must be."""


class RawPeer:
    """The near end of one connection."""

    def __init__(self, port: int, pid: int) -> None:
        self.pid = pid
        self._socket = socket.create_connection(("127.0.0.1", port), 10.0)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, parts: list[Area], hashing: Hashing) -> None:
        """Receive as many bytes as the parts have, into them."""
        self._socket.sendall(_HEAD.pack(_SEND, parts[0].nbytes, len(parts)))
        receive = _receive if hashing is Hashing.NONE else _receive_hashed
        for part in parts:
            receive(self._socket, part.data)

    def put(self, parts: list[Area], hashing: Hashing) -> None:
        """Send the parts, and wait until the other end has them."""
        command = _TAKE if hashing is Hashing.NONE else _TAKE_HASHED
        self._socket.sendall(_HEAD.pack(command, parts[0].nbytes, len(parts)))
        for part in parts:
            if hashing is Hashing.VERIFIED:
                checksum(part.data)
            self._socket.sendall(part.data)
        _receive(self._socket, memoryview(bytearray(1)))

    def close(self) -> None:
        self._socket.close()


def serve(size_bytes: int) -> None:
    """The far end: says its port, then serves one connection until it ends."""
    memory = np.random.default_rng(2).integers(0, 255, size_bytes, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = memoryview(bytearray(_HEAD.size))
        at = 0
        while _receive(connection, head):
            command, size, count = _HEAD.unpack(head)
            at = at if at + size * count <= size_bytes else 0
            for i in range(count):
                part = memory[at + i * size :][:size]
                if command == _SEND:
                    connection.sendall(part)
                elif command == _TAKE:
                    _receive(connection, part)
                else:
                    _receive_hashed(connection, part)
            at += size * count
            if command != _SEND:
                connection.sendall(b"k")


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill the memory; False where the connection ended before."""
    at = 0
    while at < into.nbytes:
        count = connection.recv_into(into[at:], 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        at += count
    return True


def _receive_hashed(connection: socket.socket, into: memoryview) -> bool:
    """The same, and hash what has come."""
    is_whole = _receive(connection, into)
    checksum(into)
    return is_whole


if __name__ == "__main__":
    serve(int(sys.argv[1]))
