"""Where a request's blocks are, as each release of vLLM tells it."""

from types import SimpleNamespace as Fake

import pytest

from kvtier.engines.vllm.tables import BlockTables


def test_a_release_that_answers_for_every_request_is_asked_each_time() -> None:
    tables = BlockTables()
    told = {"r": ([1, 2],)}
    state = Fake(get_block_ids=told.get)
    assert tables.of(state, "r") == [1, 2]
    told["r"] = ([1, 2, 3],)
    assert tables.of(state, "r") == [1, 2, 3]
    assert tables.of(state, "other") is None


def test_a_release_that_tells_only_what_is_new_is_remembered_until_the_end() -> None:
    tables = BlockTables()
    assert tables.of(Fake(block_ids={"r": ([1, 2],)}), "r") == [1, 2]
    assert tables.of(Fake(block_ids={}), "r") == [1, 2]
    assert tables.of(Fake(block_ids={"r": ([7],)}), "r") == [7]  # preempted and back
    tables.forget("r")
    assert tables.of(Fake(block_ids={}), "r") is None


def test_several_groups_are_no_table() -> None:
    with pytest.raises(ValueError, match="unpack"):
        BlockTables().of(Fake(block_ids={"r": ([1], [2])}), "r")
