"""What a vLLM engine says of itself: one namespace for equal engines, refusals for others."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from kvtier.core.identity import KvDtype, Shard
from kvtier.engines.vllm.adapters import AdapterDigests
from kvtier.engines.vllm.facts import EngineFacts, Refusal, files_digest, read_facts
from kvtier.engines.vllm.settings import SavePolicy, settings_from
from kvtier.errors import ConfigError

SETTINGS = settings_from({"store": "unix:/run/s.sock", "model_id": "m", "revision": "r1"})


class FullAttentionSpec(Fake):
    """Named as vLLM's, which is how it is recognised."""


class SlidingWindowSpec(Fake):
    """Another kind."""


def engine(**changes: Any) -> tuple[Any, Any]:
    """(vllm_config, kv_cache_config) of an engine that can share; `changes` by dotted name."""
    config = Fake(
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
        lora_config=None,
        model_config=Fake(
            model="/models/m",
            revision=None,
            dtype="torch.bfloat16",
            hf_text_config=Fake(to_dict=lambda: {"rope_theta": 10000.0}),
            get_total_num_kv_heads=lambda: 4,
            get_head_size=lambda: 64,
        ),
    )
    cache = Fake(
        kv_cache_groups=[
            Fake(kv_cache_spec=FullAttentionSpec(block_size=32), layer_names=["a.0", "a.1"])
        ],
        hash_block_size=32,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        target: Any = cache if path[:1] == ["cache"] else config
        for part in path[1:] if path[:1] == ["cache"] else path:
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        setattr(target, last, value)
    return config, cache


def facts(version: str = "0.32.0", seed: str = "s", **changes: Any) -> EngineFacts:
    found = read_facts(*engine(**changes), version, seed, SETTINGS)
    assert isinstance(found, EngineFacts), found
    return found


def test_equal_engines_share_a_namespace() -> None:
    assert facts().namespaces() == facts().namespaces()
    assert facts().kv_dtype is KvDtype.BFLOAT16
    assert facts().pool.block_tokens == 32


@pytest.mark.parametrize(
    "other",
    [
        facts(version="0.32.1"),
        facts(seed="t"),
        facts(model_config__dtype="torch.float32"),
        facts(cache_config__cache_dtype="fp8_e5m2"),
        facts(cache_config__cache_dtype="float16"),
        facts(cache__kv_cache_groups__0__kv_cache_spec=FullAttentionSpec(block_size=64),
              cache__hash_block_size=64),
        facts(model_config__hf_text_config=Fake(to_dict=lambda: {"rope_theta": 5.0})),
        facts(model_config__get_head_size=lambda: 128),
        facts(model_config__get_total_num_kv_heads=lambda: 8),
        facts(parallel_config__tensor_parallel_size=2),
    ],
)  # fmt: skip
def test_what_shapes_bytes_and_is_not_in_the_digest_separates_namespaces(
    other: EngineFacts,
) -> None:
    assert not set(facts().namespaces()) & set(other.namespaces())


def test_another_revision_or_model_or_adapter_separates_namespaces() -> None:
    spaces = set()
    for settings in (
        SETTINGS,
        replace(SETTINGS, revision="r2"),
        replace(SETTINGS, model_id="n"),
    ):
        found = read_facts(*engine(), "0.32.0", "s", settings)
        assert isinstance(found, EngineFacts)
        spaces |= {found.namespaces(), found.namespaces(b"a" * 32), found.namespaces(b"b" * 32)}
    assert len(spaces) == 9


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cache_config__enable_prefix_caching": False}, "prefix caching"),
        ({"cache_config__prefix_caching_hash_algo": "sha256"}, "sha256_cbor"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}, "sha256_cbor"),
        ({"cache_config__calculate_kv_scales": True}, "scales"),
        ({"speculative_config": Fake()}, "speculative"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context"),
        ({"parallel_config__tensor_parallel_size": 3}, "divide"),
        ({"cache__kv_cache_groups": []}, "groups"),
        ({"cache__kv_cache_groups__0__kv_cache_spec": SlidingWindowSpec(block_size=32)}, "Sliding"),
        ({"cache__hash_block_size": 16}, "finer"),
        ({"cache__hash_block_size": None, "cache_config__prefix_match_unit": 16}, "finer"),
        ({"cache_config__cache_dtype": "int3"}, "int3"),
    ],
)
def test_what_cannot_be_seen_or_verified_is_refused_by_name(
    changes: dict[str, Any], word: str
) -> None:
    found = read_facts(*engine(**changes), "0.32.0", "s", SETTINGS)
    assert isinstance(found, Refusal)
    assert word in found.reason


@pytest.mark.parametrize("version", ["0.28.9", "0.320.0", "0.34.0", "1.0", ""])
def test_an_unknown_release_is_refused(version: str) -> None:
    found = read_facts(*engine(), version, "s", SETTINGS)
    assert isinstance(found, Refusal)
    assert "vLLM" in found.reason


