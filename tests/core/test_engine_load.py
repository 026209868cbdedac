"""What an engine's metrics page says of its load, however nasty the page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.engine_load import PAGE_BYTES_MAX, SGLANG, VLLM, RankLoad, read_loads

PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="a}\\"b"} 3.0
vllm:num_requests_running{engine="1",model_name="a}\\"b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a}\\"b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a}\\"b"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
"""


def test_each_rank_has_its_own_numbers() -> None:
    loads = read_loads(PAGE, VLLM)
    assert loads is not None
    assert loads.ranks == {0: RankLoad(3, 2, 0.25), 1: RankLoad(1, 0, 0.0)}
    assert (loads.blocks, loads.block_tokens) == (100, 32)


def test_a_page_of_another_engine_says_nothing() -> None:
    assert read_loads(PAGE, SGLANG) is None
    assert read_loads(b"", VLLM) is None
    assert read_loads(b"vllm:num_requests_waiting 3", VLLM) is None


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-Inf", "x", "", "1 2 x", "0x10", "1_0_"])
def test_what_is_no_number_is_not_there(text: str) -> None:
    page = f'vllm:num_requests_running{{engine="0"}} {text}'.encode()
    assert read_loads(page, VLLM) is None


def test_numbers_and_ranks_have_bounds() -> None:
    page = b'vllm:num_requests_running{engine="0"} 1e300\nvllm:num_requests_waiting -5\n'
    page += b'vllm:num_requests_running{engine="999999"} 5\nvllm:kv_cache_usage_perc 17'
    loads = read_loads(page, VLLM)
    assert loads is not None
    assert loads.ranks == {0: RankLoad(2**31, 0, 1.0)}


def test_what_stands_behind_the_ceiling_or_in_an_endless_line_is_not_read() -> None:
    far = b"#" * PAGE_BYTES_MAX + b"\nvllm:num_requests_running 3\n"
    assert read_loads(far, VLLM) is None
    long = b"vllm:num_requests_running{" + b'a="b",' * 100_000 + b"} 3\n"
    assert read_loads(long, VLLM) is None


LINES = st.lists(
    st.sampled_from(PAGE.splitlines())
    | st.binary(max_size=30)
    | st.sampled_from([b"NaN", b"-1", b"1e300", b"+Inf", b"x", b"\xff"]).map(
        lambda value: b'vllm:num_requests_running{engine="0"} ' + value
    ),
    max_size=8,
)


@given(lines=LINES)
def test_any_page_gives_numbers_within_bounds_or_nothing(lines: list[bytes]) -> None:
    loads = read_loads(b"\n".join(lines), VLLM)
    if loads is not None:
        for load in loads.ranks.values():
            assert 0 <= load.running <= 2**31
            assert 0 <= load.waiting <= 2**31
            assert 0 <= load.usage <= 1
