"""`kvtier size`: bytes a token by kind of attention, conservation of events, what is full first."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench import report
from kvtier.cli import main
from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.sizing import ModelShape, Terms, UnitCosts, demand, measured, shape_of
from kvtier.sizing.kv_bytes import KNOWN, Attention
from kvtier.sizing.unit_costs import _SOURCES
from kvtier.types import Tier
from kvtier.wire import convert
from tests.support.raw_publisher import removed, stored

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("model", "attention", "token_bytes"),
    [
        ("gpt2", Attention.MHA, 2 * 12 * 12 * 64 * 2),
        ("falcon-7b", Attention.MQA, 8_192),
        ("llama-3.1-8b", Attention.GQA, 131_072),
        ("llama-3.1-70b", Attention.GQA, 327_680),
        ("deepseek-v3", Attention.MLA, 70_272),
    ],
)
def test_the_bytes_of_a_token_follow_the_kind_of_attention(
    model: str, attention: Attention, token_bytes: int
) -> None:
    shape = KNOWN[model]
    assert shape.attention is attention
    assert shape.token_bytes(KvDtype.BFLOAT16) == token_bytes
    assert shape.token_bytes(KvDtype.FP8_E4M3) == token_bytes // 2
    assert f"= {token_bytes:,} B" in shape.formula(KvDtype.BFLOAT16)


def write(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_a_config_file_gives_the_shape_of_the_known_name(tmp_path: Path) -> None:
    llama = write(
        tmp_path / "config.json",
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
    )  # fmt: skip
    for told in (llama, tmp_path):
        shape = shape_of(str(told))
        assert (shape.attention, shape.token_bytes(KvDtype.BFLOAT16)) == (Attention.GQA, 131_072)
    mla = write(
        tmp_path / "v3.json",
        num_hidden_layers=61, num_attention_heads=128, kv_lora_rank=512, qk_rope_head_dim=64,
    )  # fmt: skip
    assert shape_of(str(mla)).token_bytes(KvDtype.BFLOAT16) == 70_272
    old = write(tmp_path / "old.json", n_layer=32, n_head=71, n_embd=4544, multi_query=True)
    assert shape_of(str(old)).attention is Attention.MQA
    mixed = write(
        tmp_path / "mixed.json",
        text_config={
            "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64, "hidden_size": 9,
            "sliding_window": 512, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
    )  # fmt: skip
    shape = shape_of(str(mixed))
    assert shape.token_bytes(KvDtype.BFLOAT16) == 2 * 4 * 64 * 2
    assert shape.window_bytes(KvDtype.BFLOAT16) == 2 * 512 * 2 * 4 * 64 * 2


def test_the_worker_lays_out_as_many_bytes(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `worker` is not installed")
    from kvtier.engines.transformers.support import kv_geometry
    from kvtier.engines.transformers.tiny import tiny_config

    config = tiny_config()
    write(tmp_path / "config.json", **config.to_dict())
    geometry = kv_geometry(config, KvDtype.FLOAT32, 16)
    assert shape_of(str(tmp_path)).token_bytes(KvDtype.FLOAT32) == geometry.token_bytes


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", "[" * 5000, '{"num_hidden_layers": "x"}', '{"num_hidden_layers": -1}']
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CallerError):
        shape_of(str(tmp_path))


def test_the_wire_takes_as_many_bytes_as_is_said() -> None:
    chain = np.random.default_rng(1).integers(1, 1 << 63, 64, np.uint64)
    told = [convert.batch_to(batch, 1) for batch in (stored(chain, Tier.GPU), removed(chain))]
    for message in told:
        assert message.ByteSize() / 64 == pytest.approx(UnitCosts().event_bytes, rel=0.1)


TERMS = Terms(gpus=64, block_tokens=16, kv_gib=40.0)


@given(
    hit=st.floats(0, 1), l2=st.floats(0, 1), disk=st.floats(0, 1), cold=st.floats(0, 1),
    prompt=st.floats(1, 1e5), output=st.floats(0, 1e4),
)  # fmt: skip
def test_what_appears_goes_again_and_nothing_is_counted_that_is_not_moved(
    hit: float, l2: float, disk: float, cold: float, prompt: float, output: float
) -> None:
    terms = dataclasses.replace(
        TERMS, hit=hit, l2=l2, disk=disk, cold=cold, prompt_tokens=prompt, output_tokens=output
    )
    model = KNOWN["llama-3.1-8b"]
    needed = demand(model, terms, UnitCosts())
    computed, loaded = prompt * (1 - hit), prompt * hit * l2
    tokens = 2 * (computed + loaded + output + computed + computed * disk)
    assert needed.events_per_s * 16 / needed.workers == pytest.approx(tokens)
    a_node = 8 * needed.token_bytes
    assert needed.store_read_bytes_per_s == pytest.approx(loaded * a_node)
    assert needed.store_write_bytes_per_s == pytest.approx(computed * a_node)
    assert needed.nvme_read_bytes_per_s == pytest.approx(loaded * cold * a_node)
    assert needed.nvme_bytes_a_day == pytest.approx(computed * disk * a_node * 86_400)
    shares = [use.share for use in needed.uses]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("times", [2, 10])
def test_twice_the_fleet_asks_twice_of_what_is_shared_and_the_same_of_a_node(times: int) -> None:
    model = KNOWN["llama-3.1-8b"]
    one = demand(model, TERMS, UnitCosts())
    more = demand(model, dataclasses.replace(TERMS, gpus=64 * times), UnitCosts())
    assert more.events_per_s == pytest.approx(one.events_per_s * times)
    assert more.index_bytes == pytest.approx(one.index_bytes * times, rel=1e-6)
    assert more.store_write_bytes_per_s == pytest.approx(one.store_write_bytes_per_s)


def test_every_measured_cost_counts_for_something_that_is_shown() -> None:
    """A cost that changes nothing would be measured in vain, and its resource be full unseen."""
    model, terms = KNOWN["llama-3.1-70b"], Terms(gpus=1000, block_tokens=16, tensor_parallel=4)
    before = demand(model, terms, UnitCosts())
    unused = [
        field.name
        for field in dataclasses.fields(UnitCosts)
        if demand(model, terms, dataclasses.replace(UnitCosts(), **{field.name: 1.0})) == before
    ]
    assert unused == []


def test_without_a_disk_nothing_is_read_from_one() -> None:
    model = KNOWN["llama-3.1-8b"]
    needed = demand(model, dataclasses.replace(TERMS, nvme_gib=0.0, cold=1.0), UnitCosts())
    assert needed.nvme_read_bytes_per_s == 0
    assert not [use for use in needed.uses if "disk" in use.resource]


def test_ranks_share_heads_and_an_mla_model_keeps_all_on_each() -> None:
    split = dataclasses.replace(TERMS, tensor_parallel=4)
    plain = demand(KNOWN["llama-3.1-8b"], split, UnitCosts())
    assert plain.l1_blocks == demand(KNOWN["llama-3.1-8b"], TERMS, UnitCosts()).l1_blocks
    compressed = KNOWN["deepseek-v3"]
    assert demand(compressed, split, UnitCosts()).l1_blocks == pytest.approx(
        demand(compressed, TERMS, UnitCosts()).l1_blocks / 4, rel=0.01
    )


def test_events_that_one_core_cannot_follow_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(shlex.split(
        "size --gpus 100000 --model llama-3.1-8b --requests-per-s 100 --block-tokens 1"
    ))  # fmt: skip
    assert status == 0
    assert "cut the fleet in parts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "--gpus 0 --model gpt2",
        "--gpus 10 --model gpt2 --tensor-parallel 4",
        "--gpus 8 --model llama-3.1-405b",
        "--gpus 8 --model gpt2 --hit 1.5",
        "--gpus 8 --model gpt2 --requests-per-s nan",
        "--gpus 8 --model gpt2 --dram-gib 0",
        "--gpus 8 --model no-such-model",
        "--gpus 8 --model gpt2 --kv-gib 0.000001",
        "--gpus 8 --model gpt2 --measured /no/such/file",
    ],
)
def test_terms_that_make_no_fleet_are_told_and_cost_status_two(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *shlex.split(arguments)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("kvtier size: ")


def report_of(bench: str, *rows: tuple[str, float]) -> dict[str, object]:
    results = [{"name": name, "value": value, "unit": "x"} for name, value in rows]
    return {"bench": bench, "machine": {}, "results": results}


def test_figures_of_ones_own_machine_take_the_place_of_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps(report_of("index", ("memory, 1 M blocks held once", 34.4))))
    costs = measured([path])
    assert costs == dataclasses.replace(UnitCosts(), index_block_bytes=34.4)
    model = KNOWN["llama-3.1-8b"]
    twice = demand(model, TERMS, costs).index_bytes / demand(model, TERMS, UnitCosts()).index_bytes
    assert twice == pytest.approx(2)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"bench": "index", "results": [{"name": "x", "value": 1}]}']
)
def test_a_file_of_no_use_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(CallerError):
        measured([path])


def test_every_row_that_is_looked_for_is_printed_by_its_bench() -> None:
    """Names are put together in the benches, so their words are looked for, without the numbers."""
    for bench, name in _SOURCES:
        assert bench in report.BENCHES
        files = (ROOT / "kvtier" / "bench").glob(f"{bench.replace('-', '_')}*.py")
        source = "".join(path.read_text(encoding="utf-8") for path in files)
        for word in re.findall(r"[A-Za-z][\w-]+", name):
            assert word in source, name


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    blocks = page.split("```")[1::2]
    shown = [block for block in blocks if block.lstrip("\n").startswith("$ kvtier size")]
    assert len(shown) >= 2
    for block in shown:
        first, _, rest = block.strip("\n").partition("\n")
        assert main(shlex.split(first.removeprefix("$ kvtier "))) == 0
        assert capsys.readouterr().out.strip("\n") == rest.strip("\n")


def test_json_is_one_object_with_the_uses_fullest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("size --gpus 8 --model llama-3.1-8b --json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["attention"] == "GQA"
    assert told["uses"][0]["share"] == max(use["share"] for use in told["uses"])


def test_a_model_of_windows_only_is_refused() -> None:
    shape = ModelShape("w", Attention.GQA, 4, 2, 64, None, 4, 512)
    with pytest.raises(CallerError, match="window"):
        demand(shape, TERMS, UnitCosts())
