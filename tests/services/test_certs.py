"""`kvtier certs`: what it issues, where it puts it, and who may read it."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvtier import cli
from kvtier.errors import CallerError, ConfigError, KvtierError
from kvtier.security import certs, tokens
from kvtier.security.clock import Clock
from kvtier.security.roles import AccessRole, from_uri, new_principal

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def at(moment: datetime) -> Clock:
    return Clock(wall=moment.timestamp, monotonic=lambda: 0.0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_certificate_carries_role_and_name_and_is_signed_by_the_authority(tmp_path: Path) -> None:
    certs.init(tmp_path)
    worker = new_principal("w1", "worker", ["shared"], ["w1", "w1-*"])
    cert_path, _ = certs.issue_into(tmp_path, worker, ["127.0.0.1", "::1", "w1.example"])
    cert, authority = certificate(cert_path), certificate(tmp_path / certs.CA_CERT)
    cert.verify_directly_issued_by(authority)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert [from_uri(uri) for uri in uris] == [worker]
    assert names.get_values_for_type(x509.DNSName) == ["w1.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]


def test_keys_are_p256_and_certificates_serve_both_ends_and_sign_nothing(tmp_path: Path) -> None:
    certs.init(tmp_path)
    cert = certificate(certs.issue_into(tmp_path, new_principal("i", "index"), [])[0])
    key = cert.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    uses = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not cert.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    authority = certificate(tmp_path / certs.CA_CERT)
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)


def test_lifetimes_are_short_unless_asked_for(tmp_path: Path) -> None:
    certs.init(tmp_path, clock=at(NOW))
    store = new_principal("s", "store")
    cert = certificate(certs.issue_into(tmp_path, store, [], clock=at(NOW))[0])
    assert cert.not_valid_after_utc == NOW + timedelta(days=30)
    cert = certificate(certs.issue_into(tmp_path, store, [], days=2, clock=at(NOW))[0])
    assert cert.not_valid_after_utc == NOW + timedelta(days=2)
    assert cert.not_valid_before_utc <= NOW


@pytest.mark.parametrize("days", [0, -1, 399, 10**9])
def test_a_lifetime_beyond_the_ceiling_is_refused(tmp_path: Path, days: int) -> None:
    certs.init(tmp_path)
    with pytest.raises(CallerError, match="days"):
        certs.issue_into(tmp_path, new_principal("s", "store"), [], days=days)
    with pytest.raises(CallerError, match="days"):
        certs.add_token(tmp_path, new_principal("s", "store"), days=days)
    assert not (tmp_path / certs.TOKENS).exists()


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    certs.init(tmp_path, days=10, clock=at(NOW))
    with pytest.raises(CallerError, match="authority ends"):
        certs.issue_into(tmp_path, new_principal("s", "store"), [], days=11, clock=at(NOW))


@pytest.mark.parametrize("host", ["", "a b", "-x", "x/", "1.2.3.4:5", "host\n", "ä.example"])
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    certs.init(tmp_path)
    with pytest.raises(CallerError, match="host"):
        certs.issue_into(tmp_path, new_principal("s", "store"), [host])


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    certs.init(folder)
    certs.issue_into(folder, new_principal("r", "router"), [])
    certs.add_token(folder, new_principal("r", "router"))
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(
        ["ca.crt", "ca.key", "router-r.crt", "router-r.key", "tokens.toml"], 0o600
    )


def test_an_authority_is_never_overwritten(tmp_path: Path) -> None:
    certs.init(tmp_path)
    before = (tmp_path / certs.CA_KEY).read_bytes()
    with pytest.raises(ConfigError, match="already has an authority"):
        certs.init(tmp_path)
    assert (tmp_path / certs.CA_KEY).read_bytes() == before


def test_without_or_with_a_broken_authority_nothing_is_issued(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        certs.issue_into(tmp_path, new_principal("r", "router"), [])
    certs.init(tmp_path)
    (tmp_path / certs.CA_KEY).write_bytes(b"no key")
    with pytest.raises(ConfigError, match="no certificate and key"):
        certs.issue_into(tmp_path, new_principal("r", "router"), [])


def test_a_token_is_stored_as_a_hash_beside_the_older_ones(tmp_path: Path) -> None:
    router = new_principal("r1", "router")
    first = certs.add_token(tmp_path, router, clock=at(NOW))
    second = certs.add_token(tmp_path, router, days=5, clock=at(NOW))
    data = (tmp_path / certs.TOKENS).read_bytes()
    assert first.encode() not in data
    assert second.encode() not in data
    entries = tokens.parse_entries(data)
    assert set(entries) == {tokens.hashed(first), tokens.hashed(second)}
    assert entries[tokens.hashed(second)].principal == router
    assert entries[tokens.hashed(second)].expires_at == (NOW + timedelta(days=5)).timestamp()


def test_adding_a_token_drops_the_expired_ones(tmp_path: Path) -> None:
    old = certs.add_token(tmp_path, new_principal("a", "router"), days=1, clock=at(NOW))
    later = at(NOW + timedelta(days=1))
    new = certs.add_token(tmp_path, new_principal("b", "router"), clock=later)
    entries = tokens.parse_entries((tmp_path / certs.TOKENS).read_bytes())
    assert tokens.hashed(old) not in entries
    assert tokens.hashed(new) in entries


def test_a_broken_tokens_file_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / certs.TOKENS).write_text("token = 3", encoding="utf-8")
    with pytest.raises(ConfigError, match="tokens file"):
        certs.add_token(tmp_path, new_principal("a", "router"))
    assert (tmp_path / certs.TOKENS).read_text(encoding="utf-8") == "token = 3"


def test_patterns_with_any_characters_survive_the_tokens_file(tmp_path: Path) -> None:
    odd = new_principal("a", "store", ['q"uote', "back\\slash", "ü\x7f\n"], ["a/b?c&d=*"])
    token = certs.add_token(tmp_path, odd)
    entries = tokens.parse_entries((tmp_path / certs.TOKENS).read_bytes())
    assert entries[tokens.hashed(token)].principal == odd


def test_show_says_who_and_how_long_yet(tmp_path: Path) -> None:
    certs.init(tmp_path, clock=at(NOW))
    certs.issue_into(tmp_path, new_principal("w1", "worker"), ["10.0.0.9"], clock=at(NOW))
    certs.add_token(tmp_path, new_principal("r1", "router"), days=90, clock=at(NOW))
    shown = certs.show(tmp_path, at(NOW + timedelta(days=31)))
    assert "ca.crt: authority, 334 days left" in shown
    assert "worker-w1.crt: worker w1 (scopes: none; instances: w1) at 10.0.0.9, EXPIRED" in shown
    assert "router r1 (scopes: *; instances: r1), 59 days left" in shown


def test_show_of_a_folder_without_anything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither"):
        certs.show(tmp_path)


# The command


def test_the_command_makes_everything_that_a_cluster_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "pki")
    issue = ["--role", "worker", "--name", "w1", "--host", "127.0.0.1", "--host", "w1"]
    assert cli.main(["certs", "init", folder]) == 0
    assert cli.main(["certs", "issue", folder, *issue, "--days", "7"]) == 0
    capsys.readouterr()
    grant = ["--role", "bridge", "--name", "b1", "--instance", "vllm-*"]
    assert cli.main(["certs", "token", folder, *grant]) == 0
    out, err = capsys.readouterr()
    token = out.strip()
    assert token not in err
    entries = tokens.parse_entries((Path(folder) / certs.TOKENS).read_bytes())
    principal = entries[tokens.hashed(token)].principal
    assert (principal.role, principal.instances) == (AccessRole.BRIDGE, ("vllm-*",))
    assert cli.main(["certs", "show", folder]) == 0
    shown = capsys.readouterr().out
    assert token not in shown
    assert "worker w1" in shown
    assert "bridge b1" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["issue", "--role", "worker", "--name", "../w1"],
        ["issue", "--role", "worker", "--name", "w1", "--days", "0"],
        ["issue", "--role", "worker", "--name", "w1", "--instance", "*a*"],
        ["token", "--role", "worker", "--name", "a b"],
        ["init"],
    ],
)
def test_the_command_refuses_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    certs.init(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    action, *rest = arguments
    assert cli.main(["certs", action, str(tmp_path), *rest]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_grants_no_local_role(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        cli.main(["certs", "token", str(tmp_path), "--role", "local", "--name", "x"])
    assert not list(tmp_path.iterdir())


# The tokens file as an attacker or a tired operator would write it

HEX = "ab" * 32


def entry(**changes: str) -> str:
    lines = {
        "name": '"r1"',
        "role": '"router"',
        "sha256": f'"{HEX}"',
        "expires": "2031-01-01T00:00:00Z",
    }
    lines |= changes
    rows = [f"{key} = {value}" for key, value in lines.items() if value]
    return "[[token]]\n" + "\n".join(rows) + "\n"


def test_a_tokens_file_without_tokens_admits_nobody() -> None:
    assert dict(tokens.parse_entries(b"token = []")) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "token = 1",
        "token = [1]",
        "tokens = []",
        entry() + entry(),
        entry() + "\n[other]\n",
        entry(name=""),
        entry(name="3"),
        entry(name='"a b"'),
        entry(role='"root"'),
        entry(role='"local"'),
        entry(role="[]"),
        entry(sha256='"abcd"'),
        entry(sha256=f'"{HEX.upper()}"'),
        entry(sha256=""),
        entry(expires=""),
        entry(expires="2031-01-01T00:00:00"),
        entry(expires="2031-01-01"),
        entry(expires="4102444800"),
        entry(scopes='"*"'),
        entry(scopes="[1]"),
        entry(scopes='["a*b"]'),
        entry(instances='[""]'),
        entry(instances=str(["x"] * 65)),
        entry(admin="true"),
    ],
)
def test_a_tokens_file_with_anything_unclear_in_it_is_refused_whole(text: str) -> None:
    with pytest.raises(ConfigError, match="tokens file"):
        tokens.parse_entries(text.encode())


def test_a_good_entry_is_read_with_the_defaults_of_its_role() -> None:
    (read,) = tokens.parse_entries(entry().encode()).values()
    assert read.principal == new_principal("r1", "router")
    assert read.principal.scopes == ("*",)
    assert read.sha256 == bytes.fromhex(HEX)


def test_a_writing_that_fails_is_an_error_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / certs.TOKENS).mkdir()
    with pytest.raises(KvtierError):
        certs.add_token(tmp_path, new_principal("a", "router"))
    assert [path.name for path in tmp_path.iterdir()] == [certs.TOKENS]
