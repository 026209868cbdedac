"""`kvtier tokens`: what a router and a worker make of one request, compared token by token.

A router that tokenises otherwise than its workers routes by prefixes that nobody has. What must not
live here: routing.
"""

import argparse
import asyncio
import hashlib
import http.client
import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import BackendError, CallerError, UnavailableError
from kvtier.security.files import read
from kvtier.text.model import SpecialTokens, TextModel
from kvtier_router.front.calls import PATHS, read_call
from kvtier_router.front.prompts import NamedTexts, PromptReader
from kvtier_router.web.upstream import parse_origin

_TIMEOUT_S: Final = 120.0
_ANSWER_BYTES_MAX: Final = 64 << 20
_AROUND: Final = 8
_KEY_PREFIX: Final = "kvtier_"
SAMPLE: Final = {
    "messages": [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": "What is  KV cache?\n\nAnswer in one line, please: naïve 😀"},
        {"role": "assistant", "content": "What a model remembers of a text."},
        {"role": "user", "content": "And a prefix?"},
    ]
}
"""What is compared where no request is given."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two lists of tokens part; `at` is the number of tokens that are equal."""

    at: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]


def first_difference(ours: list[int], theirs: list[int]) -> Difference | None:
    """The first place where they differ, with some tokens from there on; None where they are
    equal. Pure, O(n)."""
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    end = at + _AROUND
    return Difference(at, tuple(ours[at:end]), tuple(theirs[at:end]))


def explained(found: Difference | None, ours: list[int], theirs: list[int], text: TextModel) -> str:
    """The comparison for people."""
    counts = f"router {len(ours)} tokens, worker {len(theirs)} tokens"
    if found is None:
        return f"equal: {counts}\n"

    def shown(tokens: tuple[int, ...] | list[int]) -> str:
        return json.dumps(text.decode(tokens, SpecialTokens.ADD), ensure_ascii=False)

    return (
        f"different at token {found.at}: {counts}\n"
        f"  before: {shown(ours[max(0, found.at - _AROUND) : found.at])}\n"
        f"  router: {list(found.ours)} {shown(found.ours)}\n"
        f"  worker: {list(found.theirs)} {shown(found.theirs)}\n"
    )


def own_tokens(text: TextModel, path: str, request: dict[str, object]) -> list[int]:
    """What a router with this model's files makes of a request. CallerError for a wrong one."""
    api = PATHS.get(path)
    if api is None:
        raise CallerError(f"path {path!r} has no prompt")
    call = read_call(api, "POST", path, "", json.dumps(request).encode())
    prompt = asyncio.run(PromptReader(NamedTexts({"*": text})).read(call, ""))
    return [int(token) for token in prompt.tokens]


def worker_tokens(
    address: str, path: str, request: dict[str, object], token: str | None
) -> list[int]:
    """What a worker makes of it: asked with `return_token_ids`, for one token of answer. Blocks.

    UnavailableError where it cannot be reached, BackendError where it does not tell.
    """
    origin = parse_origin(address)
    kind = http.client.HTTPSConnection if origin.is_tls else http.client.HTTPConnection
    connection = kind(origin.host, origin.port, timeout=_TIMEOUT_S)
    body = {**request, "return_token_ids": True, "max_tokens": 1, "stream": False}
    headers = {"content-type": "application/json"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.request("POST", origin.prefix + path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"worker {address}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise BackendError(f"worker {address} answers {response.status}: {answer[:300]!r}")
    return _prompt_ids(answer)


def _prompt_ids(answer: bytes) -> list[int]:
    try:
        parsed = json.loads(answer)
        found = parsed.get("prompt_token_ids") or parsed["choices"][0]["prompt_token_ids"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        found = None
    if not isinstance(found, list) or not all(type(item) is int for item in found):
        raise BackendError("the worker does not return prompt_token_ids")
    return found


def _diff(options: argparse.Namespace) -> int:
    text = TextModel.load(options.text)
    request: dict[str, object] = dict(SAMPLE)
    if options.request is not None:
        request = json.loads(options.request.read_bytes())
    request["model"] = options.model
    token = read(options.token_file).decode().strip() if options.token_file else None
    ours = own_tokens(text, options.path, request)
    theirs = worker_tokens(options.worker, options.path, request, token)
    found = first_difference(ours, theirs)
    sys.stdout.write(explained(found, ours, theirs, text))
    return 0 if found is None else 1


def _key(options: argparse.Namespace) -> int:
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    sys.stdout.write(
        f"{key}\n# keep it: only this goes into the keys file of the router\n"
        f'[[tenant.key]]\nsha256 = "{digest}"\n'
    )
    return 0


def command(argv: list[str]) -> int:
    """Entry point of `kvtier tokens`."""
    parser = argparse.ArgumentParser(prog="kvtier tokens")
    commands = parser.add_subparsers(required=True)
    diff = commands.add_parser("diff", help="compare a router's tokens with a worker's")
    diff.add_argument("--text", type=Path, required=True, help="directory of the model's files")
    diff.add_argument("--worker", required=True, help="address of the worker")
    diff.add_argument("--model", required=True, help="served name")
    diff.add_argument("--request", type=Path, help="JSON body to compare; a sample otherwise")
    diff.add_argument("--path", default="/v1/chat/completions", help="of the API")
    diff.add_argument("--token-file", type=Path, help="bearer token of the worker")
    diff.set_defaults(run=_diff)
    key = commands.add_parser("key", help="draw an API key for the router's keys file")
    key.set_defaults(run=_key)
    options = parser.parse_args(argv)
    run: int = options.run(options)
    return run
