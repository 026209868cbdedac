"""The store's configuration, each setting wrong by itself: refused, and the refusal names it."""

import enum
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import Secret, Setting, load, settings
from kvtier.errors import KvtierError
from kvtier_services.store.config import StoreConfig
from tests.harness.toml_text import TomlValue, toml_text

SETTINGS = settings(StoreConfig)
HUGE = 1 << 62
OUT_OF_RANGE: dict[str, list[TomlValue]] = {
    "dram.bytes_max": [-1, 0, 1, 65 << 20, HUGE],
    "dram.slab_bytes": [-1, 0, 65, 8 << 30, (1 << 20) + 32],
    "dram.blocks_max": [-1, 0, HUGE],
    "dram.sessions_max": [-1, 0, HUGE],
    "dram.segment_bytes_max": [-1, 0, 1, HUGE],
    "dram.segments_bytes_max": [-1, 0, 1, HUGE],
    "nvme.bytes_max": [-1, 0, HUGE],
    "nvme.free_share": [-0.5, 0.0, 0, 1.01, 2],
    "nvme.touches_min": [-1, 0, HUGE],
    "nvme.write_bytes_per_day": [-1, 0, HUGE],
    "nvme.deadline_ms": [-1, 0, 600_001, HUGE],
    "redis.bytes_max": [-1, 0, HUGE],
    "redis.ttl_s": [-1, 0, 0.0001, 1e12],
    "redis.touches_min": [-1, 0, HUGE],
    "redis.deadline_ms": [-1, 0, 600_001, HUGE],
    "bulk.port": [-1, 65_536, HUGE],
    "peers.deadline_ms": [-1, 0, 600_001, HUGE],
    "peers.ask_ms": [-1, 0, 60_001, HUGE],
    "peers.bytes_max": [-1, 0, 1, HUGE],
    "peers.peer_bytes_max": [-1, 0, 512 << 20, HUGE],
    "promote_touches_min": [-1, 0, HUGE],
    "in_flight_bytes_max": [-1, 0, HUGE],
    "staging_bytes_max": [-1, 0, HUGE],
    "drain_ms_max": [-1, 600_001, HUGE],
}
"""Values of the right type that cannot be meant; every number of the configuration is here."""
WRONG_TEXTS: dict[str, list[TomlValue]] = {
    "listen.bind": ["nowhere", "127.0.0.1:99999", "unix:relative", ""],
    "index.targets": [["nowhere"], ["h:1", "h:1"], ["h:70000"], [""]],
    "telemetry.metrics_bind": ["nowhere", "0.0.0.0:9000"],
    "redis.url": ["http://h", "redis://", "redis://h:99999", "redis://h/x", "unix://relative"],
    "redis.sentinels": [["h"], [":1"], ["h:"], ["h:0"], ["h:70000"], ["h:0000650000"]],
    "quotas": [["dram"], ["gpu:1:s"], ["dram:0:s"], ["dram:1:"], [f"dram:{'9' * 5000}:s"]],
    "instance": ["x" * 5000],
    "node": ["\N{EURO SIGN}" * 2000],
    "zone": ["x" * 5000],
}


def nested(setting: Setting, value: TomlValue) -> dict[str, TomlValue]:
    """A configuration with this one setting."""
    table: dict[str, TomlValue] = {setting.path[-1]: value}
    for name in reversed(setting.path[:-1]):
        table = {name: table}
    return table


def refusal(directory: Path, table: dict[str, TomlValue]) -> str:
    """What the loader says, in one line, of a configuration that must not be taken."""
    path = directory / "store.toml"
    path.write_text(toml_text(table))
    with pytest.raises(KvtierError) as refused:
        load(StoreConfig, ["--config", str(path)], environ={})
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 500, "it does not repeat what it was given, however long"
    return text


def names(text: str, setting: Setting) -> bool:
    """Whether a refusal names a setting, and the section where it stands."""
    return setting.path[-1] in text and all(section in text for section in setting.path[:-1])


def of_wrong_types(setting: Setting) -> Iterator[TomlValue]:
    """One value each of types that TOML has and this setting has not."""
    if setting.many:
        yield from ("text", 5, [5], [["nested"]], {"a": "table"})
    elif setting.kind is bool:
        yield from ("yes", 1, ["true"], {"a": "table"})
    elif setting.kind in {int, float}:
        yield from ("5", True, [5], {"a": "table"})
        if setting.kind is int:
            yield 5.0
    else:
        yield from (5, True, 1.5, ["text"], {"a": "table"})
        if issubclass(setting.kind, enum.Enum):
            yield from ("nonsense", "ON_SEAL ")
        elif setting.kind in {Path, Secret}:
            yield ""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_value_of_another_type_is_refused_by_name(setting: Setting, tmp_path: Path) -> None:
    for value in of_wrong_types(setting):
        assert names(refusal(tmp_path, nested(setting, value)), setting), value


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_misspelt_setting_is_refused_and_the_right_one_is_named(
    setting: Setting, tmp_path: Path
) -> None:
    misspelt = f"{setting.path[-1]}z"
    table: dict[str, TomlValue] = {misspelt: "x"}
    for section in reversed(setting.path[:-1]):
        table = {section: table}
    text = refusal(tmp_path, table)
    assert ".".join((*setting.path[:-1], misspelt)) in text
    assert "nearest known" in text


def test_every_number_has_values_that_are_out_of_its_range() -> None:
    numbers = {setting.key for setting in SETTINGS if setting.kind in {int, float}}
    assert numbers == OUT_OF_RANGE.keys()


@pytest.mark.parametrize(("key", "values"), (OUT_OF_RANGE | WRONG_TEXTS).items())
def test_a_value_that_cannot_be_meant_is_refused_by_name(
    key: str, values: list[TomlValue], tmp_path: Path
) -> None:
    (setting,) = (setting for setting in SETTINGS if setting.key == key)
    for value in values:
        assert names(refusal(tmp_path, nested(setting, value)), setting), value


def test_a_redis_is_named_once_and_its_password_never(tmp_path: Path) -> None:
    both: dict[str, TomlValue] = {"redis": {"url": "redis://h", "sentinels": ["h:1"]}}
    assert "url or sentinels" in refusal(tmp_path, both)
    alone: dict[str, TomlValue] = {"redis": {"sentinels": ["h:1"]}}
    assert "sentinels need the service" in refusal(tmp_path, alone)
    told: dict[str, TomlValue] = {"redis": {"url": "ftp://user:hunter2@h"}}
    assert "hunter2" not in refusal(tmp_path, told)