def test_releases_whose_hash_takes_a_salt_for_an_adapter_share_nothing_with_lora() -> None:
    for version in ("0.29.0", "0.30.1"):
        found = read_facts(*engine(lora_config=Fake()), version, "s", SETTINGS)
        assert isinstance(found, Refusal)
        assert "LoRA" in found.reason
        assert facts(version=version).ranks == 1
    assert facts(version="0.31.0", lora_config=Fake()).ranks == 1


def test_releases_that_say_nothing_of_finer_hashes_have_none() -> None:
    config, cache = engine()
    del cache.hash_block_size
    assert isinstance(read_facts(config, cache, "0.30.0", "s", SETTINGS), EngineFacts)


def test_ranks_have_their_heads_and_those_beyond_the_heads_share_them() -> None:
    two = facts(parallel_config__tensor_parallel_size=2)
    assert [two.shard(rank) for rank in range(2)] == [Shard(0, 2, 0, 2), Shard(0, 2, 2, 4)]
    eight = facts(parallel_config__tensor_parallel_size=8)
    assert [eight.shard(rank).head_start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(eight.namespaces())) == 4


def test_the_revision_comes_from_the_weights_and_else_must_be_given(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    unsaid = replace(SETTINGS, revision="")
    first = read_facts(*engine(model_config__model=str(tmp_path)), "0.32.0", "s", unsaid)
    weights.write_bytes(b"two")
    second = read_facts(*engine(model_config__model=str(tmp_path)), "0.32.0", "s", unsaid)
    assert isinstance(first, EngineFacts)
    assert isinstance(second, EngineFacts)
    assert first.pool.revision != second.pool.revision
    weights.unlink()
    found = read_facts(*engine(model_config__model=str(tmp_path)), "0.32.0", "s", unsaid)
    assert isinstance(found, Refusal)
    assert "revision" in found.reason


def test_digests_of_large_files_see_a_change_in_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.engines.vllm.facts._WHOLE_BYTES", 1 << 20)
    path = tmp_path / "w.safetensors"
    size = 17 << 20
    path.write_bytes(bytes(size))
    before = files_digest([path])
    assert files_digest([path]) == before
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    assert files_digest([path]) != before


def adapter(folder: Path, weights: bytes) -> str:
    """A directory with an adapter of such weights."""
    folder.mkdir(exist_ok=True)
    path = folder / "adapter_model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(weights)
    return str(folder)


def test_an_adapter_is_its_weights_wherever_they_lie(tmp_path: Path) -> None:
    digests = AdapterDigests()
    one = digests.digest(adapter(tmp_path / "one", b"one"))
    assert isinstance(one, bytes)
    assert digests.digest(str(tmp_path / "one")) == one
    assert digests.digest(adapter(tmp_path / "same", b"one")) == one
    assert digests.digest(adapter(tmp_path / "two", b"two")) != one


def test_a_folder_without_weights_is_no_adapter(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        found = AdapterDigests().digest(str(folder))
        assert isinstance(found, Refusal)
        assert str(folder) in found.reason


def test_an_adapter_whose_files_change_is_refused_for_good_and_a_new_engine_takes_it(
    tmp_path: Path,
) -> None:
    digests = AdapterDigests()
    folder = adapter(tmp_path / "a", b"one")
    first = digests.digest(folder)
    adapter(tmp_path / "a", b"two")
    found = digests.digest(folder)
    assert isinstance(found, Refusal)
    assert "changed" in found.reason
    adapter(tmp_path / "a", b"one")
    assert isinstance(digests.digest(folder), Refusal)
    assert AdapterDigests().digest(folder) == first


def test_files_that_are_only_touched_are_the_same_adapter(tmp_path: Path) -> None:
    digests = AdapterDigests()
    folder = adapter(tmp_path / "a", b"one")
    first = digests.digest(folder)
    assert digests.digest(adapter(tmp_path / "a", b"one")) == first


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({}, "store"),
        ({"store": "unix:/s", "tier": "x"}, "tier"),
        ({"store": 7}, "store"),
        ({"store": "nowhere"}, "nowhere"),
        ({"store": "unix:/s", "save": "some"}, "save"),
        ({"store": "unix:/s", "load": "never"}, "load"),
        ({"store": "unix:/s", "lookup_ms": "9"}, "lookup_ms"),
        ({"store": "unix:/s", "lookup_ms": True}, "lookup_ms"),
        ({"store": "unix:/s", "load_ms": 0}, "load_ms"),
        ({"store": "unix:/s", "staging_bytes": -1}, "staging_bytes"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(
    extra: dict[str, object], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        settings_from(extra)


def test_settings_are_read(tmp_path: Path) -> None:
    settings = settings_from(
        {"store": "127.0.0.1:7720", "save": "all", "token_file": str(tmp_path / "t")}
    )
    assert settings.save is SavePolicy.ALL
    assert settings.dial().targets == ("127.0.0.1:7720",)
    assert settings.dial().token_file == tmp_path / "t"
