"""What an operator can set of the endpoint. What must not live here: addresses, credentials."""

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.limits import HTTP_CONNECTIONS_MAX, HTTP_HEAD_MS_MAX, REQUEST_BYTES_MAX


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Ceilings and deadlines of the HTTP endpoint."""

    body_bytes_max: int = 16 << 20
    """Of one request."""
    bodies_bytes_max: int = 256 << 20
    """Of all requests that are being read or prepared."""
    connections_max: int = 2048
    """At once; what comes beyond is answered 429 and closed."""
    head_ms_max: int = 10_000
    """For a TLS handshake, and again to send the head of a request: from the start of a connection,
    later from a head's first byte."""
    body_ms_max: int = 30_000
    """To send a body."""
    requests_max: int = 1024
    """Requests at once, of any kind; more are turned away."""
    generation_ms_max: int = 3_600_000
    """From a request's body to the end of its answer."""
    write_ms_max: int = 60_000
    """For a client to take what it has asked for."""
    check_ms_max: int = 10_000
    """For the token that /health computes."""
    check_fresh_ms: int = 1_000
    """How long that token's verdict answers further probes."""

    def __post_init__(self) -> None:
        if not 1 <= self.body_bytes_max <= REQUEST_BYTES_MAX:
            raise ConfigError(f"body_bytes_max must be 1 to {REQUEST_BYTES_MAX}")
        if self.bodies_bytes_max < self.body_bytes_max:
            raise ConfigError("bodies_bytes_max is less than body_bytes_max")
        if not 1 <= self.connections_max <= HTTP_CONNECTIONS_MAX:
            raise ConfigError(f"connections_max must be 1 to {HTTP_CONNECTIONS_MAX}")
        if not 1 <= self.head_ms_max <= HTTP_HEAD_MS_MAX:
            raise ConfigError(f"head_ms_max must be 1 to {HTTP_HEAD_MS_MAX}")
        numbers = (
            self.body_ms_max, self.requests_max, self.generation_ms_max, self.write_ms_max,
            self.check_ms_max,
        )  # fmt: skip
        if min(numbers) < 1 or self.check_fresh_ms < 0:
            raise ConfigError("ceilings and deadlines of the endpoint must be positive")
