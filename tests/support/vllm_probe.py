"""Runs inside vLLM's Python: our connector with all of vLLM but the engine round it.

Prints JSON. Per case of `NAMED`, the names under which the store is asked for a request's blocks;
null where it is not asked at all. Below `refused` and `halves`, what the two halves of it did,
which are joined as vLLM joins them: by what they tell each other.
What must not live here: what a test expects of it.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace as Fake
from typing import Any
from unittest import mock

import torch
import vllm
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.engines.vllm import connector as ours
from kvtier.ports import GetResult, GetStatus, PutResult, PutStatus

BLOCK_TOKENS = 32
HEADS, HEAD_SIZE = 4, 8
LAYERS = ["a.0", "a.1"]
BLOCKS = [5, 2, 7, 1, 3]
"""Where a request lies in the engine's caches."""


class FullAttentionSpec(Fake):
    """Named as vLLM's, which is how it is recognised."""


class SlidingWindowSpec(Fake):
    """Another kind."""


class Asked:
    """A store that notes for what it is asked; `held`: whether it has it, None: it never says."""

    def __init__(self, held: bool | None = None) -> None:
        self.names: Any = None
        self._held = held

    def look(self, names: Any, deadline_s: float) -> "Asked":
        self.names = names
        return self

    def wait(self, seconds: float) -> None:
        """Nothing comes."""

    def done(self) -> bool:
        return True

    def held(self) -> tuple[bool, ...] | None:
        return None if self._held is None else (self._held,) * len(self.names.digests)


class Client:
    """A store's client: brings so many leading blocks of what it is asked for, takes everything."""

    def __init__(self, brings: int = 0) -> None:
        self.brings = brings
        self.puts: dict[bytes, bytes] = {}
        self.may_put = threading.Event()

    def get_many(self, names: Sequence[Any], *_: Any, **__: Any) -> list[GetResult]:
        return [
            GetResult(GetStatus.HIT if at < self.brings else GetStatus.MISS)
            for at in range(len(names))
        ]

    def put_many(
        self, names: Sequence[Any], payloads: Sequence[Any], *_: Any, **__: Any
    ) -> list[PutResult]:
        assert self.may_put.wait(30)
        self.puts |= {n.key: bytes(row) for n, row in zip(names, payloads, strict=True)}
        return [PutResult(PutStatus.STORED)] * len(names)

    def close(self) -> None:
        """Nothing is open."""


