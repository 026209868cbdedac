"""What an engine's own metrics say of its load."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.workers import Load
from kvtier.engines.events import Dialect
from kvtier_services.bridge.config import EngineSection
from kvtier_services.bridge.load import LoadReader, loads_of

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}\\"b"} 3.0
vllm:num_requests_running{engine="1",model_name="a}\\"b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a}\\"b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a}\\"b"} 0.255
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:token_usage{model_name="m"} 1.7
"""


def test_vllm_tells_each_ranks_load_and_how_many_blocks_it_has() -> None:
    first, second = loads_of(VLLM.encode(), EngineSection(ranks=2))
    assert first == Load(running_requests=3, waiting_requests=2, free_blocks=74, total_blocks=100)
    assert second == Load(running_requests=1, free_blocks=100, total_blocks=100)
    (configured,) = loads_of(VLLM.encode(), EngineSection(blocks=1000))
    assert (configured.total_blocks, configured.free_blocks) == (1000, 745)


def test_sglang_tells_it_in_other_words_and_usage_has_a_ceiling() -> None:
    (load,) = loads_of(SGLANG.encode(), EngineSection(kind=Dialect.SGLANG, blocks=10))
    assert load == Load(running_requests=4, waiting_requests=5, free_blocks=0, total_blocks=10)


def test_a_page_without_it_says_nothing() -> None:
    assert loads_of(b"", EngineSection()) == []
    assert loads_of(SGLANG.encode(), EngineSection()) == []
    assert loads_of(VLLM.encode(), EngineSection(kind=Dialect.TRTLLM)) == []


LINES = st.lists(
    st.sampled_from(VLLM.splitlines())
    | st.text(max_size=30)
    | st.sampled_from(["NaN", "-1", "1e300", "+Inf", "x"]).map(
        lambda value: f'vllm:num_requests_running{{engine="0"}} {value}'
    ),
    max_size=8,
)


@given(lines=LINES)
def test_any_page_is_a_load_within_bounds_or_none(lines: list[str]) -> None:
    for load in loads_of("\n".join(lines).encode(), EngineSection(blocks=10)):
        assert 0 <= load.running_requests <= 2**31
        assert 0 <= load.free_blocks <= load.total_blocks


class Page(BaseHTTPRequestHandler):
    """Serves what the test says."""

    body = b""
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def page() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_only_what_changed_is_said_and_a_silent_engine_keeps_its_load(
    page: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, int]] = []
    section = EngineSection(http=f"127.0.0.1:{page.server_port}", ranks=2)
    reader = LoadReader(section, lambda rank, load: said.append((rank, load.running_requests)))
    monkeypatch.setattr(Page, "body", VLLM.encode())
    await reader.look()
    await reader.look()
    assert said == [(0, 3), (1, 1)]
    monkeypatch.setattr(Page, "body", VLLM.replace(" 3.0", " 6.0").encode())
    await reader.look()
    assert said[2:] == [(0, 6)]
    monkeypatch.setattr(Page, "status", 503)
    await reader.look()
    gone = LoadReader(EngineSection(http="127.0.0.1:1"), lambda rank, load: None)
    await gone.look()
    assert (len(said), reader.failures, gone.failures) == (3, 1, 1)
