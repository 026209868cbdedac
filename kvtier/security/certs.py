"""The command `kvtier certs`: a development authority, its certificates, and tokens.

Keys are ECDSA P-256, lifetimes short, files readable by their owner only. For production any other
authority does as well: it has to put `kvtier://role/name` into a certificate as its URI name.

What must not live here: how services check what is issued here (`tls`, `tokens`).
"""

import argparse
import datetime
import ipaddress
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvtier.errors import CallerError, ConfigError
from kvtier.limits import CREDENTIAL_DAYS_MAX
from kvtier.security import files, tokens
from kvtier.security.clock import SYSTEM, Clock
from kvtier.security.roles import GRANTABLE, Principal, from_uri, new_principal, to_uri

CA_CERT: Final = "ca.crt"
CA_KEY: Final = "ca.key"
TOKENS: Final = "tokens.toml"
CA_DAYS: Final = 365
CERT_DAYS: Final = 30
TOKEN_DAYS: Final = 90
DAY_S: Final = 86_400
_SKEW: Final = datetime.timedelta(minutes=5)
_DNS: Final = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, both PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Validity:
    """From when on, and for how many days, something is valid."""

    now: datetime.datetime
    days: int

    def __post_init__(self) -> None:
        if not 1 <= self.days <= CREDENTIAL_DAYS_MAX:
            raise CallerError(f"days {self.days} is not within 1..{CREDENTIAL_DAYS_MAX}")

    @property
    def end(self) -> datetime.datetime:
        return self.now + datetime.timedelta(days=self.days)


# Pure making