class Said(logging.Handler):
    """What our part of vLLM's log says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def listened() -> Iterator[list[str]]:
    said, log = Said(), logging.getLogger("vllm.kvtier")
    log.addHandler(said)
    try:
        yield said.lines
    finally:
        log.removeHandler(said)


def connector(
    role: KVConnectorRole = KVConnectorRole.SCHEDULER, **changes: Any
) -> ours.KvtierConnector:
    """One half, of an engine whose store is not there; `changes` by dotted name."""
    model = Fake(
        model="m",
        revision=None,
        dtype="torch.float32",
        hf_text_config=Fake(to_dict=dict),
        get_total_num_kv_heads=lambda: HEADS,
        get_head_size=lambda: HEAD_SIZE,
    )
    config = Fake(
        kv_transfer_config=Fake(
            kv_connector_extra_config={"store": "unix:/nowhere/s.sock", "revision": "r"},
            kv_load_failure_policy="recompute",
        ),
        cache_config=Fake(
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            cache_dtype="auto",
            prefix_match_unit=None,
        ),
        parallel_config=Fake(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        speculative_config=None,
        lora_config=Fake() if "--lora" in sys.argv else None,
        model_config=model,
    )
    caches = Fake(
        kv_cache_groups=[
            Fake(kv_cache_spec=FullAttentionSpec(block_size=BLOCK_TOKENS), layer_names=LAYERS)
        ],
        hash_block_size=BLOCK_TOKENS,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        target: Any = caches if path == ["caches"] else config
        for part in path if target is config else ():
            target = getattr(target, part)
        setattr(target, last, value)
    return ours.KvtierConnector(config, role, caches)


def request_of(name: str, **fields: Any) -> Request:
    """A prompt of three blocks and four tokens."""
    return Request(
        request_id=name,
        prompt_token_ids=list(range(100)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256_cbor),
        **fields,
    )


def item(digest: str) -> MultiModalFeatureSpec:
    """An image whose placeholder is tokens 8 to 72."""
    return MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(8, 64), digest)


NAMED: dict[str, dict[str, Any]] = {
    "text": {},
    "image one": {"mm_features": [item("1" * 64)]},
    "image one again": {"mm_features": [item("1" * 64)]},
    "image two": {"mm_features": [item("2" * 64)]},
    "image one, salted": {"mm_features": [item("1" * 64)], "cache_salt": "s"},
    "image named by its sender": {"mm_features": [item("holiday")]},
    "salt": {"cache_salt": "name"},
}


def named() -> dict[str, Any]:
    """See the module."""
    cases = dict(NAMED)
    if "--lora" in sys.argv:
        adapter = LoRARequest("name", 1, sys.argv[sys.argv.index("--lora") + 1])
        cases["adapter"] = {"lora_request": adapter}
    scheduler = connector()
    found: dict[str, Any] = {
        "requires_kv_delivery": scheduler.requires_kv_delivery,
        "shares": scheduler._scheduling is not None,
    }
    for name, fields in cases.items():
        asked = Asked()
        if scheduler._scheduling is not None:
            scheduler._scheduling.store = asked
        scheduler.on_new_request(request_of(name, **fields))
        found[name] = asked.names and [
            [space.hex() + digest.hex() for digest in asked.names.digests]
            for space in asked.names.namespaces
        ]
    scheduler.shutdown()
    return found


def output(request_id: str = "", computed: int = 0, tokens: int = 0) -> Fake:
    """A step of vLLM's scheduler; without a request, one that computes nothing."""
    new = [Fake(req_id=request_id, num_computed_tokens=computed)] if request_id else []
    return Fake(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=Fake(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        num_scheduled_tokens={request_id: tokens} if request_id else {},
        total_num_scheduled_tokens=tokens,
        kv_connector_block_state=Fake(
            block_ids={request_id: (BLOCKS,)}, get_block_ids=lambda _: (BLOCKS,)
        ),
    )


ROOM = Fake(get_block_ids=lambda: (BLOCKS,))
"""What vLLM gave a request."""


class Halves:
    """A scheduler's half and those of its ranks; `held`: whether the store has what it is asked."""

    def __init__(
        self, *clients: Client, held: bool = True, save: str = "prompt", swapped: bool = False
    ) -> None:
        extra = {"store": "unix:/nowhere/s.sock", "revision": "r", "save": save, "load": "always"}
        changes = {
            "kv_transfer_config__kv_connector_extra_config": extra,
            "parallel_config__tensor_parallel_size": len(clients),
        }
        self.scheduler = connector(**changes)
        assert self.scheduler._scheduling is not None
        self.scheduler._scheduling.store = Asked(held)
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers = []
        for rank, client in enumerate(clients):
            worker = connector(KVConnectorRole.WORKER, **changes)
            shape = [8, HEADS // len(clients), BLOCK_TOKENS, 2 * HEAD_SIZE]
            if swapped:
                shape[1], shape[2] = shape[2], shape[1]
            self.caches.append({name: torch.ones(shape) for name in LAYERS})
            with (
                mock.patch.object(ours, "BlockStoreClient", lambda *_, one=client: one),
                mock.patch.object(ours, "get_tensor_model_parallel_rank", lambda one=rank: one),
            ):
                worker.register_kv_caches(self.caches[-1])
            self.workers.append(worker)

    def offered(self, request: Request, computed: int = 0) -> list[Any]:
        """What vLLM is told that it can load."""
        return list(self.scheduler.get_num_new_matched_tokens(request, computed))

    def load(self, request: Request) -> dict[str, Any]:
        """Have all ranks load what is offered, and the scheduler hear how that ended."""
        self.scheduler.on_new_request(request)
        offered = self.offered(request)
        self.scheduler.update_state_after_alloc(request, ROOM, offered[0])
        orders = self.scheduler.build_connector_meta(output())
        ends = [loaded(worker, orders) for worker in self.workers]
        together = ends[0].pop("meta")
        for end in ends[1:]:
            together = together.aggregate(end.pop("meta"))
        self.scheduler.update_connector_output(Fake(kv_connector_worker_meta=together))
        return {"offered": offered, "ends": ends}

    def compute(self, request: Request, client: Client, tokens: int) -> list[int]:
        """Have the one rank compute, and hand every block to others before the store has taken one.

        Which of the request's blocks the store has then; -1: of one it has other bytes.
        """
        orders = self.scheduler.build_connector_meta(output(request.request_id, 0, tokens))
        (worker,) = self.workers
        worker.bind_connector_metadata(orders)
        worker.wait_for_save()
        worker.handle_preemptions(orders)
        for cache in self.caches[0].values():
            cache.zero_()
        client.may_put.set()
        counts = self.scheduler.get_kv_connector_stats()
        ordered = 0 if counts is None else counts.data.get("saves_ordered", 0)
        until(lambda: len(client.puts) == ordered)
        want = torch.ones(len(LAYERS) * HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE).numpy().tobytes()
        digests = [bytes(one) for one in request.block_hashes]
        return [
            digests.index(digest) if payload == want else -1
            for digest, payload in client.puts.items()
        ]

    def close(self) -> None:
        for half in (self.scheduler, *self.workers):
            half.shutdown()


def until(is_so: Callable[[], bool]) -> None:
    ended_by = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ended_by
        time.sleep(0.01)


def loaded(worker: ours.KvtierConnector, orders: Any) -> dict[str, Any]:
    """How a rank's load ended."""
    worker.bind_connector_metadata(orders)
    worker.start_load_kv(None)
    found: list[Any] = []

    def is_over() -> bool:
        found[:] = [worker.get_transfer_results(set())]
        return bool(found[0].finished_recving)

    until(is_over)
    invalid = sorted(worker.get_block_ids_with_load_errors())
    meta = worker.build_connector_worker_meta()
    return {"failed": sorted(found[0].failed_recving), "invalid": invalid, "meta": meta}


def halves_did() -> dict[str, Any]:
    """See the module."""
    found: dict[str, Any] = {}
    client, request = Client(), request_of("r")
    halves = Halves(client)
    found["a load that brings nothing"] = halves.load(request)
    found["asked again"] = halves.offered(request)
    halves.scheduler.update_state_after_alloc(request, ROOM, 0)
    found["saved of what was computed"] = halves.compute(request, client, 100)
    found["asked after a preemption"] = halves.offered(request)
    found["at its end"] = list(halves.scheduler.request_finished(request, BLOCKS))
    halves.close()

    halves = Halves(Client(3), Client(1))
    found["two ranks of which one lacks blocks"] = halves.load(request_of("r"))
    found["what both have"] = halves.offered(request_of("r"))
    halves.close()

    with listened() as said:
        halves = Halves(Client(3), swapped=True)
    found["an unknown layout"] = halves.load(request_of("r")) | {"said": said}
    halves.close()

    for state, free in (("empty", 7), ("in use", 6)):
        client, request = Client(), request_of("r")
        halves = Halves(client, held=False)
        halves.scheduler.on_new_request(request)
        halves.scheduler.bind_gpu_block_pool(
            Fake(num_gpu_blocks=8, get_num_free_blocks=lambda free=free: free)
        )
        with listened() as said:
            found[f"reset of a pool that is {state}"] = halves.scheduler.reset_cache()
        found[f"said of a pool that is {state}"] = len(said)
        halves.offered(request)
        found[f"saved after a reset of a pool that is {state}"] = halves.compute(
            request, client, 100
        )
        halves.close()

    for policy in ("prompt", "all", "none"):
        client, request = Client(), request_of("r")
        halves = Halves(client, held=False, save=policy)
        halves.scheduler.on_new_request(request)
        request.append_output_token_ids(list(range(30)))
        found[f"saved by {policy}"] = halves.compute(request, client, 130)
        halves.close()
    return found


REFUSED: dict[str, dict[str, Any]] = {
    "failures end requests": {"kv_transfer_config__kv_load_failure_policy": "fail"},
    "sha256": {"cache_config__prefix_caching_hash_algo": "sha256"},
    "a hash of a random seed": {"cache_config__prefix_caching_hash_algo": "xxhash_cbor"},
    "a sliding window": {
        "caches__kv_cache_groups": [
            Fake(kv_cache_spec=SlidingWindowSpec(block_size=BLOCK_TOKENS), layer_names=LAYERS)
        ]
    },
    "a release of next year": {},
}


def refused() -> dict[str, Any]:
    """See the module: what an engine gets that is not served, and what its log says."""
    sound = Halves(Client(3))
    request = request_of("r")
    sound.scheduler.on_new_request(request)
    sound.scheduler.update_state_after_alloc(request, ROOM, sound.offered(request)[0])
    orders = sound.scheduler.build_connector_meta(output())
    sound.close()
    found: dict[str, Any] = {}
    for name, changes in REFUSED.items():
        version = "0.99.0" if "release" in name else vllm.__version__
        with mock.patch.object(vllm, "__version__", version), listened() as said:
            half = connector(**changes)
            worker = connector(KVConnectorRole.WORKER, **changes)
        half.on_new_request(request)
        offered = list(half.get_num_new_matched_tokens(request, 0))
        half.update_state_after_alloc(request, ROOM, 0)
        ours_now = half.build_connector_meta(output("r", 0, 100)).orders
        worker.register_kv_caches({})
        end = loaded(worker, orders)
        del end["meta"]
        found[name] = {
            "said": said,
            "offered": offered,
            "orders": len(ours_now.loads) + len(ours_now.saves),
            "at its end": list(half.request_finished(request, BLOCKS)),
            "a load all the same": end,
        }
        half.shutdown()
        worker.shutdown()
    return found


def main() -> None:
    """See the module."""
    logging.disable(logging.CRITICAL)
    init_none_hash(sha256_cbor)
    found = named()
    logging.disable(logging.NOTSET)
    if "--halves" in sys.argv:
        found |= {"halves": halves_did(), "refused": refused()}
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
