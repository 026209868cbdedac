"""A bridge beside real vLLM: what the index shows is what the engine's own pages say it holds.

Runs in `make test-vllm`; skipped where there is no vLLM.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.types import Tier
from kvtier.wire import messages as pb
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually
from tests.support.bridge_cluster import page_of
from tests.support.index_cluster import (
    HolderView,
    IndexProcess,
    channel_to,
    index_launch,
    ranks_view,
)
from tests.support.paged_models import smollm2
from tests.support.store_cluster import MIB, start_store
from tests.support.vllm_servers import (
    BLOCK_TOKENS,
    PYTHON,
    WHY_NOT,
    VllmServer,
    launch_vllm,
    prompt,
    start_vllm,
)

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

REVISION = "rev-1"
POOL = Pool("m", REVISION, BLOCK_TOKENS)
SHOWN_S = 60.0
RING = 4
"""Messages that the engine can replay: fewer than any test makes."""


@dataclass
class Rig:
    """One server with our connector in it, its bridge, a store and an index."""

    server: VllmServer
    index: IndexProcess
    bridge: Process
    page: int
    by_connector: bool

    def view(self) -> HolderView | None:
        async def asked() -> HolderView | None:
            async with channel_to(self.index.address) as channel:
                return (await ranks_view(channel)).get(("vllm-a", 0))

        found = asyncio.run(asked())
        return None if found is None or found.hidden else found

    def shows(self, *held: tuple[list[int], str | None]) -> None:
        """Wait until the index shows just the whole blocks of these prompts, EXACT."""
        wanted = {one for tokens, salt in held for one in chain(tokens, salt)}
        last: object = None

        def is_shown() -> bool:
            nonlocal last
            view = self.view()
            if view is None:
                last = "nobody"
                return False
            shown = set(view.shards.get(0, {}).get(Tier.GPU, np.empty(0, np.uint64)).tolist())
            last = f"{len(shown)} blocks, {len(shown - wanted)} too many, trust {view.trust}"
            return shown == wanted and view.trust == pb.TRUST_EXACT

        try:
            eventually(is_shown, SHOWN_S, f"{len(wanted)} blocks")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None

    def metric(self, line: str) -> float:
        """One number of the bridge's page."""
        (found,) = [row for row in page_of(self.page).splitlines() if row.startswith(line + " ")]
        return float(found.rpartition(" ")[2])


def chain(tokens: list[int], salt: str | None) -> set[int]:
    hashes = prefix_hashes(chain_root(POOL, salt, None), tokens, BLOCK_TOKENS)
    return {int(one) for one in hashes}


