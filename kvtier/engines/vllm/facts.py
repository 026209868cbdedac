"""What a vLLM engine says of itself, and whether its blocks can be shared: read, never guessed.

A block of vLLM is named by the engine's own digest, inside a namespace of all that shapes its
bytes and is not in the digest. An engine that has something which cannot be seen or verified from
here gets a `Refusal`: it is served misses, and says why.
What must not live here: vLLM's modules (connector.py hands their objects in).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.core.identity import EngineIdentity, KvDtype, ModelSpec, Pool, Shard
from kvtier.engines.vllm.settings import Settings
from kvtier.errors import CallerError, LimitError
from kvtier.types import Fingerprint

ALGORITHM: Final = "sha256_cbor"
"""The only one of vLLM's block hashes whose digests are equal in every process."""
LAYOUT: Final = "layers-heads-tokens-key-value"
"""Order of a payload: `[layers, heads, tokens, key ‖ value]`, whatever the engine's own is."""
VERSIONS: Final = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""Releases whose connector interface this was read from."""
UNTAGGED: Final = ("0.29", "0.30")
"""Releases whose digests cannot tell an adapter's name from a `cache_salt` of the same text."""

_DTYPES: Final = {
    "torch.float32": KvDtype.FLOAT32,
    "torch.bfloat16": KvDtype.BFLOAT16,
    "torch.float16": KvDtype.FLOAT16,
    "fp8": KvDtype.FP8_E4M3,
    "fp8_e4m3": KvDtype.FP8_E4M3,
    "fp8_e5m2": KvDtype.FP8_E5M2,
}
_FULL_ATTENTION: Final = "FullAttentionSpec"
_ROPE_NAMES: Final = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_WHOLE_BYTES: Final = 2 << 30
"""Weights up to this size are hashed whole: seconds. Above it, in samples."""
_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why this engine's blocks cannot be shared, for an operator, and what would mend it."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine: what its blocks are, rank by rank."""

    pool: Pool
    kv_dtype: KvDtype
    layers: int
    kv_heads: int
    head_dim: int
    ranks: int
    rope_digest: bytes
    engine: EngineIdentity
    generation: str = ""
    """Of the weights, beyond their revision: another since each reset of the cache."""

    @property
    def revision(self) -> str:
        """What the namespaces have for one."""
        return f"{self.pool.revision}+{self.generation}" if self.generation else self.pool.revision

    def shard(self, rank: int) -> Shard:
        """Layers and heads of one tensor-parallel rank; ranks beyond the heads share them."""
        if self.ranks <= self.kv_heads:
            heads = self.kv_heads // self.ranks
            return Shard(0, self.layers, rank * heads, (rank + 1) * heads)
        head = rank * self.kv_heads // self.ranks
        return Shard(0, self.layers, head, head + 1)

    def spec(self, rank: int, adapter: bytes | None = None) -> ModelSpec:
        """The namespace of one rank's blocks, those of an adapter by the digest of its weights."""
        engine = self.engine
        if adapter is not None:
            engine = EngineIdentity(
                engine.engine,
                engine.format_version,
                engine.hash_algorithm,
                engine.seed,
                adapter_digest=adapter,
            )
        return ModelSpec(
            model_id=self.pool.model_id,
            revision=self.revision,
            kv_dtype=self.kv_dtype,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.pool.block_tokens,
            layout=LAYOUT,
            rope_digest=self.rope_digest,
            shard=self.shard(rank),
            engine=engine,
        )

    def namespaces(self, adapter: bytes | None = None) -> tuple[Fingerprint, ...]:
        """Of each rank, in order; ranks with equal shards have equal ones."""
        return tuple(self.spec(rank, adapter).fingerprint() for rank in range(self.ranks))