def new_authority(validity: Validity) -> Issued:
    """A self-signed authority that may sign end certificates and nothing below them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvtier development authority")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(name, name, key.public_key(), validity)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    return _pem(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Issued, principal: Principal, hosts: Sequence[str], validity: Validity
) -> Issued:
    """A certificate for both ends of a connection: the principal as URI, the hosts it serves at.

    CallerError for a host that is neither an address nor a DNS name, or an authority that ends
    before the certificate would.
    """
    issuer, issuer_key = _parse(authority)
    if validity.end > issuer.not_valid_after_utc:
        ends = issuer.not_valid_after_utc.date().isoformat()
        raise CallerError(f"the authority ends on {ends}, before {validity.days} days are over")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, principal.name[:64])])
    names = [x509.UniformResourceIdentifier(to_uri(principal)), *(_host(host) for host in hosts)]
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        _builder(name, issuer.subject, key.public_key(), validity)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer_id, critical=False)
    )
    return _pem(builder.sign(issuer_key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, validity: Validity
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity.now - _SKEW)
        .not_valid_after(validity.end)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS.fullmatch(host):
            raise CallerError(f"host {host[:80]!r} is neither an address nor a name") from None
        return x509.DNSName(host)


def _pem(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    return Issued(
        cert=cert.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _parse(authority: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        cert = x509.load_pem_x509_certificate(authority.cert)
        key = serialization.load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError("the authority's files hold no certificate and key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("the authority's key is not ECDSA")
    return cert, key


# Folders


def init(folder: Path, days: int = CA_DAYS, clock: Clock = SYSTEM) -> None:
    """Make a folder with a new authority. ConfigError where one is there: it would be orphaned."""
    if (folder / CA_KEY).exists() or (folder / CA_CERT).exists():
        raise ConfigError(f"{folder} already has an authority")
    authority = new_authority(Validity(_now(clock), days))
    files.make_private_folder(folder)
    files.write_private(folder / CA_KEY, authority.key)
    files.write_private(folder / CA_CERT, authority.cert)


def issue_into(
    folder: Path,
    principal: Principal,
    hosts: Sequence[str],
    days: int = CERT_DAYS,
    clock: Clock = SYSTEM,
) -> tuple[Path, Path]:
    """Write `ROLE-NAME.crt` and `.key`, in place of older ones; returns their paths."""
    authority = Issued(files.read(folder / CA_CERT), files.read(folder / CA_KEY))
    issued = issue(authority, principal, hosts, Validity(_now(clock), days))
    stem = f"{principal.role}-{principal.name}"
    cert, key = folder / f"{stem}.crt", folder / f"{stem}.key"
    files.write_private(key, issued.key)
    files.write_private(cert, issued.cert)
    return cert, key


def add_token(
    folder: Path, principal: Principal, days: int = TOKEN_DAYS, clock: Clock = SYSTEM
) -> str:
    """Append a new token's hash to the tokens file and return the token, kept nowhere else.

    Older tokens of the same name stay valid until they expire, so that a fleet can change over;
    expired entries are dropped.
    """
    validity = Validity(_now(clock), days)
    path = folder / TOKENS
    files.make_private_folder(folder)
    entries = dict(tokens.parse_entries(files.read(path))) if path.exists() else {}
    now = clock.wall()
    kept = [entry for entry in entries.values() if entry.expires_at > now]
    token = tokens.mint()
    kept.append(tokens.TokenEntry(principal, tokens.hashed(token), validity.end.timestamp()))
    text = "\n".join(tokens.format_entry(entry) for entry in kept)
    tokens.parse_entries(text.encode())
    files.write_private(path, text.encode())
    return token


def show(folder: Path, clock: Clock = SYSTEM) -> str:
    """One line for each certificate and token of a folder: who, and how long yet."""
    lines = [_show_cert(path, clock) for path in sorted(folder.glob("*.crt"))]
    book = folder / TOKENS
    if book.exists():
        lines += [
            _show_token(entry, clock) for entry in tokens.parse_entries(files.read(book)).values()
        ]
    if not lines:
        raise ConfigError(f"{folder} has neither certificates nor tokens")
    return "\n".join(lines) + "\n"


def _show_cert(path: Path, clock: Clock) -> str:
    try:
        cert = x509.load_pem_x509_certificate(files.read(path))
    except ValueError:
        raise ConfigError(f"{path} holds no PEM certificate") from None
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        who = "authority"
    else:
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        who = _who(from_uri(uris[0])) if uris else "nobody"
        hosts = [*names.get_values_for_type(x509.DNSName)]
        hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
        who += f" at {', '.join(hosts)}" if hosts else ""
    left = cert.not_valid_after_utc.timestamp() - clock.wall()
    return f"{path.name}: {who}, {_left(left)}"


def _show_token(entry: tokens.TokenEntry, clock: Clock) -> str:
    digest = entry.sha256.hex()[:12]
    return f"token {digest}: {_who(entry.principal)}, {_left(entry.expires_at - clock.wall())}"


def _who(principal: Principal) -> str:
    scopes = ", ".join(principal.scopes) or "none"
    instances = ", ".join(principal.instances)
    return f"{principal.role} {principal.name} (scopes: {scopes}; instances: {instances})"


def _left(seconds: float) -> str:
    return f"{seconds / DAY_S:.0f} days left" if seconds > 0 else "EXPIRED"


def _now(clock: Clock) -> datetime.datetime:
    # Certificates and the tokens file carry whole seconds.
    return datetime.datetime.fromtimestamp(int(clock.wall()), datetime.UTC)


# The command


def command(argv: list[str]) -> int:
    """`kvtier certs`: writes to the named folder and to standard output; returns the status."""
    asked = _parser().parse_args(argv)
    folder = cast("Path", asked.folder)
    days = cast("int", getattr(asked, "days", 0))
    if asked.action == "init":
        init(folder, days)
        sys.stdout.write(f"authority in {folder}: keep {CA_KEY} away from services\n")
    elif asked.action == "issue":
        cert, key = issue_into(folder, _principal(asked), asked.host, days)
        sys.stdout.write(f"{cert}\n{key}\n")
    elif asked.action == "token":
        token = add_token(folder, _principal(asked), days)
        sys.stderr.write(f"hash in {folder / TOKENS}; this is shown once:\n")
        sys.stdout.write(f"{token}\n")
    else:
        sys.stdout.write(show(folder))
    return 0


def _principal(asked: argparse.Namespace) -> Principal:
    return new_principal(asked.name, asked.role, asked.scope, asked.instance)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier certs", description="Development authority, certificates and tokens."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _action(actions, "init", "make a folder with a new authority", CA_DAYS)
    issuing = _action(actions, "issue", "issue a certificate and its key", CERT_DAYS)
    _add_principal(issuing)
    issuing.add_argument(
        "--host", action="append", default=[], help="address or name it serves at (repeatable)"
    )
    _add_principal(_action(actions, "token", "add a token and print it once", TOKEN_DAYS))
    _action(actions, "show", "list certificates and tokens", None)
    return parser


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    days: int | None,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("folder", type=Path, metavar="DIR")
    if days is not None:
        parser.add_argument("--days", type=int, default=days, help=f"lifetime (default {days})")
    return parser


def _add_principal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", required=True, choices=sorted(GRANTABLE))
    parser.add_argument("--name", required=True)
    patterns = "name or prefix and * (repeatable)"
    parser.add_argument(
        "--scope", action="append", default=[], help=f"tenant scope it may speak for, {patterns}"
    )
    parser.add_argument(
        "--instance", action="append", default=[], help=f"instance it may publish as, {patterns}"
    )