@pytest.fixture(scope="module", params=["connector", "events"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """By the connector, and by the events alone as for an engine without it."""
    by_connector = request.param == "connector"
    model = smollm2(tmp_path_factory).directory
    directory = tmp_path_factory.mktemp(f"bridge-{request.param}")
    with ProcessRunner(f"vllm-bridge-{request.param}", directory) as runner:
        store = start_store(
            runner, directory / "store", dram={"bytes_max": 256 * MIB, "slab_bytes": 64 * MIB}
        )
        launch, port = index_launch(runner)
        index = IndexProcess(runner.start(launch), port)
        residents = directory / "residents"
        extra: dict[str, Any] = {"revision": REVISION, "lookup_ms": 10_000, "load_ms": 20_000}
        if by_connector:
            extra["residents"] = str(residents)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": "kv",
            "endpoint": f"ipc://{directory}/events",
            "replay_endpoint": f"ipc://{directory}/replay",
            "buffer_steps": RING,
        }
        (server,) = start_vllm(
            runner,
            launch_vllm(
                "vllm-a",
                model,
                store.socket,
                f"--kv-events-config={json.dumps(events)}",
                "--load-format=dummy",
                "--num-gpu-blocks-override=200",
                extra=extra,
            ),
        )
        page = free_port()
        engine: dict[str, TomlValue] = {
            "http": f"127.0.0.1:{server.port}",
            "events": f"ipc://{directory}/events",
            "replay": f"ipc://{directory}/replay",
            "topic": "kv",
            "gone_ms": 500,
            "probe_ms": 500,
        }
        if by_connector:
            engine["residents"] = str(residents)
        settings: dict[str, TomlValue] = {
            "instance": "vllm-a",
            "index": {"targets": [index.address]},
            "telemetry": {"metrics_bind": f"127.0.0.1:{page}"},
            "memory": {"data_dir": str(directory / "data"), "save_ms": 20},
            "model": {
                "served_names": ["m"],
                "model_id": POOL.model_id,
                "revision": REVISION,
                "block_tokens": BLOCK_TOKENS,
                "tokenizer_digest": "74" * 32,
            },
            "engine": engine,
        }
        path = runner.config_file("bridge.toml", settings)
        command = kvtier_command("bridge", "--config", str(path))
        ready = http_ready(f"http://127.0.0.1:{page}/live")
        bridge = runner.start(Launch("bridge", command, ready=ready))
        yield Rig(server, index, bridge, page, by_connector)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def ask(rig: Rig, *held: tuple[list[int], str | None]) -> None:
    for tokens, salt in held:
        fields = {} if salt is None else {"cache_salt": salt}
        rig.server.complete(tokens, 1, **fields)


def test_the_index_shows_just_what_the_engine_holds(rig: Rig) -> None:
    """A bridge that begins late, salts, resets, loads from the store, evictions."""
    one, two = (prompt(1, 300), None), (prompt(2, 200), "tenant")
    ask(rig, one, two)
    rig.shows(one, two)

    # Loaded by the connector instead of computed: held all the same, once.
    rig.server.forget()
    ask(rig, (prompt(3, 70), None))
    rig.shows((prompt(3, 70), None))
    before = rig.server.loaded_tokens

    def is_loaded() -> bool:
        rig.server.forget()
        ask(rig, one)
        return rig.server.loaded_tokens > before

    eventually(is_loaded, SHOWN_S, "a prompt was loaded from the store")
    rig.shows(one)

    # Evicted: 200 blocks, and more is asked for than they hold.
    last = [(prompt(10 + n, 1_600), None) for n in range(4)]
    ask(rig, *last)
    eventually(lambda: within_pool(rig), SHOWN_S, "no more than the pool has")


def test_a_bridge_that_was_killed_knows_what_happened_meanwhile(rig: Rig) -> None:
    """More than the ring of events remembers: by them alone it is in doubt until a reset."""
    rig.server.forget()
    ask(rig, (prompt(20, 40), None))
    rig.shows((prompt(20, 40), None))
    rig.bridge.kill()
    some = [(prompt(30 + n, 64), None) for n in range(2 * RING)]
    ask(rig, *some)
    rig.bridge.restart()
    if rig.by_connector:
        rig.shows((prompt(20, 40), None), *some)
        return
    eventually(lambda: rig.metric('kvtier_bridge_doubts{reason="gap"}') == 1, SHOWN_S, "a gap")
    rig.server.forget()
    last = (prompt(49, 100), None)
    ask(rig, last)
    rig.shows(last)
    assert rig.metric('kvtier_bridge_doubts{reason="gap"}') == 0


def test_nothing_is_shown_of_the_old_life_of_an_engine_that_was_killed(rig: Rig) -> None:
    rig.server.forget()
    one = (prompt(50, 100), None)
    ask(rig, one)
    rig.shows(one)
    rig.server.process.end()  # its engine core and workers too: they outlive the API's process
    eventually(lambda: rig.view() is None, SHOWN_S, "the dead engine left")
    rig.server.process.restart()
    fresh = (prompt(40, 100), None)
    ask(rig, fresh)
    rig.shows(fresh)
    ask(rig, one)  # from the store, perhaps
    rig.shows(fresh, one)


def within_pool(rig: Rig) -> bool:
    """Whether all that is shown of the last prompt is there, and no more than there is room for."""
    view = rig.view()
    if view is None or view.trust != pb.TRUST_EXACT:
        return False
    shown = set(view.shards[0][Tier.GPU].tolist())
    return len(shown) < 200 and chain(prompt(13, 1_600), None) <= shown
