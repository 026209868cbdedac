"""TLS identities: PEM files to gRPC credentials, renewed without restart, and who a peer is.

What must not live here: issuing certificates (`certs`), and tokens.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from kvtier.errors import CallerError, ConfigError
from kvtier.sections import TlsConfig
from kvtier.security import files
from kvtier.security.clock import SYSTEM, Clock
from kvtier.security.roles import Principal, from_uri

_PEER_URI = "peer_uri"


@dataclass(frozen=True, slots=True)
class Pem:
    """Bytes of one end of a connection, checked to fit together."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    expires_at: float
    """Seconds since 1970 when the own certificate ends; infinite without one."""


def load_pem(config: TlsConfig, now: float) -> Pem:
    """Read and check the files. ConfigError for what is no certificate, no key, or does not fit.

    `now` is wall time: an own certificate that has ended is refused, since every peer would.
    """
    cert = files.read(config.cert_file) if config.cert_file is not None else None
    key = files.read(config.key_file) if config.key_file is not None else None
    ca = files.read(config.ca_file) if config.ca_file is not None else None
    if ca is not None:
        _certificates(ca, config.ca_file)
    expires_at = float("inf")
    if cert is not None and key is not None:
        leaf = _certificates(cert, config.cert_file)[0]
        if _info(leaf.public_key()) != _key_info(key, config.key_file):
            raise ConfigError(f"{config.key_file} is not the key of {config.cert_file}")
        expires_at = leaf.not_valid_after_utc.timestamp()
        if now >= expires_at:
            ended = datetime.datetime.fromtimestamp(expires_at, datetime.UTC).isoformat()
            raise ConfigError(f"{config.cert_file} ended at {ended}")
    return Pem(cert, key, ca, expires_at)


def _certificates(data: bytes, path: Path | None) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise ConfigError(f"{path} holds no PEM certificate") from None


def _key_info(data: bytes, path: Path | None) -> bytes:
    """DER of the public half of a private key."""
    try:
        return _info(serialization.load_pem_private_key(data, None).public_key())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} holds no PEM private key without a password") from None


def _info(public_key: PublicKeyTypes) -> bytes:
    return public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def watch(config: TlsConfig, clock: Clock = SYSTEM) -> files.Watched[Pem]:
    """The files of a section, followed. ConfigError where they cannot be used now."""
    named = (config.cert_file, config.key_file, config.ca_file)
    paths = [path for path in named if path is not None]
    return files.Watched.open(paths, lambda: load_pem(config, clock.wall()), clock)


def server_credentials(source: files.Watched[Pem]) -> grpc.ServerCredentials:
    """Credentials that show the newest good certificate to every new connection.

    With a `ca_file` a client without a certificate of those authorities gets no connection.
    """
    shown = [source.get()]

    def newest() -> grpc.ServerCertificateConfiguration | None:
        # Called by a thread of gRPC for every handshake; None means no change.
        pem = source.get()
        if pem is shown[0]:
            return None
        shown[0] = pem
        return _configuration(pem)

    first = shown[0]
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        newest,  # type: ignore[arg-type]  # gRPC documents None, the stub does not know it
        require_client_authentication=first.ca is not None,
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    if pem.cert is None or pem.key is None:
        raise ConfigError("a listener needs cert_file and key_file")
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """Credentials of a client; they do not change, so a renewed certificate needs a new channel."""
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


@dataclass(frozen=True, slots=True)
class Itself:
    """How a process of a service's own machine calls that service, by the service's own files."""

    credentials: grpc.ChannelCredentials
    name: str
    """In the certificate: by which others call, and which this machine need not even know."""


def to_itself(config: TlsConfig, clock: Clock = SYSTEM) -> Itself:
    """Trusts the certificate of a listener and nothing else, and shows it where one is wanted.

    ConfigError for files that no listener could use.
    """
    pem = load_pem(config, clock.wall())
    if pem.cert is None:
        raise ConfigError("a listener needs cert_file and key_file")
    leaf = _certificates(pem.cert, config.cert_file)[0]
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ConfigError(f"{config.cert_file} names no host") from None
    hosts = [*names.get_values_for_type(x509.DNSName)]
    hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    if not hosts:
        raise ConfigError(f"{config.cert_file} names no host")
    # A wildcard is no name to call by.
    name = hosts[0].replace("*", "any", 1)
    return Itself(grpc.ssl_channel_credentials(pem.cert, pem.key, pem.cert), name)


def identity(auth_context: Mapping[str, Iterable[bytes]]) -> Principal | None:
    """Who the verified certificate of a gRPC peer names; None where it names nobody or two.

    Only URI names of our scheme count. The common name does not: it carries no role, and other
    software of the same authority may choose it.
    """
    found: list[Principal] = []
    for raw in auth_context.get(_PEER_URI, ()):
        text = raw.decode("utf-8", "replace")
        if text.startswith("kvtier:"):
            try:
                found.append(from_uri(text))
            except CallerError:
                return None
    return found[0] if len(found) == 1 else None
