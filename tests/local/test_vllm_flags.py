"""The flags of vLLM: one list for serve, flags, up and doctor, and a user's own beside them."""

import json
import shlex

import pytest
import yaml

from kvtier.errors import ConfigError
from kvtier.local.vllm.commands import command
from kvtier.local.vllm.flags import Wanted, combined, needed

WANTED = Wanted(store="unix:/s", events="ipc:///e", replay="ipc:///r", names=("chat",))


def flags_of(*user: str) -> dict[str, str]:
    """What vLLM is given, by flag."""
    pairs = (argument.partition("=") for argument in combined(user, needed(WANTED)))
    return {name: value for name, _, value in pairs}


def test_ours_stand_behind_a_users_and_each_once() -> None:
    arguments = combined(["--seed", "7", "--block_size=32"], needed(WANTED))
    assert arguments[:2] == ("--seed", "7")
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    assert len(names) == len(set(names))
    assert "--block-size" in names


def test_json_of_a_user_is_merged_with_ours() -> None:
    events = json.loads(flags_of("--kv-events-config", '{"buffer_steps": 5}')["--kv-events-config"])
    assert events["buffer_steps"] == 5
    assert events["replay_endpoint"] == "ipc:///r"
    dotted = flags_of("--kv-transfer-config.kv_connector_extra_config.load_ms", "900")
    connector = json.loads(dotted["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"] == {"store": "unix:/s", "load_ms": 900}
    assert connector["kv_load_failure_policy"] == "recompute"


def test_a_flag_that_says_the_same_is_fine() -> None:
    same = ("--prefix-caching-hash-algo", "sha256_cbor", "--enable-prefix-caching")
    assert flags_of(*same)["--prefix-caching-hash-algo"] == "sha256_cbor"


@pytest.mark.parametrize(
    ("user", "named"),
    [
        (("--block-size", "16"), ("--block-size 16", "--block-size 32")),
        (("--block_size=16",), ("--block_size=16", "--block-size 32")),
        (("--no-enable-prefix-caching",), ("--no-enable-prefix-caching", "--enable-prefix-cach")),
        (("--prefix-caching-hash-algo=sha256",), ("=sha256", "sha256_cbor")),
        (
            ("--kv-transfer-config", '{"kv_role": "kv_producer"}'),
            ("kv_producer", "kv_both", "kv_role"),
        ),
        (("--kv-transfer-config.kv_load_failure_policy", "fail"), ("fail", "recompute")),
        (("--kv-events-config", '{"topic": "mine"}'), ("mine", "topic", '"kv"')),
        (("--served-model-name", "other"), ("other", "chat")),
        (("--kv-tr", "{}"), ("--kv-tr", "--kv-transfer-config")),
        (("--kv-events-config", "{"), ("not JSON",)),
    ],
)
def test_a_flag_that_contradicts_is_refused_and_both_are_named(
    user: tuple[str, ...], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        flags_of(*user)
    assert all(name in str(refused.value) for name in named)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert command(["flags", *argv]) == 0
    return capsys.readouterr().out


def test_a_manifest_gets_the_same_flags_in_each_form(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("org/model", "--store", "host:1", "--revision", "abc", "--max-model-len", "4096")
    listed = json.loads(printed(capsys, *argv, "--format", "json"))
    assert yaml.safe_load(printed(capsys, *argv, "--format", "yaml")) == {"args": listed}
    shell = shlex.split(printed(capsys, *argv).replace("\\\n", " "))
    assert shell == [part for argument in listed for part in argument.split("=", 1)]
    assert "--model=org/model" in listed
    connector = json.loads(
        next(one for one in listed if "transfer" in one).partition("=")[2]
    )  # fmt: skip
    extra = connector["kv_connector_extra_config"]
    assert extra == {
        "store": "host:1",
        "residents": "/run/kvtier",
        "model_id": "org/model",
        "revision": "abc",
        "save": "prompt",
    }
    assert any("ipc:///run/kvtier/replay" in one for one in listed)


def test_flags_without_a_model_are_those_of_any(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(printed(capsys, "--format=json", "--block-tokens", "64"))
    assert "--block-size=64" in listed
    assert not any(one.startswith(("--model", "--served-model-name")) for one in listed)


def test_a_users_block_size_is_taken_where_ours_is_not_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = json.loads(printed(capsys, "m/m", "--format=json", "--block-size", "64"))
    assert "--block-size=64" in listed
    with pytest.raises(ConfigError, match="--block-size 64 contradicts --block-size 32"):
        command(["flags", "m/m", "--block-tokens", "32", "--block-size", "64"])


def test_behind_two_dashes_everything_is_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(printed(capsys, "m/m", "--format=json", "--", "--store", "x"))
    assert listed[1:3] == ["--store", "x"]
