"""Settings of a bridge: what is refused, and what they describe."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import load
from kvtier.core.identity import AdapterRef
from kvtier.engines.events import Dialect, HiddenSalts
from kvtier.errors import ConfigError
from kvtier.sections import DialConfig
from kvtier.types import HolderKind, Tier
from kvtier_services.bridge.config import (
    TOLD,
    BridgeConfig,
    CardSection,
    EngineSection,
    MemorySection,
)
from kvtier_services.bridge.main import is_told, with_namespace
from kvtier_services.bridge.publishing import Identity, Speaker

DIGEST = "ab" * 32
MODEL = CardSection(("chat", "alias"), "org/model", "rev", tokenizer_digest=DIGEST)


def engine(**fields: object) -> EngineSection:
    return EngineSection(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"events": "tcp://10.0.0.5:5557"},
        {"events": "tcp://engine:5557"},
        {"replay": "tcp://10.0.0.5:5558"},
        {"events": "inproc://x"},
        {"events": "ipc://relative"},
        {"events": "tcp://127.0.0.1:0"},
        {"events": "tcp://127.0.0.1:65535", "ranks": 2},
        {"events": "ipc:///run/engine", "ranks": 2},
        {"ranks": 0},
        {"ranks": 100_000},
        {"blocks": -1},
        {"probe_ms": 0},
        {"http": "nonsense"},
    ],
)
def test_engines_out_of_bounds_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        engine(**fields)


def test_another_machine_is_taken_where_it_is_asked_for() -> None:
    section = engine(events="tcp://10.0.0.5:5557", insecure=True)
    assert section.endpoints(0) == ("tcp://10.0.0.5:5557", None)


def test_each_rank_has_ports_of_its_own() -> None:
    section = engine(events="tcp://[::1]:5557", replay="tcp://127.0.0.1:6000", ranks=3)
    assert section.endpoints(2) == ("tcp://[::1]:5559", "tcp://127.0.0.1:6002")
    assert engine(events="ipc:///run/engine").endpoints(0)[0] == "ipc:///run/engine"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer_digest": "ab"},
        {"chat_template_digest": "zz" * 32},
        {"namespace": "ab" * 31},
        {"block_tokens": 0},
        {"adapters": ("name",)},
        {"adapters": (f"{DIGEST}:x:name",)},
    ],
)
def test_cards_out_of_bounds_are_refused(fields: dict[str, object]) -> None:
    good: dict[str, object] = {
        "served_names": ("chat",), "model_id": "m", "revision": "r", "tokenizer_digest": DIGEST,
    }  # fmt: skip
    with pytest.raises(ConfigError):
        CardSection(**(good | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "section",
    [
        CardSection(),
        CardSection(("a",), "m", "r"),
        CardSection(("a",), "", "r", tokenizer_digest=DIGEST),
        CardSection(("a", "a"), "m", "r", tokenizer_digest=DIGEST),
    ],
)
def test_a_card_that_says_too_little_or_two_things_is_refused(section: CardSection) -> None:
    with pytest.raises(ConfigError):
        section.card()


def test_the_engine_is_described_as_a_worker() -> None:
    model = CardSection(
        ("chat",), "org/model", "rev", tokenizer_digest=DIGEST,
        adapters=(f"{'cd' * 32}:4:sql:v2",),
    )  # fmt: skip
    config = BridgeConfig(
        model, engine(kind=Dialect.SGLANG, blocks=10, block_bytes=64, version="0.5.23"),
        zone="z", store="s",
    )  # fmt: skip
    card = model.card()
    info = Identity(config, card, "host").holder(3)
    assert (info.kind, info.instance, info.node) == (HolderKind.WORKER, "127.0.0.1:8000", "host")
    assert (info.dp_rank, info.addresses.http) == (3, "127.0.0.1:8000")
    assert (info.engine, info.engine_version, info.store) == ("sglang", "0.5.23", "s")
    assert [(one.tier, one.blocks, one.bytes) for one in info.capacities] == [(Tier.GPU, 10, 640)]
    assert config.terms(card).adapters == {"sql:v2": AdapterRef(bytes.fromhex("cd" * 32), 4)}
    assert config.policy().hidden_salts is HiddenSalts.REFUSE
    assert not config.sequence().has_replay


def test_a_namespace_is_the_connectors_or_one_that_no_store_has() -> None:
    card = MODEL.card()
    vllm, sglang = engine(), engine(kind=Dialect.SGLANG)
    assert MODEL.fingerprint(vllm, card) != MODEL.fingerprint(sglang, card)
    given = CardSection(("c",), "m", "r", tokenizer_digest=DIGEST, namespace="ef" * 32)
    assert given.fingerprint(vllm, given.card()) == bytes.fromhex("ef" * 32)


def test_a_directory_gives_the_digests_that_workers_have(tmp_path: Path) -> None:
    from kvtier.engines.transformers.tiny import write_byte_tokenizer
    from kvtier.text import TextModel

    directory = tmp_path / "model"
    directory.mkdir()
    write_byte_tokenizer(directory, 1 << 12)
    card = CardSection(("c",), "m", "r", directory=directory).card()
    digests = TextModel.load(directory).digests
    assert (card.tokenizer_digest, card.chat_template_digest) == (
        digests.tokenizer, digests.chat_template,
    )  # fmt: skip
    with pytest.raises(ConfigError):
        CardSection(("c",), "m", "r", directory=tmp_path / "nowhere").card()


def test_memory_out_of_bounds_is_refused() -> None:
    for fields in ({"keys_max": 0}, {"file_bytes_max": 1}, {"residents_max": 0}, {"save_ms": 0}):
        with pytest.raises(ValueError, match=r"want|must be"):
            MemorySection(**fields)  # type: ignore[arg-type]


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bridge.toml"
    path.write_text(
        'instance = "e"\n[model]\nserved_names = ["chat"]\nmodel_id = "m"\nrevision = "r"\n'
        f'tokenizer_digest = "{DIGEST}"\n[engine]\nkind = "trtllm"\nhidden_salts = "assume_none"\n'
    )
    config = load(BridgeConfig, ["--config", str(path), "--engine-ranks", "2"]).config
    assert config.engine.kind is Dialect.TRTLLM
    assert (config.engine.ranks, config.policy().hidden_salts) == (2, HiddenSalts.ASSUME_NONE)


def test_a_missing_token_file_is_found_before_the_engine_is(tmp_path: Path) -> None:
    dial = DialConfig(("127.0.0.1:7",), token_file=tmp_path / "nowhere")
    config = BridgeConfig(MODEL, index=dial)
    with pytest.raises(ConfigError):
        Speaker(Identity(config, MODEL.card(), "host"), dial, lambda: None).check()


def test_a_namespace_that_the_connector_tells_is_read_once_it_has_opened_its_socket(
    tmp_path: Path,
) -> None:
    model = CardSection(("c",), "m", "r", tokenizer_digest=DIGEST, namespace=TOLD)
    config = BridgeConfig(model=model, engine=EngineSection(residents=tmp_path))
    (tmp_path / "namespace").write_text("ef" * 32)
    assert not is_told(config)
    (tmp_path / "residents-0.sock").touch()
    assert is_told(config)
    assert with_namespace(config).model.namespace == "ef" * 32
    (tmp_path / "namespace").unlink()  # ranks with several namespaces tell none
    assert with_namespace(config).model.namespace == ""
    given = replace(config, model=replace(model, namespace="ab" * 32))
    assert is_told(given)
    assert with_namespace(given) == given


def test_a_namespace_is_told_only_where_the_connector_is_listened_to() -> None:
    with pytest.raises(ConfigError, match=r"engine\.residents"):
        BridgeConfig(model=CardSection(namespace=TOLD))
