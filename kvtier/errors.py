"""The one exception tree of kvtier. A miss is not an error and has no class here.

    KvtierError
    ├── CallerError            the caller's argument is wrong (also a ValueError)
    │   ├── LimitError         ... by exceeding a ceiling of limits.py
    │   ├── ConfigError        ... in a configuration file, variable or flag
    │   ├── IdentityError      ... by contradicting the identity of a pool, namespace or card
    │   └── NotFoundError      ... by naming a model or worker that is not there
    ├── FrameError             bytes that are not the frame asked for: a miss for the reader
    ├── UnauthenticatedError   no, wrong or expired credentials
    ├── ForbiddenError         known caller, not allowed
    ├── FencedError            a dead epoch speaks
    ├── OverloadedError        a queue, quota or budget is full: try again later
    ├── UnavailableError       a service or tier cannot be reached
    ├── DeadlineError          a wait reached its deadline
    └── BackendError           a tier's own failure, translated at the edge where it entered

Each class says how it looks on gRPC and HTTP and whether the same call may succeed later. What must
not live here: foreign exceptions, and messages with keys, tokens or prompt text in them.
"""

from enum import StrEnum
from typing import ClassVar


class KvtierError(Exception):
    """Root of the tree. Raise a subclass."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class CallerError(KvtierError, ValueError):
    """The caller's argument is wrong; the message names the argument and both values."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class LimitError(CallerError):
    """An argument exceeds a ceiling of limits.py."""

    grpc_status = "OUT_OF_RANGE"
    http_status = 413


class ConfigError(CallerError):
    """A configuration value is missing, unknown or contradicts another."""


class IdentityError(CallerError):
    """Two descriptions of one pool, namespace or card contradict each other."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409


class NotFoundError(CallerError):
    """The caller names a model or worker that is not there."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class FrameFault(StrEnum):
    """What is wrong with a frame; the label of `kvtier_corrupt_blocks_total`."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    """Of another release: a miss, not corruption."""
    HEADER_CHECKSUM = "header_checksum"
    HEADER_FIELD = "header_field"
    """A well-checksummed header holds what this version never writes."""
    KEY = "key"
    NAMESPACE = "namespace"
    CODEC = "codec"
    LENGTH = "length"
    PAYLOAD_CHECKSUM = "payload_checksum"


class FrameError(KvtierError):
    """Bytes are not the block frame that was asked for: readers count the fault and miss."""

    grpc_status = "DATA_LOSS"

    def __init__(self, fault: FrameFault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault


class UnauthenticatedError(KvtierError):
    """No, wrong or expired credentials."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class ForbiddenError(KvtierError):
    """The caller is known and may not do this."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class FencedError(KvtierError):
    """A publisher of a dead epoch speaks; it must stop."""

    grpc_status = "ABORTED"
    http_status = 409


class OverloadedError(KvtierError):
    """A queue, quota or budget is full."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class UnavailableError(KvtierError):
    """A service or tier cannot be reached."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class DeadlineError(KvtierError):
    """A wait reached its deadline."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    retryable = True


class BackendError(KvtierError):
    """A tier's own failure (disk, Redis, peer), translated where it entered."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True
