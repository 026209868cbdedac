"""`kvtier vllm serve`, `kvtier vllm flags`, `kvtier vllm doctor`.

What must not live here: what they do.
"""

import argparse
import http.client
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvtier.config import describe
from kvtier.errors import ConfigError
from kvtier.local.vllm import flags
from kvtier.local.vllm.asking import ask_replay, look_at, parse_url
from kvtier.local.vllm.doctor import Finding, State, examine
from kvtier.local.vllm.flags import Flag, Wanted, needed
from kvtier.local.vllm.server import RUN_DIR, STORE, Model, arguments_of, model_of, wanted_of
from kvtier.local.vllm.serving import serve
from kvtier.local.vllm.settings import read_vllm

MISSING: Final = 1
UNREACHABLE: Final = 2
_USAGE: Final = """\
usage: kvtier vllm serve MODEL [FLAGS]    vLLM with kvtier inside and its bridge beside it
       kvtier vllm flags [MODEL] [FLAGS]  the flags that it would be given, for a manifest
       kvtier vllm doctor URL             what is missing at a running server
"""
_MARKS: Final = {State.OK: "ok     ", State.MISSING: "MISSING", State.UNKNOWN: "unknown"}


class Form(StrEnum):
    """How flags are printed."""

    SHELL = "shell"
    YAML = "yaml"
    JSON = "json"


def command(argv: list[str]) -> int:
    """Entry point of `kvtier vllm`."""
    verbs: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "flags": _flags,
        "doctor": _doctor,
    }
    verb = verbs.get(argv[0]) if argv else None
    if verb is None:
        asked = argv[:1] in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(_USAGE)
        return 0 if asked else UNREACHABLE
    return verb(argv[1:])


def _serve(argv: list[str]) -> int:
    loaded = read_vllm(argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    return serve(loaded.config, sys.stderr)


def _flags(argv: list[str]) -> int:
    """Print the flags without looking at any vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--format", choices=[form.value for form in Form], default=Form.SHELL)
    told, rest = parser.parse_known_args(argv)
    config = read_vllm(rest).config
    # A manifest's directories are those of another machine.
    run_dir = RUN_DIR if config.run_dir is None else config.run_dir
    if not config.model:
        wanted = wanted_of(config, Model("", None, "", config.revision), run_dir)
        arguments: Sequence[str] = flags.combined(config.flags, needed(replace(wanted, names=())))
    else:
        model = model_of(config, None)
        arguments = (f"--model={model.target}", *arguments_of(config, model, run_dir))
    sys.stdout.write(rendered(arguments, Form(told.format)))
    return 0


def rendered(arguments: Sequence[str], form: Form) -> str:
    """Arguments as text: a line an argument for a shell, a list in YAML or JSON. Pure."""
    if form is Form.JSON:
        return json.dumps(list(arguments), indent=1) + "\n"
    if form is Form.YAML:  # a JSON string is a YAML string
        return "args:\n" + "".join(f"- {json.dumps(argument)}\n" for argument in arguments)
    lines: list[str] = []
    for argument in arguments:
        if lines and not argument.startswith("-"):
            lines[-1] += f" {shlex.quote(argument)}"
            continue
        name, equals, value = argument.partition("=")
        lines.append(Flag(name, value if equals else None, "").shell())
    return " \\\n".join(lines) + "\n"


def _doctor(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvtier vllm doctor",
        description="Say what a running vLLM server lacks for kvtier, and what mends it. "
        "Exit status 0: nothing, 1: something, 2: the server was not reached.",
        allow_abbrev=False,
    )
    parser.add_argument("url", help="http://host:port of the server")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-probe", action="store_true", help="send no requests to the model")
    parser.add_argument("--store", default=STORE, help="address of the store, for what is printed")
    parser.add_argument("--events", default=f"ipc://{RUN_DIR}/events", help="its ZMQ endpoint")
    parser.add_argument("--replay", help="its ZMQ replay endpoint; it is then asked")
    parser.add_argument("--block-tokens", type=int, default=flags.BLOCK_TOKENS)
    parser.add_argument("--api-key-file", type=Path, help="file with the server's API key")
    told = parser.parse_args(argv)
    key = "" if told.api_key_file is None else _key(told.api_key_file)
    server = parse_url(told.url, key)
    try:
        seen = look_at(server, probe=not told.no_probe)
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"kvtier vllm doctor: {told.url}: {error or type(error).__name__}\n")
        return UNREACHABLE
    if told.replay is not None:
        seen = replace(seen, replay=ask_replay(told.replay))
    wanted = Wanted(
        store=told.store,
        events=told.events,
        replay=told.replay or f"ipc://{RUN_DIR}/replay",
        block_tokens=told.block_tokens,
    )
    findings = examine(seen, wanted)
    sys.stdout.write(_as_json(findings) if told.json else _as_text(findings))
    return MISSING if any(one.state is State.MISSING for one in findings) else 0


def _key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _as_json(findings: Sequence[Finding]) -> str:
    is_well = all(one.state is not State.MISSING for one in findings)
    return json.dumps({"well": is_well, "findings": [asdict(one) for one in findings]}) + "\n"


def _as_text(findings: Sequence[Finding]) -> str:
    width = max(len(one.what) for one in findings)
    lines = [f"{_MARKS[one.state]}  {one.what:<{width}}  {one.detail}" for one in findings]
    mends = dict.fromkeys(one.mend for one in findings if one.mend and one.state is State.MISSING)
    if mends:
        lines += ["", "Start vLLM with:", *(f"  {mend}" for mend in mends)]
    return "\n".join(lines) + "\n"
