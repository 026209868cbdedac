"""A store that cannot start says why in one line, harms nobody, and starts once it can."""

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

from tests.harness.ports import free_port
from tests.harness.processes import Launch, ProcessRunner, kvtier_command
from tests.harness.readiness import grpc_ready
from tests.harness.toml_text import TomlValue
from tests.support.store_cluster import MIB, SERVICE

WAIT_S = 60


def settings(directory: Path, **changed: TomlValue) -> dict[str, TomlValue]:
    """A small store without a disk tier, on ports that are free unless `changed` says otherwise."""
    return {
        "data_dir": str(directory),
        "listen": {"bind": "127.0.0.1:0"},
        "dram": {"bytes_max": 8 * MIB, "slab_bytes": MIB},
        "nvme": {"enabled": False},
        **changed,
    }


async def test_a_store_that_cannot_start_ends_with_one_line_and_starts_once_it_can(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    not_a_directory = tmp_path / "file"
    not_a_directory.write_text("not a directory")
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        wrong: Mapping[str, tuple[dict[str, TomlValue], str]] = {
            "port": (
                settings(tmp_path / "port", listen={"bind": f"127.0.0.1:{port}"}),
                f"127.0.0.1:{port}",
            ),
            "bulk": (settings(tmp_path / "bulk", bulk={"port": port}), f"127.0.0.1:{port}"),
            "page": (
                settings(tmp_path / "page", telemetry={"metrics_bind": f"127.0.0.1:{port}"}),
                f"127.0.0.1:{port}",
            ),
            "unknown": (settings(tmp_path / "unknown", dram={"bytes_maxx": MIB}), "bytes_maxx"),
            "tokens": (
                settings(tmp_path, listen={"bind": "127.0.0.1:0", "tokens_file": "/no/tokens"}),
                "/no/tokens",
            ),
            "directory": (settings(not_a_directory), str(not_a_directory)),
        }
        ended = []
        for name, (table, named) in wrong.items():
            path = processes.config_file(f"{name}.toml", table)
            launch = Launch(name, kvtier_command("store", "--config", str(path)))
            ended.append((processes.spawn(launch), named))
        for process, named in ended:
            assert await asyncio.to_thread(process.wait, WAIT_S) == 1, process.log_text()
            lines = process.log_text().splitlines()
            (line,) = [line for line in lines if line.startswith("kvtier store: ")]
            assert named in line
            assert "Traceback" not in process.log_text()
    argv = kvtier_command("store", "--config", str(processes.directory / "port.toml"))
    ready = grpc_ready(f"127.0.0.1:{port}", SERVICE)
    later = Launch("later", argv, ready, ready_deadline_s=WAIT_S)
    assert (await asyncio.to_thread(processes.start, later)).alive