def read_facts(
    vllm_config: Any, kv_cache_config: Any, version: str, seed: str, settings: Settings
) -> EngineFacts | Refusal:
    """Read an engine's configuration. Hashes the weights where no revision is given: seconds."""
    refusal = _refusal(vllm_config, kv_cache_config, version)
    if refusal is not None:
        return refusal
    model = vllm_config.model_config
    dtype_name = str(vllm_config.cache_config.cache_dtype)
    dtype = _DTYPES.get(str(model.dtype) if dtype_name == "auto" else dtype_name)
    if dtype is None:
        dtype = _DTYPES.get(f"torch.{dtype_name}")
    if dtype is None:
        return Refusal(f"kv cache dtype {dtype_name!r} is not known here")
    heads = int(model.get_total_num_kv_heads())
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if (heads % ranks if ranks <= heads else ranks % heads) != 0:
        return Refusal(f"{heads} KV heads do not divide over {ranks} ranks")
    revision = settings.revision or _revision(Path(str(model.model)), str(model.revision or ""))
    if isinstance(revision, Refusal):
        return revision
    try:
        return EngineFacts(
            pool=Pool(
                settings.model_id or str(model.model),
                revision,
                int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size),
            ),
            kv_dtype=dtype,
            layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
            kv_heads=heads,
            head_dim=int(model.get_head_size()),
            ranks=ranks,
            rope_digest=rope_digest(model.hf_text_config.to_dict()),
            engine=EngineIdentity("vllm", version, ALGORITHM, seed),
        )
    except (CallerError, LimitError) as error:
        return Refusal(str(error))


def rope_digest(config: Mapping[str, object]) -> bytes:
    """SHA-256 over what shapes positions in keys, of a model's configuration as a mapping."""
    shaped = {name: config.get(name) for name in _ROPE_NAMES}
    return hashlib.sha256(json.dumps(shaped, sort_keys=True, default=str).encode()).digest()


def files_digest(paths: list[Path]) -> str:
    """SHA-256 in hex over files by name, size and bytes.

    All bytes up to 2 GiB in sum; above, evenly spread samples of each file with its beginning
    (which in safetensors names every tensor) and its end. A weight that lies between samples can
    change unseen: give `revision` where weights are edited in place.
    """
    total = hashlib.sha256()
    whole = sum(path.stat().st_size for path in paths) <= _WHOLE_BYTES
    for path in sorted(paths):
        size = path.stat().st_size
        total.update(path.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with path.open("rb") as file:
            if whole or size <= _SAMPLES * _SAMPLE_BYTES:
                total.update(hashlib.file_digest(file, "sha256").digest())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()


def _refusal(vllm_config: Any, kv_cache_config: Any, version: str) -> Refusal | None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if not _is_of(version, VERSIONS):
        return Refusal(f"vLLM {version} is not one of {', '.join(VERSIONS)}")
    if vllm_config.lora_config is not None and _is_of(version, UNTAGGED):
        return Refusal(
            f"LoRA with vLLM {version}: its block hash takes a salt for an adapter's name"
        )
    if not cache.enable_prefix_caching:
        return Refusal("prefix caching is off: drop --no-enable-prefix-caching")
    if cache.prefix_caching_hash_algo != ALGORITHM:
        found = cache.prefix_caching_hash_algo
        return Refusal(f"block hash {found!r}: start with --prefix-caching-hash-algo {ALGORITHM}")
    if getattr(cache, "calculate_kv_scales", False):
        return Refusal("KV scales that an engine computes itself are not in any name of a block")
    if vllm_config.speculative_config is not None:
        return Refusal("speculative decoding: block hashes may cover tokens beyond the block")
    if parallel.pipeline_parallel_size != 1 or parallel.decode_context_parallel_size != 1:
        return Refusal("pipeline or context parallelism is not supported")
    if len(groups) != 1:
        return Refusal(f"{len(groups)} KV cache groups: only models with one are supported")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != _FULL_ATTENTION:
        return Refusal(f"KV cache of kind {type(spec).__name__}: only full attention is supported")
    finer = getattr(kv_cache_config, "hash_block_size", None) or cache.prefix_match_unit
    if finer not in {None, spec.block_size}:
        return Refusal("block hashes are finer than blocks")
    return None


def _is_of(version: str, releases: tuple[str, ...]) -> bool:
    return any(version == known or version.startswith(f"{known}.") for known in releases)


def _revision(directory: Path, hub_revision: str) -> str | Refusal:
    if directory.is_dir():
        weights = list(directory.glob("*.safetensors"))
        if weights:
            return files_digest([*weights, *directory.glob("config.json")])
    if hub_revision:
        return hub_revision
    return Refusal(
        "the weights' revision is unknown: set revision in kv_connector_extra_config, or --revision"
    )
