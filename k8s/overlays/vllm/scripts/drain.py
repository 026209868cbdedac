"""Wait until this pod's vLLM has nothing to do: `drain.py URL SECONDS`, at most so long.

For a preStop hook: the bridge says goodbye to the index at the same time, so routers send nothing
new, and what is under way ends before vLLM is told to. Ends with 0 in any case.
"""

import http.client
import sys
import time
from urllib.parse import urlsplit

QUIET_S = 3.0
"""For so long nothing has run: routers have heard of the goodbye."""
LOOK_S = 0.5


def busy(host: str, port: int | None) -> float:
    """Requests that run or wait; an engine that does not answer has none."""
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return 0.0
    finally:
        connection.close()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    lines = [line for line in page.splitlines() if line.partition("{")[0].split(" ")[0] in names]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def main(url: str, seconds: str) -> int:
    place = urlsplit(url)
    end = time.monotonic() + float(seconds)
    quiet_since = time.monotonic()
    while time.monotonic() < end:
        now = time.monotonic()
        if busy(place.hostname or "", place.port):
            quiet_since = now
        elif now - quiet_since >= QUIET_S:
            break
        time.sleep(LOOK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
