"""What a fleet asks of each resource in a steady state, and which of them is full first.

In a steady state what appears in a tier goes from it as fast, so every block that is stored costs
two events. All rates are means: a bench with a trace (`kvtier bench cluster`) shows the peaks.
"""

import math
from dataclasses import dataclass

from kvtier.core.checks import require_integer
from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.sizing.kv_bytes import ModelShape
from kvtier.sizing.unit_costs import UnitCosts

GIB = 1 << 30
DAY_S = 86_400
BUSY_MAX = 0.6
"""Share of a core that is planned for: above it, queues grow faster than work."""
REPLICAS_MIN = 2


@dataclass(frozen=True, slots=True)
class Terms:
    """A fleet and its load; rates and lengths are means."""

    gpus: int
    block_tokens: int
    dtype: KvDtype = KvDtype.BFLOAT16
    tensor_parallel: int = 1
    gpus_per_node: int = 8
    gpu_gib: float = 80.0
    gpu_share: float = 0.9
    """Of a GPU's memory for weights and KV."""
    kv_gib: float | None = None
    """KV of a worker, over its ranks; None: what the weights leave."""
    requests_per_s: float = 1.0
    """Of a worker."""
    prompt_tokens: float = 4000.0
    output_tokens: float = 300.0
    hit: float = 0.6
    """Share of prompt tokens that some tier has."""
    l2: float = 0.3
    """Share of the hits that a store serves; the rest lies in L1."""
    remote: float = 0.2
    """Share of what stores serve that comes from another node."""
    cold: float = 0.3
    """Share of what stores serve that is read from a disk first; the rest lies in DRAM."""
    dram_gib: float = 256.0
    """A node's store."""
    nvme_gib: float = 2048.0
    """A node's disk; 0: none."""
    save: float = 1.0
    """Share of what is computed that is written to the store: the write policy decides."""
    disk: float = 1.0
    """Share of what is written to DRAM that goes on to disk: admission and budget decide."""
    nic_gbit: float = 100.0
    bus_bytes_per_s: float = 25e9
    """Between a GPU and its host."""

    def __post_init__(self) -> None:
        require_integer("gpus", self.gpus, 1, 10_000_000)
        require_integer("block tokens", self.block_tokens, 1, 1 << 16)
        require_integer("tensor parallel", self.tensor_parallel, 1, 1024)
        require_integer("gpus a node", self.gpus_per_node, 1, 1024)
        for name in ("gpu_share", "hit", "l2", "remote", "cold", "save", "disk"):
            if not 0 <= getattr(self, name) <= 1:
                raise CallerError(f"{name}: want 0 .. 1, got {getattr(self, name)!r}")
        if not self.dram_gib and self.nvme_gib:
            raise CallerError("a disk without DRAM: blocks go to disk by way of the arena")
        positive = ("gpu_gib", "requests_per_s", "prompt_tokens", "nic_gbit", "bus_bytes_per_s")
        for name in (*positive, "output_tokens", "dram_gib", "nvme_gib"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                raise CallerError(f"{name}: want a number above 0, got {value!r}")
        if self.gpus % self.tensor_parallel:
            raise CallerError(
                f"{self.gpus} GPUs are no whole number of workers of {self.tensor_parallel}"
            )


@dataclass(frozen=True, slots=True)
class Use:
    """One resource: how much of it is used, of how much there is."""

    resource: str
    used: float
    capacity: float
    unit: str

    @property
    def share(self) -> float:
        return self.used / self.capacity


@dataclass(frozen=True, slots=True)
class Demand:
    """What it comes to. Bytes, seconds, blocks."""

    token_bytes: int
    block_bytes: int
    """Over all ranks of a worker, each head once."""
    workers: int
    nodes: int
    l1_blocks: int
    """Of a worker."""
    dram_blocks: int
    """Of a node."""
    nvme_blocks: int
    events_per_s: float
    """Blocks that appear or go, in the whole fleet."""
    index_blocks: int
    index_bytes: float
    index_cpu: float
    """Cores of one replica: each applies everything."""
    index_replicas: int
    requests_per_s: float
    router_processes: int
    router_cpu: float
    """Cores of all of them, with the index that each keeps."""
    store_read_bytes_per_s: float
    """Of a node, to its workers."""
    store_write_bytes_per_s: float
    nvme_read_bytes_per_s: float
    """Of a node: what its workers and other nodes ask for and DRAM has not."""
    nvme_bytes_a_day: float
    remote_bytes_per_s: float
    """Of a node, in; as much goes out."""
    event_bytes_per_s: float
    """Out of one replica, to the routers' copies."""
    uses: tuple[Use, ...]
    """Fullest first."""


def demand(model: ModelShape, terms: Terms, costs: UnitCosts) -> Demand:
    """The fleet's needs. CallerError where weights leave no room for KV. Pure."""
    workers = terms.gpus // terms.tensor_parallel
    nodes = math.ceil(terms.gpus / terms.gpus_per_node)
    workers_a_node = workers / nodes
    block_bytes = model.token_bytes(terms.dtype) * terms.block_tokens
    if not block_bytes:
        raise CallerError(f"{model.name}: every layer has a window: no block is worth keeping")
    l1_blocks = int(_kv_bytes(model, terms) // (block_bytes * model.copies(terms.tensor_parallel)))
    if l1_blocks < 1:
        raise CallerError(f"{model.name}: no room for one block of {terms.block_tokens} tokens")
    dram_blocks = int(terms.dram_gib * GIB // block_bytes)
    nvme_blocks = int(terms.nvme_gib * GIB // block_bytes)

    # Of one worker, in blocks a second.
    prompt = terms.requests_per_s * terms.prompt_tokens / terms.block_tokens
    loaded = prompt * terms.hit * terms.l2
    computed = prompt * (1 - terms.hit)
    appear_l1 = computed + loaded + terms.requests_per_s * terms.output_tokens / terms.block_tokens
    saved = computed * terms.save if terms.dram_gib else 0.0
    on_disk = saved * terms.disk if terms.nvme_gib else 0.0
    events = workers * 2 * (appear_l1 + saved + on_disk)

    index_blocks = workers * l1_blocks + nodes * (dram_blocks + nvme_blocks)
    index_cpu = events / costs.index_blocks_per_cpu_s
    requests = workers * terms.requests_per_s
    known, new = costs.router_request_us, costs.router_turn_us
    asked = requests * (terms.hit * known + (1 - terms.hit) * new) / 1e6
    room = BUSY_MAX - index_cpu
    routers = max(REPLICAS_MIN, math.ceil(asked / room)) if room > 0 else 0
    read = workers_a_node * loaded * block_bytes
    written = workers_a_node * saved * block_bytes
    to_disk = workers_a_node * on_disk * block_bytes
    from_disk = read * terms.cold if terms.nvme_gib else 0.0
    remote = read * terms.remote
    nic = terms.nic_gbit * 1e9 / 8
    uses = [
        Use("index: one core of a replica", index_cpu, BUSY_MAX, "cores"),
        Use("a router's core: its copy of the index", index_cpu, BUSY_MAX, "cores"),
        Use("index: network of a replica", events * costs.event_bytes * (routers + 1), nic, "B/s"),
        Use("store: reads, one core a worker", loaded * block_bytes, costs.arena_get_bytes_per_s,
            "B/s"),
        Use("store: writes of a node", written, costs.arena_put_bytes_per_s, "B/s"),
        Use("node: network, from other nodes", remote, nic, "B/s"),
        Use("GPU: bus, loads and saves", (loaded + saved) * block_bytes / terms.tensor_parallel,
            terms.bus_bytes_per_s, "B/s"),
    ]  # fmt: skip
    if terms.nvme_gib:
        uses.append(Use("node: disk writes", to_disk, costs.nvme_write_bytes_per_s, "B/s"))
        uses.append(Use("node: disk reads", from_disk, costs.nvme_read_bytes_per_s, "B/s"))
    return Demand(
        token_bytes=model.token_bytes(terms.dtype),
        block_bytes=block_bytes,
        workers=workers,
        nodes=nodes,
        l1_blocks=l1_blocks,
        dram_blocks=dram_blocks,
        nvme_blocks=nvme_blocks,
        events_per_s=events,
        index_blocks=index_blocks,
        index_bytes=index_blocks * costs.index_block_bytes,
        index_cpu=index_cpu,
        index_replicas=REPLICAS_MIN,
        requests_per_s=requests,
        router_processes=routers,
        router_cpu=asked + routers * index_cpu,
        store_read_bytes_per_s=read,
        store_write_bytes_per_s=written,
        nvme_read_bytes_per_s=from_disk,
        nvme_bytes_a_day=to_disk * DAY_S,
        remote_bytes_per_s=remote,
        event_bytes_per_s=events * costs.event_bytes * routers,
        uses=tuple(sorted(uses, key=lambda use: -use.share)),
    )


def _kv_bytes(model: ModelShape, terms: Terms) -> float:
    """KV memory of one worker, over its ranks."""
    if terms.kv_gib is not None:
        return terms.kv_gib * GIB
    if model.parameters is None:
        raise CallerError(f"{model.name}: say how much KV a worker has (--kv-gib) or its weights")
    held = terms.tensor_parallel * terms.gpu_gib * GIB * terms.gpu_share
    left = held - model.parameters * 2
    if left <= 0:
        raise CallerError(
            f"{model.name}: weights of 2 bytes need {model.parameters * 2 / GIB:.0f} GiB, and "
            f"{terms.tensor_parallel} GPUs have {held / GIB:.0f}: raise --tensor-parallel"
        )
    return left
