"""From the status of a failed call to our error tree: gRPC's exceptions end here.

What must not live here: the other direction, which is each error class's own `grpc_status`.
"""

from collections.abc import Mapping
from typing import Final

import grpc
import grpc.aio

from kvtier.errors import (
    BackendError,
    CallerError,
    DeadlineError,
    FencedError,
    ForbiddenError,
    IdentityError,
    KvtierError,
    LimitError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)

_CLASSES: Final[Mapping[grpc.StatusCode, type[KvtierError]]] = {
    grpc.StatusCode[kind.grpc_status]: kind
    for kind in (
        CallerError,
        LimitError,
        IdentityError,
        UnauthenticatedError,
        ForbiddenError,
        FencedError,
        OverloadedError,
        UnavailableError,
        DeadlineError,
    )
} | {grpc.StatusCode.CANCELLED: UnavailableError}
"""Whatever else a service says is its own failure. CANCELLED: the channel was closed under us."""


def error_of(error: grpc.aio.AioRpcError, target: str) -> KvtierError:
    """The error that a failed call means to its caller; says whom it called. Raises nothing."""
    kind = _CLASSES.get(error.code(), BackendError)
    return kind(f"{target}: {error.details() or error.code().name}")
