"""`kvtier worker drain URL`: has a running worker leave its fleet, and returns when it has.

For a preStop hook, or an operator's hand. What must not live here: what a worker does then
(`leaving`).
"""

import argparse
import http.client
import ssl
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvtier.errors import CallerError
from kvtier.limits import TOKEN_BYTES_MAX

_WAIT_S: Final = 300.0
DRAIN_PATH: Final = "/drain"


def drain_command(argv: list[str]) -> int:
    """0 where the worker has handed over and serves nobody any more, 1 where it has not."""
    parser = argparse.ArgumentParser(
        prog="kvtier worker drain",
        description="Have a worker write its hot set, tell the index goodbye and finish its "
        "requests. It stays up, and answers nobody, until it is ended.",
    )
    parser.add_argument("url", help="of the worker: http://127.0.0.1:7730")
    parser.add_argument("--token-file", type=Path, help="an operator's token")
    parser.add_argument("--ca-file", type=Path, help="who signed the worker's certificate")
    parser.add_argument("--wait-s", type=float, default=_WAIT_S, help="at most")
    given = parser.parse_args(argv)
    try:
        status = _drain(given.url, given.token_file, given.ca_file, given.wait_s)
    except (CallerError, OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{given.url}: {error or type(error).__name__}\n")
        return 1
    if status != http.client.OK:
        sys.stderr.write(f"{given.url}: refused with {status}\n")
        return 1
    return 0


def _drain(url: str, token_file: Path | None, ca_file: Path | None, wait_s: float) -> int:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise CallerError("want http://HOST:PORT or https://HOST:PORT")
    if not 0 < wait_s < float("inf"):
        raise CallerError("--wait-s must be positive")
    headers = {}
    if token_file is not None:
        token = token_file.read_bytes()[: TOKEN_BYTES_MAX + 1].strip()
        if not token or len(token) > TOKEN_BYTES_MAX:
            raise CallerError("--token-file holds no token")
        headers["Authorization"] = f"Bearer {token.decode('ascii', 'replace')}"
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=wait_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=wait_s)
    try:
        connection.request("POST", parts.path.rstrip("/") + DRAIN_PATH, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()
