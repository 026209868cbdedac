"""Requests that no small model can serve, as vLLM itself hashes them, and what we ask a store for.

vLLM's own `Request` and block hasher run in its own Python, with our connector behind them; the
model that would look at an image is all that is missing.
"""

from typing import Any

import pytest

from tests.support.vllm_servers import PYTHON, WHY_NOT

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(300)


def names(asked: dict[str, Any], case: str) -> set[str]:
    (of_one_rank,) = asked[case]
    assert len(of_one_rank) == 3
    return set(of_one_rank)


def test_the_engine_need_not_keep_blocks_until_we_have_saved_them(asked: dict[str, Any]) -> None:
    assert asked["shares"] is True
    assert asked["requires_kv_delivery"] is False


def test_the_same_placeholder_with_other_content_has_other_names(asked: dict[str, Any]) -> None:
    one = names(asked, "image one")
    assert names(asked, "image one again") == one
    for other in ("text", "image two", "image one, salted"):
        assert not names(asked, other) & one


def test_an_image_that_its_sender_has_named_is_served_misses(asked: dict[str, Any]) -> None:
    assert asked["image named by its sender"] is None


def test_an_adapter_and_a_salt_of_the_same_text_have_other_names(asked: dict[str, Any]) -> None:
    adapter, salt, text = names(asked, "adapter"), names(asked, "salt"), names(asked, "text")
    assert not adapter & salt
    assert not adapter & text
    assert not salt & text
