"""`KvtierConnector`: what vLLM loads by `kv_connector_module_path`.

    --kv-transfer-config '{"kv_connector": "KvtierConnector",
      "kv_connector_module_path": "kvtier.engines.vllm.connector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"store": "unix:/run/kvtier/store.sock"}}'

vLLM builds it twice: for its scheduler, and in each worker. Loads are asynchronous only; whatever
fails, the engine recomputes. An engine whose blocks cannot be seen or verified from here is served
misses, and its log says why.
What must not live here: decisions (scheduling.py), bytes (pages.py), calls (lookups, transfers).
"""

import contextlib
import logging
import re
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_block_hash, resolve_none_hash_seed

from kvtier.client.store import StoreClientConfig
from kvtier.client.store_blocking import BlockStoreClient
from kvtier.core.identity import AdapterRef, chain_root
from kvtier.engines.vllm.adapters import AdapterDigests
from kvtier.engines.vllm.facts import EngineFacts, Refusal, read_facts
from kvtier.engines.vllm.lookups import StoreLookups
from kvtier.engines.vllm.metrics import Increments, KvtierMetrics, KvtierStats
from kvtier.engines.vllm.namespaces import tell_namespace
from kvtier.engines.vllm.pages import KvPages
from kvtier.engines.vllm.prefixes import PrefixHashes
from kvtier.engines.vllm.residents import NO_KEYS, FeedTerms, ResidentsFeed
from kvtier.engines.vllm.scheduling import Arrival, Scheduled, Scheduling, StepOrders
from kvtier.engines.vllm.settings import settings_from
from kvtier.engines.vllm.tables import BlockTables
from kvtier.engines.vllm.transfers import Transfers
from kvtier.engines.vllm.worth import Worth
from kvtier.errors import CallerError
from kvtier.types import Fingerprint

LOG = logging.getLogger("vllm.kvtier")
"""Under vLLM's own logger, so that its handlers show what is said here."""

_RECOMPUTE = "recompute"
_DIGEST = re.compile(r"[0-9a-f]{32,128}")


