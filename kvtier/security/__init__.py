"""Identity and access: TLS, tokens, roles, and the servers and channels made with them.

A service needs `ListenConfig`, a `Policy`, `new_server` and, in its handlers, `caller()`; a client
needs `DialConfig` and a `Dialer`. What must not live here: tenants' keys and salts.
"""

from kvtier.security.endpoints import Dialer, SecureServer, check_dial, check_listen, new_server
from kvtier.security.guard import Guard, caller
from kvtier.security.roles import (
    ANYONE,
    AccessRole,
    Policy,
    Principal,
    new_principal,
    without_method,
    without_policy,
)
from kvtier.security.tokens import Denial

__all__ = [
    "ANYONE",
    "AccessRole",
    "Denial",
    "Dialer",
    "Guard",
    "Policy",
    "Principal",
    "SecureServer",
    "caller",
    "check_dial",
    "check_listen",
    "new_principal",
    "new_server",
    "without_method",
    "without_policy",
]
