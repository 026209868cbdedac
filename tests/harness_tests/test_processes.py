"""The process runner: readiness, signals, readings, and that it ends what it started."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from kvtier import __version__
from tests.harness.ports import free_port
from tests.harness.processes import (
    LOG_ROOT,
    DiedByItselfError,
    HarnessError,
    Launch,
    NotReadyError,
    ProcessRunner,
    kvtier_command,
    live_processes,
    python_module,
)
from tests.harness.readiness import grpc_ready, http_ready, tcp_ready
from tests.harness.waiting import eventually

SLEEPER = (sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)")
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
GRPC_SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("index", health_pb2.HealthCheckResponse.SERVING)
servicer.set("half", health_pb2.HealthCheckResponse.NOT_SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
server.start()
server.wait_for_termination()
"""


def launch(name: str, code: str, *arguments: str) -> Launch:
    return Launch(name, (sys.executable, "-S", "-c", code, *arguments))


def child_pid(process_log: str) -> int:
    return int(process_log.split("child ")[1].split()[0])


def gone(pid: int) -> bool:
    """Whether a process has ended; an orphan's zombie waits for whoever adopts it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_real_command_line_runs_as_a_process(processes: ProcessRunner) -> None:
    process = processes.spawn(Launch("version", kvtier_command("--version")))
    assert process.wait(20) == 0
    assert f"kvtier {__version__}\n" in process.log_text()


def test_an_http_server_is_ready_when_it_answers(processes: ProcessRunner) -> None:
    port = free_port()
    probe = http_ready(f"http://127.0.0.1:{port}/")
    assert not probe()
    argv = python_module("http.server", "--bind", "127.0.0.1", str(port))
    server = processes.start(Launch("web", argv, ready=probe))
    assert server.alive
    assert probe()
    assert not http_ready(f"http://127.0.0.1:{port}/missing")()
    assert tcp_ready(port)()
    server.kill()
    assert not tcp_ready(port)()


def test_a_grpc_server_is_ready_when_its_health_says_serving(processes: ProcessRunner) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    argv = (sys.executable, "-c", GRPC_SERVER, str(port))
    processes.start(Launch("grpc", argv, ready=grpc_ready(address, "index")))
    assert grpc_ready(address)()
    assert not grpc_ready(address, "half")()
    assert not grpc_ready(address, "unknown")()


def test_a_process_that_ends_before_it_is_ready_shows_its_log(processes: ProcessRunner) -> None:
    failing = Launch(
        "broken",
        (sys.executable, "-S", "-c", "print('no such file'); raise SystemExit(3)"),
        ready=lambda: False,
    )
    with pytest.raises(NotReadyError, match=r"(?s)broken ended with 3.*no such file"):
        processes.start(failing)


def test_a_process_that_is_not_ready_in_time_shows_its_log(processes: ProcessRunner) -> None:
    slow = Launch("slow", SLEEPER, ready=lambda: False, ready_deadline_s=0.3)
    with pytest.raises(NotReadyError, match=r"(?s)slow is ready.*tail of"):
        processes.start(slow)


def test_sigkill_reaches_the_process_and_restart_gives_it_a_new_pid(
    processes: ProcessRunner,
) -> None:
    process = processes.start(Launch("victim", SLEEPER))
    first = process.pid
    process.kill()
    assert process.returncode == -signal.SIGKILL
    process.restart()
    assert process.alive
    assert process.pid != first
    eventually(lambda: process.log_text().count("up") >= 1, 5, "the second life writes")
    assert "--- start 1 of victim" in process.log_text()
    assert "--- start 2 of victim" in process.log_text()


def test_sigterm_can_be_handled_and_the_status_is_the_processs_own(
    processes: ProcessRunner,
) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(17))\n"
        "print('armed', flush=True)\n"
        "signal.pause()\n"
    )
    process = processes.start(launch("polite", code))
    eventually(lambda: "armed" in process.log_text(), 10, "the handler is set")
    process.terminate()
    assert process.wait(10) == 17


def test_a_frozen_process_does_nothing_until_it_is_thawed(processes: ProcessRunner) -> None:
    code = "import time\nwhile True:\n  print('tick', flush=True); time.sleep(0.005)"
    process = processes.start(launch("clock", code))
    eventually(lambda: "tick" in process.log_text(), 10, "it ticks")
    process.freeze()
    seen = len(process.log_text())
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    assert len(process.log_text()) == seen
    process.thaw()
    eventually(lambda: len(process.log_text()) > seen, 10, "it ticks again")


def test_the_end_of_the_runner_ends_children_too(tmp_path: Path) -> None:
    with ProcessRunner("children", tmp_path) as runner:
        parent = runner.start(launch("parent", PARENT))
        eventually(lambda: "child" in parent.log_text(), 10, "the child runs")
        child = child_pid(parent.log_text())
        assert psutil.pid_exists(child)
    assert gone(child)
    assert gone(parent.pid)
    assert parent not in live_processes()


def test_children_of_a_killed_process_live_until_the_runner_ends(tmp_path: Path) -> None:
    with ProcessRunner("orphans", tmp_path) as runner:
        parent = runner.start(launch("parent", PARENT))
        eventually(lambda: "child" in parent.log_text(), 10, "the child runs")
        parent.kill()
        child = child_pid(parent.log_text())
        assert not gone(child)
        with pytest.raises(HarnessError, match="still runs"):
            parent.spawn()
    assert gone(child)


def test_the_runner_touches_no_process_that_it_did_not_start(tmp_path: Path) -> None:
    with ProcessRunner("other", tmp_path / "other") as other:
        other.directory.mkdir()
        bystander = other.start(Launch("bystander", SLEEPER))
        with ProcessRunner("mine", tmp_path) as mine:
            mine.start(Launch("mine", SLEEPER))
        assert bystander.alive


def test_a_process_that_dies_by_itself_fails_its_test(tmp_path: Path) -> None:
    def run() -> None:
        with ProcessRunner("crash", tmp_path) as runner:
            process = runner.start(launch("crash", "raise SystemExit('boom')"))
            eventually(lambda: not process.alive, 10, "it ends")

    with pytest.raises(DiedByItselfError, match=r"(?s)crash: status 1.*boom"):
        run()


def test_variables_that_configure_services_are_not_inherited(
    processes: ProcessRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVTIER_INDEX_PORT", "OTEL_EXPORTER_OTLP_ENDPOINT", "http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://elsewhere")
    monkeypatch.setenv("HARMLESS", "kept")
    code = "import os; print('KEYS', sorted(os.environ))"
    given = launch("env", code)
    process = processes.spawn(Launch(given.name, given.argv, environment={"KVTIER_CHOSEN": "1"}))
    assert process.wait(10) == 0
    text = process.log_text()
    assert "'KVTIER_CHOSEN'" in text
    assert "'HARMLESS'" in text
    assert "elsewhere" not in text
    for name in ("KVTIER_INDEX_PORT", "OTEL_EXPORTER", "proxy", "PROXY"):
        assert name not in text


def test_readings_tell_memory_time_and_descriptors(processes: ProcessRunner) -> None:
    code = (
        "import os\n"
        "data = bytearray(64 << 20)\n"
        "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(50)]\n"
        "while os.times().user + os.times().system < 0.2: pass\n"
        "print('done', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    idle = processes.start(Launch("idle", SLEEPER))
    eventually(lambda: "up" in idle.log_text(), 10, "the idle one sleeps")
    busy = processes.start(launch("busy", code))
    eventually(lambda: "done" in busy.log_text(), 20, "the work is done")
    low, high = idle.usage(), busy.usage()
    assert high.rss_bytes - low.rss_bytes > 48 << 20
    assert high.fds_count - low.fds_count == 50
    assert high.cpu_s >= 0.2
    assert high.threads_count == 1


def test_session_usage_sums_over_children(processes: ProcessRunner) -> None:
    parent = processes.start(launch("parent", PARENT))
    eventually(lambda: "child" in parent.log_text(), 10, "the child runs")
    assert parent.session_usage().threads_count == 2
    assert parent.usage().threads_count == 1


def test_logs_are_kept_in_a_folder_named_after_the_test(processes: ProcessRunner) -> None:
    process = processes.start(Launch("writer", SLEEPER))
    eventually(lambda: "up" in process.log_text(), 10, "it writes")
    assert process.log_path.is_relative_to(LOG_ROOT)
    assert "test_logs_are_kept_in_a_folder" in process.log_path.parent.name
    assert process.log_path.name == "writer.log"
    assert process.log_tail(1).endswith("up")


def test_config_files_land_in_the_tests_own_directory(processes: ProcessRunner) -> None:
    path = processes.config_file("index.toml", {"listen": {"port": 1}})
    assert path.parent == processes.directory
    assert path.read_text() == '["listen"]\n"port" = 1\n'


def test_misuse_is_refused(processes: ProcessRunner) -> None:
    process = processes.start(Launch("once", SLEEPER))
    with pytest.raises(HarnessError, match="two processes named"):
        processes.spawn(Launch("once", SLEEPER))
    with pytest.raises(HarnessError, match="has not ended within"):
        process.wait(0.01)
    process.kill()
    with pytest.raises(HarnessError, match="does not run"):
        process.freeze()
    with pytest.raises(ValueError, match="name must be"):
        Launch("../up", SLEEPER)
    with pytest.raises(ValueError, match="empty"):
        Launch("none", ())


def test_several_start_side_by_side(processes: ProcessRunner) -> None:
    ports = [free_port() for _ in range(3)]
    argv = python_module("http.server", "--bind", "127.0.0.1")
    started = processes.start_all(
        Launch(f"web{port}", (*argv, str(port)), ready=tcp_ready(port)) for port in ports
    )
    assert all(process.alive for process in started)
    assert len({os.getsid(process.pid) for process in started}) == 3
