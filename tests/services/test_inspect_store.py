"""`kvtier inspect store`, against a served store."""

import json
from pathlib import Path

import pytest

from kvtier.errors import UnavailableError
from kvtier.sections import DialConfig
from kvtier_services.store.inspecting import InspectStoreConfig, inspect
from tests.support.store_service import BLOCK, a_store, small_store


async def test_an_operator_sees_bytes_blocks_rates_and_quotas(tmp_path: Path) -> None:
    config = small_store(tmp_path, quotas=("dram:1000000:tenant\x1b[0m",))
    async with a_store(config) as (running, client):
        await client.put_numbers(1, 2)
        await client.get([1, 9])
        target = f"127.0.0.1:{running.port}"
        written: list[str] = []
        asked = InspectStoreConfig(dial=DialConfig(targets=(target,)), json=True)
        assert await inspect(asked, written.append) == 0
        [store] = json.loads("".join(written))["stores"]
        dram = store["tiers"]["dram"]
        assert (store["instance"], dram["blocks"], dram["state"]) == ("s1", 2, "open")
        assert dram["bytes_written"] == 2 * BLOCK
        assert dram["hit_rate"] == 1.0
        assert store["counts"]["misses"] == 1
        written.clear()
        plain = InspectStoreConfig(dial=DialConfig(targets=(target, "127.0.0.1:1")))
        assert await inspect(plain, written.append) == 1
        text = "".join(written)
        assert "HIT RATE" in text
        assert "100.0 %" in text
        assert "\x1b" not in text


async def test_a_store_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UnavailableError):
        await inspect(InspectStoreConfig(dial=DialConfig(targets=("127.0.0.1:1",))), print)
