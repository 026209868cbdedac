"""The certificate of a HTTPS listener, followed: a renewed one is shown to new connections.

What must not live here: certificates of clients, which identify themselves otherwise.
"""

import ssl
from typing import Final

from kvtier.errors import ConfigError
from kvtier.sections import TlsConfig
from kvtier.security import tls
from kvtier.security.clock import SYSTEM, Clock
from kvtier.telemetry.logs import EventLog

LOG: Final = EventLog("kvtier_router.web")


class ServerTls:
    """A context whose certificate is that of the files."""

    def __init__(self, config: TlsConfig, clock: Clock = SYSTEM) -> None:
        """ConfigError for files that are no certificate and its key."""
        self._config = config
        self._source = tls.watch(config, clock)
        self._shown = self._source.get()
        self._errors = 0
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def follow(self) -> None:
        """Take a renewed certificate over; one that is broken leaves the old one. Called a few
        times a second, looks at the files once a second."""
        pem = self._source.get()
        if self._source.reload_errors != self._errors:
            self._errors = self._source.reload_errors
            LOG.error("certificate not renewed", reason=self._source.last_error)
        if pem is not self._shown:
            self._shown = pem
            try:
                self._load()
            except ConfigError as error:
                LOG.error("certificate not renewed", reason=str(error))

    def _load(self) -> None:
        cert, key = self._config.cert_file, self._config.key_file
        if cert is None or key is None:
            raise ConfigError("a listener needs cert_file and key_file")
        try:
            self.context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{cert}: {error}") from error