class _Orders(KVConnectorMetadata):
    """What travels from scheduler to workers beside a step."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class _Ends(KVConnectorWorkerMetadata):
    """What travels back: the step, and (blocks in place, seconds) by request whose load ended."""

    def __init__(self, step: int, loads: dict[str, tuple[int, float]]) -> None:
        self.step = step
        self.loads = loads

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "_Ends":
        assert isinstance(other, _Ends)
        both = dict(self.loads)
        for request_id, (leading, seconds) in other.loads.items():
            known = both.get(request_id, (leading, seconds))
            both[request_id] = (min(leading, known[0]), max(seconds, known[1]))
        return _Ends(max(self.step, other.step), both)


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """ConfigError for settings that cannot be meant; a Refusal is told once, and misses."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings_from(transfer.kv_connector_extra_config or {})
        self._facts: EngineFacts | None = None
        self._scheduling: Scheduling | None = None
        self._lookups: StoreLookups | None = None
        self._transfers: Transfers | None = None
        self._residents: ResidentsFeed | None = None
        self._pool: Any = None
        self._adapters = AdapterDigests()
        self._namespaces: dict[bytes | None, tuple[Fingerprint, ...]] = {}
        self._invalid_blocks: set[int] = set()
        self._loads: dict[str, tuple[int, float]] = {}
        self._tables = BlockTables()
        self._increments = Increments()
        self._told: set[str] = set()
        seed = str(resolve_none_hash_seed(sha256_cbor))
        facts = read_facts(
            vllm_config, kv_cache_config, str(vllm.__version__), seed, self._settings
        )
        if transfer.kv_load_failure_policy != _RECOMPUTE:
            facts = Refusal('set "kv_load_failure_policy": "recompute"')
        if isinstance(facts, Refusal):
            LOG.error("kvtier serves this engine misses only: %s", facts.reason)
            return
        self._facts = facts
        if role is KVConnectorRole.SCHEDULER:
            self._lookups = StoreLookups(self._settings.dial())
            worth = Worth(facts.pool.block_tokens, time.monotonic())
            self._scheduling = Scheduling(
                self._settings, facts.pool.block_tokens, self._lookups, worth
            )
            if self._settings.residents:
                folder = Path(self._settings.residents)
                parallel = vllm_config.parallel_config
                rank = int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))
                feed = FeedTerms(folder, rank, chain_root(facts.pool, None, None))
                self._residents = ResidentsFeed(feed, get_block_hash)
                with contextlib.suppress(OSError):  # a bridge does without
                    tell_namespace(folder, facts.namespaces())
            namespaces = ", ".join(space.hex() for space in facts.namespaces())
            LOG.info("kvtier shares blocks by %s, namespace %s", self._settings.store, namespaces)
            self._lookups.compare(facts)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is a miss later, and nothing else."""
        return False

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        if self._residents is not None:
            self._residents.bind(gpu_block_pool.blocks)

    def on_new_request(self, request: Any) -> None:
        if self._scheduling is None or self._facts is None:
            return
        if not all(_is_content(item) for item in request.mm_features or ()):
            self._refuse(request, "a multimodal item is named by its sender, not by its content")
            return
        adapter: bytes | None = None
        if request.lora_request is not None:
            found = self._adapters.digest(str(request.lora_request.lora_path))
            if isinstance(found, Refusal):
                self._refuse(request, found.reason)
                return
            adapter = found
        namespaces = self._namespaces.get(adapter)
        if namespaces is None:
            namespaces = self._namespaces[adapter] = self._facts.namespaces(adapter)
        hashes = self._prefix_hashes(request, adapter)
        if self._residents is not None:
            keys = hashes if isinstance(hashes, PrefixHashes) else NO_KEYS
            self._residents.arrived(request.request_id, request.block_hashes, keys)
        arrival = Arrival(
            str(request.request_id),
            request.block_hashes,
            int(request.num_prompt_tokens),
            namespaces,
            adapter,
            hashes,
            self._facts.generation,
        )
        self._scheduling.arrived(arrival, time.monotonic())

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduling is None:
            return 0, False
        tokens = self._scheduling.matched(request.request_id, num_computed_tokens, time.monotonic())
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduling is not None:
            (block_ids,) = blocks.get_block_ids()
            if self._residents is not None:
                self._residents.allocated(request.request_id, block_ids)
            self._scheduling.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduling is None:
            return _Orders(StepOrders())
        computed = {
            one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = []
        state = scheduler_output.kv_connector_block_state
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            table = self._tables.of(state, request_id) if request_id in computed else None
            if table is not None:
                scheduled.append(Scheduled(request_id, computed[request_id] + tokens, table))
        if self._residents is not None:
            handed_out = [ids[0] for ids in cached.new_block_ids if ids is not None]
            self._residents.step([(one.request_id, one.block_ids) for one in scheduled], handed_out)
        tokens = int(scheduler_output.total_num_scheduled_tokens)
        return _Orders(self._scheduling.step(scheduled, time.monotonic(), tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduling is None:
            return
        now = time.monotonic()
        ends = connector_output.kv_connector_worker_meta
        if isinstance(ends, _Ends):
            self._scheduling.stepped(ends.step, now)
            for request_id, (leading, seconds) in ends.loads.items():
                self._scheduling.loaded(request_id, leading, seconds, now)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._residents is not None:
            self._residents.finished(request.request_id, block_ids)
        if self._scheduling is not None:
            self._scheduling.finished(request.request_id)
            self._tables.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Never again use what is stored by now: the weights may have been changed in place.

        False where vLLM could not empty its own pool before, because requests ran: what it computes
        on that is not saved until a reset succeeds.
        """
        if self._scheduling is None or self._facts is None:
            return True
        self._facts = replace(self._facts, generation=secrets.token_hex(8))
        self._namespaces.clear()
        self._scheduling.renewed(self._facts)
        LOG.warning("kvtier: reset: from now on this engine shares blocks with itself only")
        if self._holds_blocks():
            LOG.error(
                "kvtier: blocks were in use at the reset: nothing is saved until one succeeds"
            )
            self._scheduling.save_nothing()
            return False
        return True

    # ---- both

    def get_kv_connector_stats(self) -> KvtierStats | None:
        part = self._scheduling or self._transfers
        return None if part is None else self._increments.of(part.counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KvtierMetrics:
        return KvtierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._facts is None:
            return
        rank = int(get_tensor_model_parallel_rank())
        try:
            pages = KvPages(kv_caches, self._facts.spec(rank))
        except CallerError as error:
            LOG.error("kvtier serves this engine misses only: %s", error)
            return
        client = BlockStoreClient(self._settings.dial(), StoreClientConfig())
        self._transfers = Transfers(
            pages,
            self._facts,
            rank,
            client,
            self._settings.load_ms / 1000,
            self._settings.staging_bytes,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing waits: blocks were copied out before the step that filled them was over."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for order in self._orders().loads:
            if self._transfers is not None:
                self._transfers.load(order)
            else:
                self._invalid_blocks.update(order.block_ids)
                self._loads[order.request_id] = (0, 0.0)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only once its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved whole, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        if self._transfers is not None:
            for order in self._orders().saves:
                self._transfers.save(order)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._take_ends()
        failed = {request_id for request_id, (leading, _) in self._loads.items() if not leading}
        return base.KVConnectorTransferResults(set(), set(self._loads), failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """What vLLM 0.29 asks in its place: there, blocks with load errors say all."""
        self._take_ends()
        return None, set(self._loads)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        loads, self._loads = self._loads, {}
        step = self._orders().number
        return _Ends(step, loads) if loads or step else None

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        if self._lookups is not None:
            self._lookups.close()
            self._lookups, self._scheduling = None, None
        if self._residents is not None:
            self._residents.close()

    # ---- parts

    def _holds_blocks(self) -> bool:
        """Whether the engine's pool is not empty; one block of it is never given away."""
        pool = self._pool
        return pool is not None and pool.get_num_free_blocks() < pool.num_gpu_blocks - 1

    def _take_ends(self) -> None:
        if self._transfers is not None:
            for end in self._transfers.ended():
                self._loads[end.order.request_id] = (end.leading_blocks, end.seconds)
                self._invalid_blocks.update(end.order.block_ids[end.leading_blocks :])

    def _refuse(self, request: Any, reason: str) -> None:
        """The request is served misses; say why, once."""
        if self._residents is not None:
            self._residents.arrived(request.request_id, request.block_hashes, NO_KEYS)
        if reason not in self._told:
            self._told.add(reason)
            LOG.error("kvtier serves some requests misses only: %s", reason)

    def _orders(self) -> StepOrders:
        if not self.has_connector_metadata():
            return StepOrders()
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, _Orders) else StepOrders()

    def _prefix_hashes(self, request: Any, adapter: bytes | None) -> PrefixHashes | tuple[int, ...]:
        """What the index calls the request's blocks; nothing where its chain needs more."""
        if self._facts is None or self._facts.generation:
            return ()
        if request.mm_features or request.prompt_embeds is not None:
            return ()
        known = None if adapter is None else AdapterRef(adapter, 0)
        root = chain_root(self._facts.pool, request.cache_salt or None, known)
        return PrefixHashes(root, request.all_token_ids, self._facts.pool.block_tokens)


def _is_content(item: Any) -> bool:
    """Whether a multimodal item is named by a digest of what it shows: users may name it freely."""
    return _DIGEST.fullmatch(str(item.mm_hash or item.identifier)) is not None
