"""Configuration: three sources, one result, no unknown key, no secret shown."""

import dataclasses
import enum
import importlib
import tempfile
import tomllib
from dataclasses import field
from pathlib import Path
from typing import ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import config, sections
from kvtier.config import Root, Secret, describe, load, settings
from kvtier.errors import ConfigError
from kvtier.limits import CONFIG_BYTES_MAX
from kvtier.sections import DialConfig, ListenConfig, Reach, TelemetryConfig, parse_address

REPOSITORY = Path(__file__).resolve().parents[2]


class Mode(enum.StrEnum):
    FAST = "fast"
    CAREFUL = "careful"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """A section with a value that has no default."""

    url: str
    """Where."""
    weight: float = 0.5
    """How much."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample(Root):
    """A service of tests."""

    SECTION: ClassVar[str] = "sample"

    lease_ms: int = 3000
    """Silence after which a holder is hidden, 100 % of the time."""
    ratio: float = 0.25
    """A share."""
    mode: Mode = Mode.FAST
    """How."""
    level: Level = Level.LOW
    """How high."""
    zones: tuple[str, ...] = ("a",)
    """Where."""
    data_dir: Path | None = None
    """Folder."""
    password: Secret | None = None
    """Password of the other side."""
    limit: int | None = None
    """At most."""
    nested: Nested | None = None
    """A section that may be absent."""
    listen: ListenConfig = field(default_factory=lambda: ListenConfig(bind="127.0.0.1:7400"))
    """Where to listen."""

    def __post_init__(self) -> None:
        if self.lease_ms <= 0:
            raise ConfigError(f"lease_ms {self.lease_ms} is not positive")


@dataclasses.dataclass(frozen=True, slots=True)
class Shared(Root):
    """All shared sections at once."""

    SECTION: ClassVar[str] = "shared"

    listen: ListenConfig = field(default_factory=ListenConfig)
    """Where to listen."""
    dial: DialConfig = field(default_factory=DialConfig)
    """Whom to call."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """What to tell."""


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sample.toml"
    path.write_text(text, encoding="utf-8")
    return path


def sample(
    *argv: str, environ: dict[str, str] | None = None, toml_path: Path | None = None
) -> Sample:
    return load(Sample, argv, environ or {}, toml_path).config


# Sources


def test_without_any_source_everything_is_at_its_default() -> None:
    loaded = load(Sample, (), {})
    assert loaded.config == Sample()
    assert loaded.origins == {}


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'lease_ms = 1\nratio = 1\nmode = "careful"\n[listen]\nbind = "[::1]:1"')
    environ = {"KVTIER_SAMPLE_LEASE_MS": "2", "KVTIER_SAMPLE_RATIO": "2"}
    loaded = load(Sample, ["--lease-ms", "3"], environ, path)
    assert (loaded.config.lease_ms, loaded.config.ratio) == (3, 2.0)
    assert (loaded.config.mode, loaded.config.listen.bind) == (Mode.CAREFUL, "[::1]:1")
    assert loaded.origins["lease_ms"] == "flag --lease-ms"
    assert loaded.origins["ratio"] == "env KVTIER_SAMPLE_RATIO"
    assert loaded.origins["listen.bind"] == f"toml {path}"


def test_a_nested_field_has_a_short_and_a_full_flag() -> None:
    assert sample("--bind", "127.0.0.1:1").listen.bind == "127.0.0.1:1"
    assert sample("--listen-bind=127.0.0.1:2").listen.bind == "127.0.0.1:2"
    assert sample("--insecure").listen.insecure
    assert not sample(
        "--no-insecure", environ={"KVTIER_SAMPLE_LISTEN_INSECURE": "1"}
    ).listen.insecure


def test_two_fields_of_one_name_have_only_full_flags() -> None:
    flags = {flag for setting in settings(Shared) for flag in setting.flags}
    assert {"--listen-insecure", "--dial-insecure", "--bind"} <= flags
    assert "--insecure" not in flags


def test_the_config_flag_names_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, "lease_ms = 9")
    other = tmp_path / "other.toml"
    loaded = load(Sample, ["--config", str(path), "--print-config"], {}, other)
    assert loaded.config.lease_ms == 9
    assert loaded.print_only


def test_tuples_come_as_arrays_commas_and_repeated_flags(tmp_path: Path) -> None:
    assert sample(toml_path=toml(tmp_path, 'zones = ["x,y", "z"]')).zones == ("x,y", "z")
    assert sample(environ={"KVTIER_SAMPLE_ZONES": "x, y,,"}).zones == ("x", "y")
    assert sample("--zones", "x,y", "--zones", "z").zones == ("x", "y", "z")


def test_an_enum_is_its_value_or_its_name_in_lower_case() -> None:
    assert sample("--mode", "careful").mode is Mode.CAREFUL
    assert sample("--level", "high").level is Level.HIGH


def test_an_empty_variable_unsets_what_may_be_unset(tmp_path: Path) -> None:
    path = toml(tmp_path, 'data_dir = "/d"\nlimit = 4')
    environ = {"KVTIER_SAMPLE_DATA_DIR": "", "KVTIER_SAMPLE_LIMIT": ""}
    assert sample(toml_path=path).data_dir == Path("/d")
    result = sample(environ=environ, toml_path=path)
    assert (result.data_dir, result.limit) == (None, None)


def test_one_key_brings_an_optional_section_with_its_defaults() -> None:
    assert sample().nested is None
    assert sample("--url", "u").nested == Nested(url="u", weight=0.5)


def test_a_section_keeps_the_defaults_its_service_gave_it() -> None:
    listen = sample("--insecure").listen
    assert listen == ListenConfig(bind="127.0.0.1:7400", insecure=True)


# Refusals


@pytest.mark.parametrize(
    ("text", "wrong", "nearest"),
    [
        ("lease_sm = 1", "lease_sm", "lease_ms"),
        ('[listen]\nbnid = "x"', "listen.bnid", "listen.bind"),
        ("lease_ms.x = 1", None, None),
        ("listen = 3", "listen", "listen.bind"),
    ],
)
def test_an_unknown_key_in_the_file_is_refused(
    tmp_path: Path, text: str, wrong: str | None, nearest: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        sample(toml_path=toml(tmp_path, text))
    if wrong is not None:
        assert f"'{wrong}'" in str(caught.value)
        assert str(nearest) in str(caught.value)


def test_an_unknown_variable_or_flag_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"KVTIER_SAMPLE_LEASE'.*'KVTIER_SAMPLE_LEASE_MS'"):
        sample(environ={"KVTIER_SAMPLE_LEASE": "1"})
    with pytest.raises(ConfigError, match=r"'--leese-ms'.*'--lease-ms'"):
        sample("--leese-ms=4")
    with pytest.raises(ConfigError, match="unexpected argument 'word'"):
        sample("word")


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(ConfigError, match="'--lease'"):
        sample("--lease", "3")


def test_variables_of_other_services_and_of_the_orchestrator_are_left_alone() -> None:
    environ = {
        "KVTIER_OTHER_LEASE_MS": "1",
        "KVTIER_SAMPLE_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SAMPLE_SERVICE_PORT": "7400",
        "KVTIER_SAMPLE_SERVICE_PORT_GRPC": "7400",
        "KVTIER_SAMPLE_PORT": "tcp://10.0.0.1:7400",
        "KVTIER_SAMPLE_PORT_7400_TCP": "tcp://10.0.0.1:7400",
        "KVTIER_SAMPLE_PORT_7400_TCP_PORT": "7400",
        "KVTIER_SAMPLE_PORT_7400_TCP_ADDR": "10.0.0.1",
        "KVTIER_SAMPLE_PORT_7400_TCP_PROTO": "tcp",
    }
    assert sample(environ=environ) == Sample()
    with pytest.raises(ConfigError, match="KVTIER_SAMPLE_PORT"):
        sample(environ={"KVTIER_SAMPLE_PORT": "7400"})


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--lease-ms=3.5", "'3.5' is no int"),
        ("--lease-ms=", "'' is no int"),
        ("--lease-ms=0", "not positive"),
        ("--ratio=nan", "not finite"),
        ("--ratio=1e999", "not finite"),
        ("--ratio=half", "no float"),
        ("--mode=slow", "none of fast, careful"),
        ("--level=1", "none of low, high"),
        ("--weight=1", "nested.url is required"),
        ("--bind=nowhere", r"\[listen\] bind: 'nowhere' is not host:port"),
        ("--lease-ms", "expected one argument"),
        ("--zones=\udcff,a", "not valid text"),
        ("--cert-file=/x", "given together"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(argument: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sample(argument)


@pytest.mark.parametrize(
    "text",
    [
        'lease_ms = "1"',
        "lease_ms = true",
        "lease_ms = 1.0",
        "ratio = true",
        "ratio = inf",
        "mode = 1",
        "zones = 'a'",
        "zones = [1]",
        "data_dir = ''",
        "listen.insecure = 1",
        "listen.bind = []",
        "lease_ms =",
        "lease_ms = 1\nlease_ms = 2",
    ],
)
def test_a_file_with_a_wrong_type_is_refused_and_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"sample\.toml"):
        sample(toml_path=toml(tmp_path, text))


def test_a_file_that_is_missing_too_large_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        sample(toml_path=tmp_path / "absent.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        sample(toml_path=path)
    path.write_bytes(b"#" * (CONFIG_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="larger than"):
        sample(toml_path=path)


@given(st.binary(max_size=200))
def test_a_file_of_any_bytes_is_a_configuration_or_a_config_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.toml"
        path.write_bytes(data)
        try:
            result = sample(toml_path=path)
        except ConfigError:
            return
    assert isinstance(result, Sample)


@given(st.lists(st.text(min_size=1, max_size=12), max_size=3))
def test_any_arguments_are_a_configuration_or_a_config_error(words: list[str]) -> None:
    if any(word in {"-h", "--help"} for word in words):
        return
    try:
        result = sample(*words)
    except ConfigError:
        return
    assert isinstance(result, Sample)


def test_a_class_with_a_type_that_no_source_can_give_is_a_programming_error() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Odd(Root):
        """Odd."""

        SECTION: ClassVar[str] = "odd"
        table: dict[str, int] = field(default_factory=dict)

    with pytest.raises(TypeError, match=r"Odd\.table"):
        settings(Odd)


def test_help_shows_every_flag_and_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        sample("--help")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "100 %" in shown
    assert all(flag in shown for setting in settings(Sample) for flag in setting.flags)


# Secrets

CANARY = "hunter2-canary"


def test_a_secret_shows_itself_only_when_asked() -> None:
    secret = Secret(CANARY)
    assert CANARY not in f"{secret} {secret!r} {secret:>40} {[secret]} {Sample(password=secret)}"
    assert secret.reveal() == CANARY
    assert secret == Secret(CANARY)
    assert secret != Secret("x")
    assert len({secret, Secret(CANARY)}) == 1
    with pytest.raises(TypeError):
        secret.__reduce__()


def test_a_secret_comes_from_a_variable_the_file_or_a_file_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "password"
    own.write_text(CANARY + "\n", encoding="utf-8")
    in_file = toml(tmp_path, f'password = "{CANARY}"')
    for result in (
        sample(environ={"KVTIER_SAMPLE_PASSWORD": CANARY}),
        sample(environ={"KVTIER_SAMPLE_PASSWORD_FILE": str(own)}),
        sample("--password-file", str(own)),
        sample("--password-file", str(own), environ={"KVTIER_SAMPLE_PASSWORD": "other"}),
        sample(toml_path=in_file),
    ):
        assert result.password == Secret(CANARY)


def test_a_secret_has_no_flag_because_others_can_read_command_lines() -> None:
    with pytest.raises(ConfigError, match="unknown flag '--password'"):
        sample("--password", CANARY)


def test_a_secret_given_twice_in_one_source_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "password"
    own.write_text(CANARY, encoding="utf-8")
    environ = {"KVTIER_SAMPLE_PASSWORD": "a", "KVTIER_SAMPLE_PASSWORD_FILE": str(own)}
    with pytest.raises(ConfigError, match="given twice"):
        sample(environ=environ)


def test_a_secret_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="password_file: cannot read"):
        sample("--password-file", str(tmp_path / "absent"))
    (tmp_path / "empty").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is empty"):
        sample("--password-file", str(tmp_path / "empty"))


def test_errors_never_quote_a_secret(tmp_path: Path) -> None:
    path = toml(tmp_path, f'password = ["{CANARY}"]')
    with pytest.raises(ConfigError) as caught:
        sample(toml_path=path)
    assert CANARY not in str(caught.value)


# Showing


def test_the_description_masks_secrets_and_names_every_source(tmp_path: Path) -> None:
    path = toml(tmp_path, f'password = "{CANARY}"\nratio = 0.75')
    loaded = load(Sample, ["--bind", "[::1]:9"], {"KVTIER_SAMPLE_ZONES": "x,y"}, path)
    shown = describe(loaded)
    assert CANARY not in shown
    assert f'password = "***"  # toml {path}' in shown
    assert 'zones = ["x", "y"]  # env KVTIER_SAMPLE_ZONES' in shown
    assert 'bind = "[::1]:9"  # flag --bind' in shown
    assert "lease_ms = 3000  # default" in shown
    assert "# data_dir is not set  # default" in shown
    assert "# [nested] is not set" in shown


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    zones=st.lists(TEXT, max_size=3),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    lease_ms=st.integers(1, 2**62),
    level=st.sampled_from(Level),
    url=TEXT,
)
def test_the_description_is_toml_that_gives_the_same_values_again(
    zones: list[str], ratio: float, lease_ms: int, level: Level, url: str
) -> None:
    before = Sample(
        zones=tuple(zones), ratio=ratio, lease_ms=lease_ms, level=level, nested=Nested(url=url)
    )
    shown = tomllib.loads(describe(config.Loaded(before, {}, print_only=False)))
    assert shown["zones"] == zones
    assert (shown["ratio"], shown["lease_ms"]) == (ratio, lease_ms)
    assert shown["level"] == level.name.lower()
    assert shown["nested"]["url"] == url
    assert shown["listen"]["bind"] == before.listen.bind


# Every class that is shipped


def shipped() -> list[type[Root]]:
    """Root classes of all `config` modules of the services, and one with all shared sections."""
    found: list[type[Root]] = [Sample, Shared]
    for folder in (REPOSITORY / "services", REPOSITORY / "router"):
        for path in sorted(folder.rglob("*config.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            module = importlib.import_module(name)
            found += [
                item
                for item in vars(module).values()
                if isinstance(item, type) and issubclass(item, Root) and item is not Root
            ]
    return found


def section_classes(config_class: type) -> set[type]:
    found = {config_class}
    for field_type in (f.type for f in dataclasses.fields(cast("type[Sample]", config_class))):
        for part in getattr(field_type, "__args__", (field_type,)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                found |= section_classes(part)
    return found


def test_all_shared_sections_are_covered_here() -> None:
    classes = {
        item
        for item in vars(sections).values()
        if isinstance(item, type) and dataclasses.is_dataclass(item) and item.__name__ != "Address"
    }
    assert classes == section_classes(Shared) - {Shared}


@pytest.mark.parametrize("config_class", shipped(), ids=lambda c: c.__name__)
def test_every_section_is_frozen_slotted_and_every_field_documented(
    config_class: type[Root],
) -> None:
    for section in section_classes(config_class):
        parameters = cast("dict[str, object]", vars(section))["__dataclass_params__"]
        assert getattr(parameters, "frozen")  # noqa: B009
        assert "__slots__" in vars(section)
        assert not (section.__doc__ or f"{section.__name__}(").startswith(f"{section.__name__}(")
        docs = config.field_docs(section)
        names = [field.name for field in dataclasses.fields(cast("type[Sample]", section))]
        assert [name for name in names if not docs.get(name)] == []


def some_text(config_class: type[Root], setting: config.Setting, tmp_path: Path) -> str:
    """A text that is valid for a setting, in the form of a variable or flag: numbers by default."""
    if setting.secret_file:
        secret = tmp_path / "secret"
        is_url = setting.path[-1] == "url_file"
        text = "rediss://127.0.0.1" if is_url else "s3cret of a cluster"
        secret.write_text(text, encoding="utf-8")
        return str(secret)
    addresses = {"bind", "metrics_bind", "admin_bind", "targets", "sentinels", "peers", "http"}
    if setting.path[-1] in addresses:
        return "127.0.0.1:7"
    if setting.key in {"engine.events", "engine.replay"}:
        return "tcp://127.0.0.1:7"
    if setting.path[0] == "model" and setting.path[-1].endswith(("_digest", "namespace")):
        return "ab" * 32
    if setting.key == "model.adapters":
        return f"{'ab' * 32}:1:name"
    if setting.path[-1] == "quotas":
        return "dram:1:tenant:acme"
    if issubclass(setting.kind, enum.Enum):
        member = next(iter(setting.kind))
        return member.value if isinstance(member.value, str) else member.name.lower()
    if setting.kind in {int, float} and (number := default_of(config_class, setting)) is not None:
        return str(number)
    samples: dict[type, str] = {bool: "true", int: "1", float: "1.0", Path: "/p"}
    return samples.get(setting.kind, "text")


def default_of(config_class: type[Root], setting: config.Setting) -> object:
    """What a field is without any source; None where that is not given by the class itself."""
    value: object = config_class()
    for name in setting.path:
        value = getattr(value, name, None)
    return value


def as_toml(setting: config.Setting, text: str) -> str:
    if setting.many:
        return f"{setting.key} = ['{text}']"
    bare = setting.kind in {bool, int, float}
    return f"{setting.key} = {text}" if bare else f"{setting.key} = '{text}'"


@pytest.mark.parametrize("config_class", shipped(), ids=lambda c: c.__name__)
@pytest.mark.parametrize("source", ["toml", "env", "flag"])
def test_every_field_of_every_class_is_read_from_every_source(
    config_class: type[Root], source: str, tmp_path: Path
) -> None:
    table = [s for s in settings(config_class) if s.kind is not Secret]
    rivals = [s for s in table if ".".join(s.target) in EITHER_OR]
    common = [s for s in table if s not in rivals]
    for chosen in [[*common, rival] for rival in rivals] or [common]:
        assert_read_from(config_class, source, chosen, tmp_path)


EITHER_OR = frozenset({"redis.url", "redis.sentinels"})
"""Fields of which a file gives one."""


def assert_read_from(
    config_class: type[Root], source: str, table: list[config.Setting], tmp_path: Path
) -> None:
    texts = {setting.key: some_text(config_class, setting, tmp_path) for setting in table}
    path, environ, argv = None, {}, []
    if source == "toml":
        path = toml(tmp_path, "\n".join(as_toml(s, texts[s.key]) for s in table))
    elif source == "env":
        environ = {setting.variable: texts[setting.key] for setting in table}
    else:
        for setting in table:
            flag = setting.flags[-1]
            argv.append(flag if setting.kind is bool else f"{flag}={texts[setting.key]}")
    loaded = load(config_class, argv, environ, path)
    fields = {".".join(setting.target) for setting in table}
    assert set(loaded.origins) == fields
    assert {origin.split(" ")[0] for origin in loaded.origins.values()} == {source}


# Addresses


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ("127.0.0.1:0", Reach.LOCAL),
        ("127.255.0.9:65535", Reach.LOCAL),
        ("localhost:1", Reach.LOCAL),
        ("LOCALHOST:1", Reach.LOCAL),
        ("[::1]:1", Reach.LOCAL),
        ("[::ffff:127.0.0.1]:1", Reach.LOCAL),
        ("unix:/run/kvtier/index.sock", Reach.LOCAL),
        ("0.0.0.0:1", Reach.NETWORK),
        ("[::]:1", Reach.NETWORK),
        ("[::ffff:0.0.0.0]:1", Reach.NETWORK),
        ("[::ffff:10.0.0.1]:1", Reach.NETWORK),
        ("10.0.0.1:1", Reach.NETWORK),
        ("[fe80::1%eth0]:1", Reach.NETWORK),
        ("index.example:1", Reach.NETWORK),
        ("localhost.example:1", Reach.NETWORK),
        ("127.1:1", Reach.NETWORK),
        ("127.0.0.1.example:1", Reach.NETWORK),
        ("2130706433:1", Reach.NETWORK),
    ],
)
def test_only_what_can_be_nothing_else_counts_as_local(text: str, reach: Reach) -> None:
    assert parse_address(text).reach is reach


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":1",
        "*:1",
        "host",
        "host:",
        "host:-1",
        "host:65536",
        "host:99999999999999999999",
        "host:1:2",
        "::1:1",
        "[host]:1",
        "[127.0.0.1]:1",
        "[::1]",
        "ho st:1",
        "host\n:1",
        "host\0:1",
        "-host:1",
        "host:١",
        "unix:relative",
        "unix:/a\0b",
        "unix:/" + "x" * 200,
        "unix-abstract:name",
        "dns:///host:1",
        "ipv4:127.0.0.1:1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ConfigError:
        return
    assert 0 <= address.port <= 65_535


def test_the_metrics_page_stays_on_the_machine_unless_told() -> None:
    with pytest.raises(ConfigError, match="metrics_bind"):
        TelemetryConfig(metrics_bind="0.0.0.0:9")
    assert TelemetryConfig(metrics_bind="127.0.0.1:9").metrics_bind == "127.0.0.1:9"
    assert TelemetryConfig(metrics_bind="0.0.0.0:9", metrics_insecure=True).metrics_insecure


def test_a_target_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        DialConfig(targets=("127.0.0.1:1", "127.0.0.1:1"))
