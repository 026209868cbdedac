"""An authorised writer stores wrong KV in frames that are right: an audit finds it, a drop ends it.

No checksum and no seal tells such a block from a true one; only computing it does.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.client.store import BlockStoreClient, StoreClientConfig
from kvtier.core.frame import FrameName
from kvtier.core.identity import KvDtype
from kvtier.errors import ConfigError
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import one_group
from kvtier.sections import DialConfig
from kvtier_services.store.dropping import DropConfig, drop, drop_request
from tests.harness.processes import Launch, ProcessRunner, kvtier_command
from tests.harness.waiting import eventually_async
from tests.support.store_cluster import StoreProcess, store_launch
from tests.support.worker_cluster import (
    BLOCK_TOKENS,
    MIB,
    TOKEN_BYTES,
    Client,
    WorkerProcess,
    prompt_of,
    worker_launch,
)
from tests.support.worker_rig import Rig, RigTerms, TierBelow

pytestmark = pytest.mark.timeout(180)
BAD, GOOD = 0xBAD, 0x600D
PROMPT = prompt_of(3, 1601)
"""100 blocks, and one token."""
AUDITS = "kvtier_worker_audits_total"
AUDITED = "kvtier_worker_audit_blocks_total"


def computed() -> tuple[dict[FrameName, bytes], str]:
    """The prompt's blocks as any honest worker writes them, and the answer."""
    geometry = one_group(4, 1, TOKEN_BYTES // 32, KvDtype.FLOAT32, BLOCK_TOKENS)
    below = TierBelow()
    runner = FakeModel(geometry, FakeTerms(context_tokens=131_072))
    rig = Rig(runner, RigTerms(step_tokens_max=2048, blocks=128), below)
    text = "".join(map(chr, rig.generate(PROMPT, 4).tokens))
    rig.settle()
    assert len(below.held) == 100
    return below.held, text


def client_of(store: StoreProcess, writer_id: int = 0) -> BlockStoreClient:
    terms = StoreClientConfig(deadline_s=20.0, writer_id=writer_id)
    return BlockStoreClient(DialConfig(targets=(store.socket,)), terms)


async def put(store: StoreProcess, writer_id: int, held: Mapping[FrameName, bytes]) -> None:
    async with client_of(store, writer_id) as client:
        results = await client.put_many(list(held), list(held.values()))
        assert all(result.is_held for result in results)


async def read(store: StoreProcess, names: list[FrameName]) -> list[bytes | None]:
    async with client_of(store) as client:
        results = await client.get_many(names)
    return [None if one.payload is None else bytes(one.payload) for one in results]


async def is_audited(client: Client, text: str) -> None:
    """Ask until a request is audited: one whose lookup came late computes all by itself."""
    for other in range(20):
        told = await client.answer(PROMPT, 4)
        assert (told.text, told.cached) == (text, {})
        if await client.metric(AUDITS):
            return
        await client.answer(prompt_of(50 + other, 4080), 1)  # L1 forgets it
    raise AssertionError("no request was audited")


async def purged(processes: ProcessRunner, store: StoreProcess, writer: str) -> str:
    """What `kvtier store drop` says that it dropped of a writer's."""
    target = f"127.0.0.1:{store.port}"
    argv = kvtier_command("store", "drop", "--targets", target, "--writer", writer)
    process = processes.spawn(Launch("drop", argv))
    assert await asyncio.to_thread(process.wait, 60) == 0, process.log_text()
    return process.log_text().splitlines()[-1]


async def dropped(store: StoreProcess, **what: Any) -> int:
    """The same by other selections."""
    lines: list[str] = []
    dial = DialConfig(targets=(f"127.0.0.1:{store.port}",))
    assert await drop(DropConfig(dial=dial, json=True, **what), lines.append) == 0
    (told,) = json.loads("".join(lines))["stores"]
    return int(told["dropped"])


async def test_an_audit_finds_the_one_poisoned_block_of_a_hundred_and_its_writer_is_purged(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    room = {"bytes_max": 32 * MIB, "slab_bytes": MIB, "blocks_max": 4096}
    in_store, store_port = store_launch(processes, tmp_path / "data", dram=room)
    store = StoreProcess(processes.spawn(in_store), store_port, tmp_path / "data" / "run")
    made = asyncio.create_task(asyncio.to_thread(computed))
    await asyncio.to_thread(store.process.wait_ready)
    launch, port = worker_launch(
        processes,
        store={"targets": [store.socket]},
        cache={"kv_memory_bytes": 8 * MIB},
        offload={
            "lookup_ms_max": 5000,
            "load_ms_max": 60_000,
            "audit_fraction": 1.0,
            "audit_blocks_max": 128,
        },
    )
    worker = WorkerProcess(processes.spawn(launch), port)
    held, text = await made
    names = list(held)
    poisoned, unasked = names[41], {names[i]: held[names[i + 1]] for i in range(60, 70)}
    await put(store, BAD, {poisoned: held[names[17]]})  # true KV of other tokens
    await put(store, GOOD, held)
    (seen,) = await read(store, [poisoned])
    assert seen == held[names[17]]  # first writer wins: everybody would load it
    await asyncio.to_thread(worker.process.wait_ready)

    async with worker.client() as client:
        await is_audited(client, text)

        async def is_compared() -> bool:
            return await client.metric(AUDITED, outcome="equal") == 99

        await eventually_async(is_compared, 60, "99 blocks are equal")
        counts = [await client.metric(AUDITED, outcome=o) for o in ("differs", "unread")]
        assert counts == [1, 0]
        found = re.findall(r"not what was computed.*block=(\w+).*writer=(\w+)", worker.clean_log())
        assert found == [(poisoned.key[:8].hex(), f"{BAD:016x}")]

        async def is_gone() -> bool:
            return (await read(store, [poisoned]))[0] in (None, held[poisoned])

        await eventually_async(is_gone, 60, "the poisoned block is dropped")
        others = [name for name in names if name != poisoned]
        assert await read(store, others) == [held[n] for n in others]
        assert (await client.answer(PROMPT, 4)).text == text
        # Audited too, of the blocks behind the dropped one, unless the lookup came late.
        again = 58 if await client.metric(AUDITS) == 2 else 0
        await client.until(AUDITED, 99 + again, outcome="equal")
        assert await client.metric(AUDITED, outcome="differs") == 1
        page_id = re.search(r"serving.* writer=([0-9a-f]{16})", worker.clean_log())
        assert page_id is not None
        assert await client.metric("kvtier_worker_writer_info", writer=page_id[1]) == 1

    await asyncio.to_thread(worker.process.terminate)  # so that it writes nothing more
    await asyncio.to_thread(worker.process.wait, 60)

    # The operator takes what else that writer wrote, and no other's.
    async with client_of(store) as operator:
        assert await operator.drop(list(unasked)) == 10
    await put(store, BAD, unasked)
    told = await purged(processes, store, found[0][1])
    assert told == f"store 127.0.0.1:{store.port}: dropped 10 blocks"
    results = dict(zip(names, await read(store, names), strict=True))
    for name, payload in results.items():
        is_left = name != poisoned and name not in unasked
        assert payload == held[name] if is_left else payload in (None, held[name])
    assert [results[name] for name in unasked] == [None] * 10
    namespace = names[0].namespace.hex()
    assert await dropped(store, namespace=namespace, keys=(names[0].key.hex(),)) == 1
    assert await dropped(store, namespace=namespace) >= 88
    assert await read(store, names) == [None] * 100


async def test_a_drop_says_what_it_needs_and_who_did_not_answer() -> None:
    key = "ab" * 32
    wrong: list[dict[str, object]] = [
        {},
        {"writer": "1", "scope": "s"},
        {"writer": "xyz"},
        {"writer": "1" * 17},
        {"keys": (key,)},
        {"namespace": "ab"},
        {"namespace": key, "keys": ("ab",)},
        {"writer": "1", "deadline_ms": 0},
        {"writer": "1", "dial": DialConfig()},
    ]
    for settings in wrong:
        with pytest.raises(ConfigError):
            DropConfig(**settings)  # type: ignore[arg-type]
    assert drop_request(DropConfig(writer="0xBAD")).writer_id == BAD
    assert drop_request(DropConfig(scope="s")).scope == "s"
    assert drop_request(DropConfig(namespace=key)).namespace == bytes.fromhex(key)
    absent = DialConfig(targets=("127.0.0.1:1", "127.0.0.1:2"))
    lines: list[str] = []
    assert await drop(DropConfig(dial=absent, writer="1", deadline_ms=2000), lines.append) == 1
    assert [line.split()[1] for line in "".join(lines).splitlines()] == [
        "127.0.0.1:1:",
        "127.0.0.1:2:",
    ]
