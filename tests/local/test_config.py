"""The cluster file: every key of every service works, whatever is unknown refuses by name."""

import tomllib
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.local.commands import config
from kvtier.local.settings import merged, read_cluster, toml_text


def check(tmp_path: Path, text: str, *flags: str) -> int:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return config(["check", "--config", str(file), *flags])


def test_a_file_with_a_key_of_every_service_is_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        [cluster]
        workers = 3
        model = "fake"
        [index]
        lease_ms = 2000
        [store.nvme]
        enabled = false
        [worker.batch]
        sequences_max = 8
        [router]
        policy = "least_loaded"
        """
    assert check(tmp_path, text) == 0
    told = capsys.readouterr().out
    assert told == "ok: index, store, worker-1, worker-2, worker-3, router\n"


def test_every_router_has_a_port_of_its_own_and_the_first_the_one_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[cluster]\nrouters = 2\nbind = '127.0.0.1:7001'\n[router]\npolicy = 'random'")
    assert config(["show", "--config", str(file)]) == 0
    document = tomllib.loads(capsys.readouterr().out)
    first, second = document["router"], document["router-2"]
    assert first["listen"]["bind"] == "127.0.0.1:7001"
    assert second["listen"]["bind"] != first["listen"]["bind"]
    assert second["admin_bind"] != first["admin_bind"]
    assert second["instance"] == "router-2"
    assert second["policy"] == "random"
    text = "[cluster]\nrouters = 2\n[router.listen]\nbind = '127.0.0.1:7001'"
    with pytest.raises(ConfigError, match="router and router-2 would both listen"):
        check(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[cluster]\nworker = 3", r"\[cluster\]: unknown key 'worker'.*'workers'"),
        ("[cluster]\nworkers = 0", "workers must be 1 to"),
        ("[cluster]\nworkers = '3'", "workers"),
        ("[cluster]\nrouters = 0", "routers must be 1 to"),
        ("[cluster]\nredis = 'here'", "redis is `embedded` or redis://"),
        ("[stores]\nzone = 'a'", r"unknown section 'stores'; the nearest is \[store\]"),
        ("worker = 3", r"worker is a table: \[worker\]"),
        ("[index]\nlease = 3", r"\[index\]: unknown key 'lease'.*'lease_ms'"),
        ("[store.dram]\nbytes_max = 1", r"\[dram\] want 1 MiB"),
        ("[worker.model]\nmodel = ''", "model must be given"),
        ("[worker.model.fake]\nseeds = 1", r"\[worker\]: unknown key 'model.fake.seeds'"),
        ("[router]\npolicy = 'best'", "'best' is none of cache_aware"),
        ("[router.listen]\nbind = '0.0.0.0:0'", "leave it out, and a free port"),
        ("[worker.listen]\nbind = '127.0.0.1:7'", "worker-1 and worker-2 would both listen"),
        ("[cluster", "cluster.toml"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_section(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check(tmp_path, text)


def test_an_address_given_twice_is_refused(tmp_path: Path) -> None:
    text = "[router.listen]\nbind = '127.0.0.1:7000'"
    assert check(tmp_path, text) == 0
    with pytest.raises(ConfigError, match="not both"):
        check(tmp_path, text, "--bind", "127.0.0.1:7001")


def test_flags_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "[cluster]\nworkers = 3", "--workers", "1") == 0
    assert "worker-2" not in capsys.readouterr().out


def test_show_prints_toml_that_masks_secrets_and_tells_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "[cluster]\nredis = 'redis://me:hunter2@127.0.0.1:6379/0'\n"
        "[router.tenants]\ncluster_secret = 'correct horse battery'\n"
        "[worker]\ndrain_ms_max = 77\n"
    )
    assert config(["show", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    assert "horse" not in shown
    document = tomllib.loads(shown)
    assert document["cluster"]["redis"] == "redis://***@127.0.0.1:6379/0"
    assert document["router"]["tenants"]["cluster_secret"] == "***"
    assert document["worker-2"]["drain_ms_max"] == 77
    assert f"drain_ms_max = 77  # toml {file}: [worker]" in shown


def test_neither_verb_touches_the_data_directory(tmp_path: Path) -> None:
    root = tmp_path / "never"
    assert check(tmp_path, "", "--data-dir", str(root)) == 0
    assert not root.exists()


@pytest.mark.parametrize("argv", [[], ["chek"], ["--config", "x"]])
def test_anything_but_check_and_show_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"config check\|show"):
        config(argv)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml"):
        read_cluster(["--config", "nowhere.toml"])


def test_tables_survive_being_written() -> None:
    table = {
        "a": 1, "b": [1.5, "x\ny"], "c": {"odd key": True, "d": {"e": "\x7f\"'"}}, "f": {},
    }  # fmt: skip
    assert tomllib.loads(toml_text(table)) == table


def test_the_upper_table_wins_key_by_key() -> None:
    below = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(below, {"a": {"b": 9}, "e": 4}) == {"a": {"b": 9, "c": 2}, "d": 3, "e": 4}
    assert below == {"a": {"b": 1, "c": 2}, "d": 3}
