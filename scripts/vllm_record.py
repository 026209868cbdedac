"""Record what real vLLM servers tell `kvtier vllm doctor`, each lacking some flags.

    .venv/bin/python scripts/vllm_record.py PYTHON MODEL_DIRECTORY OUTPUT_DIRECTORY [CASE ...]

Needs a Python with vLLM, some 40 s a case. The tests of the doctor read what it writes.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvtier.local.vllm import flags
from kvtier.local.vllm.asking import Seen, Server, ask_replay, look_at
from kvtier.local.vllm.flags import Wanted, needed
from tests.harness.ports import free_port

RUN = Path("/run/kvtier")
WANTED = Wanted(
    store=f"unix:{RUN / 'store.sock'}",
    events=f"ipc://{RUN / 'events'}",
    replay=f"ipc://{RUN / 'replay'}",
    model_id="m",
    revision="r",
    names=("m",),
)
CASES = {
    "good": (),
    "bare": ("all",),
    "partial": (flags.CACHING, "kv_load_failure_policy", "replay_endpoint", "topic"),
}
"""What each lacks: flags, or keys of one."""
START_S = 600.0
KEPT = ("kv_transfer_config", "kv_events_config", "speculative_config")


def arguments(lacks: tuple[str, ...]) -> list[str]:
    """The flags of a case."""
    if "all" in lacks:
        return ["--served-model-name=m"]
    found = []
    for flag in needed(WANTED):
        value = flag.value
        if flag.name in lacks:
            if flag.name == flags.CACHING:
                found.append("--no-enable-prefix-caching")
            continue
        if isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if key not in lacks}
        found.append(dataclasses.replace(flag, value=value).argument())
    return found


def recorded(python: str, model: str, lacks: tuple[str, ...]) -> Seen:
    """What one server tells."""
    port = free_port()
    argv = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    argv += ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--max-model-len=2048"]
    argv += ["--enforce-eager", "--load-format=dummy", *arguments(lacks)]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    variables["VLLM_SERVER_DEV_MODE"] = "1"
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(  # noqa: S603 (the caller chose the interpreter)
        argv, env=ours | variables, stdout=sys.stderr, start_new_session=True
    )
    server = Server("127.0.0.1", port, is_https=False)
    try:
        until = time.monotonic() + START_S
        while not server.is_healthy():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"no server: {argv}")
            time.sleep(0.5)
        seen = look_at(server)
        return dataclasses.replace(seen, replay=ask_replay(WANTED.replay))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def slim(seen: Seen) -> Seen:
    """Without the hundreds of settings that the doctor does not read."""
    if seen.config is None:
        return seen
    kept: dict[str, object] = {name: seen.config.get(name) for name in KEPT}
    parallel = seen.config["parallel_config"]
    assert isinstance(parallel, dict)
    names = ("pipeline_parallel_size", "decode_context_parallel_size")
    kept["parallel_config"] = {name: parallel[name] for name in names}
    return dataclasses.replace(seen, config=kept)


def main(python: str, model: str, output: str, *cases: str) -> None:
    """Write a file a case."""
    RUN.mkdir(mode=0o700, exist_ok=True)
    for name in cases or CASES:
        seen = slim(recorded(python, model, CASES[name]))
        text = json.dumps(dataclasses.asdict(seen), indent=1, sort_keys=True)
        (Path(output) / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        sys.stdout.write(f"{name}: recorded\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
