"""Who may call the endpoint. What must not live here: tenants, quotas (they are the router's)."""

from collections.abc import Callable
from typing import Final, TypeAlias

from kvtier.errors import ForbiddenError, UnauthenticatedError
from kvtier.security import AccessRole, Denial
from kvtier.security.tokens import TokenBook

Admit: TypeAlias = Callable[[str | None], None]
"""Takes the bearer token of a call, None where it has none; raises where it may not be made."""

CALLERS: Final = frozenset({AccessRole.ROUTER, AccessRole.OPERATOR})
"""Who may ask for answers."""
CONTROLLERS: Final = frozenset({AccessRole.OPERATOR})
"""Who may end the worker."""
_SCHEME: Final = "bearer "


def admit_anyone(token: str | None) -> None:
    """For a loopback address without credentials."""


def admit_by(book: TokenBook, roles: frozenset[AccessRole] = CALLERS) -> Admit:
    """Admit those whose token `book` has and whose role is one of `roles`."""

    def admit(token: str | None) -> None:
        principal = Denial.MISSING if token is None else book.find(token)
        if isinstance(principal, Denial):
            raise UnauthenticatedError("no valid credentials")
        if principal.role not in roles:
            raise ForbiddenError("not allowed")

    return admit


def bearer(authorization: str | None) -> str | None:
    """The token of an Authorization header. Pure."""
    if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return authorization[len(_SCHEME) :].strip()
