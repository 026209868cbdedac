"""Whether this pod's vLLM computes: `probe.py URL SECONDS`, status 0 where it does.

It does where it has generated tokens since the last look; else it is asked for one, with a prompt
of one token. So a busy engine is not asked for more, and an idle one that hangs is found.
"""

import http.client
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

MEMORY = Path("/tmp/kvtier-probe")  # noqa: S108 (the pod's own)


def generated(connection: http.client.HTTPConnection) -> float:
    """Tokens that it has generated in all."""
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode("utf-8", "replace")
    lines = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def has_grown(now: float) -> bool:
    """Whether it is more than the last time; remembers it for the next."""
    try:
        before = float(MEMORY.read_text())
    except (OSError, ValueError):
        before = now
    MEMORY.write_text(repr(now))
    return now > before


def generates(connection: http.client.HTTPConnection, headers: dict[str, str]) -> bool:
    """Whether it generates a token when it is asked."""
    connection.request("GET", "/v1/models", headers=headers)
    served = json.loads(connection.getresponse().read())["data"][0]["id"]
    body = {"model": served, "prompt": [1], "max_tokens": 1, "temperature": 0}
    told = {"content-type": "application/json", **headers}
    connection.request("POST", "/v1/completions", json.dumps(body), told)
    answer = connection.getresponse()
    return answer.status == http.HTTPStatus.OK and bool(json.loads(answer.read())["choices"])


def main(url: str, seconds: str) -> int:
    place, key = urlsplit(url), os.environ.get("VLLM_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    connection = http.client.HTTPConnection(
        place.hostname or "", place.port, timeout=float(seconds)
    )
    try:
        if has_grown(generated(connection)) or generates(connection, headers):
            return 0
        reason = "no token came"
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    sys.stderr.write(f"{url}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
