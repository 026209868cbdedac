"""Model directories are read as transformers reads them; digests tell apart what makes tokens."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from kvtier.core.model_card import ModelCard
from kvtier.errors import CallerError, ConfigError, LimitError
from kvtier.limits import MODEL_FILE_BYTES_MAX
from kvtier.text import (
    HASHED_TEXT_DIGEST,
    SpecialTokens,
    TextConfig,
    TextModel,
    ToolsWhenNone,
    chat_pseudo_tokens,
    pseudo_tokens,
)
from kvtier.text.model import ChatOptions
from tests.support.chat_templates import CHATML
from tests.support.text_models import byte_level_bpe, metaspace_bpe, write_model


def loaded_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    return set(result.stdout.split())


def test_importing_text_and_openai_pulls_in_no_model_library() -> None:
    modules = loaded_after(
        "import kvtier.text, kvtier.openai.requests, kvtier.openai.sse, kvtier.openai.usage"
    )
    assert not modules & {"torch", "transformers", "grpc", "aiohttp", "redis", "asyncio"}


def test_texts_go_there_and_back(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    text = "Hello,\n\n wörld 日本 😀 <|im_start|>"
    ids = model.encode(text, SpecialTokens.OMIT)
    assert ids.dtype == np.uint32
    assert ids.flags.c_contiguous
    assert model.decode(ids.tolist(), SpecialTokens.ADD) == text
    assert model.decode(ids.tolist()) == text.removesuffix("<|im_start|>")
    assert model.encode("", SpecialTokens.OMIT).size == 0


def test_decoding_refuses_what_is_no_id_and_skips_what_is_unknown(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    assert model.decode([2**32 - 1]) == ""
    for ids in ([-1], [2**32], ["x"], [1.5]):
        with pytest.raises(CallerError):
            model.decode(ids)  # type: ignore[arg-type]


POST = processors.TemplateProcessing(
    single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 500), ("</s>", 501)]
)


@pytest.mark.parametrize(
    "processor",
    [
        None,
        POST,
        processors.ByteLevel(),
        processors.Sequence([processors.ByteLevel(), POST]),
        processors.RobertaProcessing(("</s>", 501), ("<s>", 500)),
    ],
)
def test_special_tokens_around_a_text_are_those_of_the_tokenizer(
    tmp_path: Path, processor: processors.PostProcessor | None
) -> None:
    tokenizer = byte_level_bpe()
    if processor is not None:
        tokenizer.post_processor = processor
    model = TextModel.load(write_model(tmp_path, tokenizer))
    for text in ("", "a text", "a<|im_end|>b"):
        for _ in range(2):
            assert model.encode(text).tolist() == tokenizer.encode(text).ids
            expected = tokenizer.encode(text, add_special_tokens=False).ids
            assert model.encode(text, SpecialTokens.OMIT).tolist() == expected


def test_truncation_and_padding_of_a_tokenizer_file_do_not_count(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    plain = tokenizer.encode("one two three four", add_special_tokens=False).ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    model = TextModel.load(write_model(tmp_path, tokenizer))
    assert model.encode("one two three four", SpecialTokens.OMIT).tolist() == plain


def test_tokens_that_only_the_configuration_names_are_added_as_transformers_does(
    tmp_path: Path,
) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level_bpe(["<s>"])
    first = tokenizer.get_vocab_size()
    plain = {"lstrip": False, "rstrip": False, "single_word": False}
    config: dict[str, object] = {
        "added_tokens_decoder": {
            str(first): {"content": "<tool>", "special": False, "normalized": False, **plain},
            str(first + 1): {"content": "<|end|>", "special": True, "normalized": False, **plain},
        },
        "pad_token": "<pad>",
        "image_token": "<image>",
        "extra_special_tokens": ["<extra>"],
    }
    directory = write_model(tmp_path, tokenizer, CHATML, config)
    model = TextModel.load(directory)
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    text = "a<tool>b<|end|>c<pad>d<image>e<extra>f</s>"
    expected = reference.encode(text, add_special_tokens=False)
    assert model.encode(text, SpecialTokens.OMIT).tolist() == expected
    assert model.token_id("<|end|>") == first + 1


def test_an_added_token_that_would_get_another_id_is_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"9999": {"content": "<late>", "special": True}}}
    directory = write_model(tmp_path, byte_level_bpe(), CHATML, config)
    with pytest.raises(ConfigError, match="9999"):
        TextModel.load(directory)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "</s>"),
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"config.json": {"eos_token_id": 9}}, (9,)),
        (
            {"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 9}},
            (9,),
        ),
    ],
)
def test_generation_ends_where_the_files_say(
    tmp_path: Path, files: dict[str, object], expected: object
) -> None:
    directory = write_model(tmp_path, byte_level_bpe())
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    model = TextModel.load(directory)
    if isinstance(expected, str):
        expected = (model.token_id(expected),)
    assert model.eos_token_ids == expected


def test_digests_fit_a_model_card_and_tell_models_apart(tmp_path: Path) -> None:
    def digests(name: str, tokenizer: object, template: str) -> tuple[bytes, bytes | None]:
        directory = write_model(tmp_path / name, tokenizer, template)  # type: ignore[arg-type]
        found = TextModel.load(directory).digests
        card = ModelCard(("m",), "m", "r", found.tokenizer, found.chat_template, 16)
        return card.tokenizer_digest, card.chat_template_digest

    one = digests("one", byte_level_bpe(), CHATML)
    assert digests("same", byte_level_bpe(), CHATML) == one
    other_template = digests("template", byte_level_bpe(), CHATML + " ")
    assert other_template[0] == one[0]
    assert other_template[1] != one[1]
    more = byte_level_bpe()
    more.add_tokens([AddedToken("<more>")])
    other_tokenizer = digests("tokenizer", more, CHATML)
    assert other_tokenizer[0] != one[0]
    assert other_tokenizer[1] == one[1]


def test_the_layout_of_a_tokenizer_file_does_not_change_its_digest(tmp_path: Path) -> None:
    directory = write_model(tmp_path, byte_level_bpe())
    digest = TextModel.load(directory).digests.tokenizer
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(dict(reversed(content.items())), indent=3))
    assert TextModel.load(directory).digests.tokenizer == digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"type": "Unheard"}}'),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"5"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"1": {"content": "y", "special": 5}}}',
        ),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% if %}"),
        ("generation_config.json", b"{"),
    ],
)
def test_a_broken_file_is_a_configuration_error(tmp_path: Path, name: str, content: bytes) -> None:
    directory = write_model(tmp_path, byte_level_bpe())
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError):
        TextModel.load(directory)


@pytest.mark.parametrize("template", [5, [{"name": "x"}], [5], {"default": 5}])
def test_a_configured_template_that_is_none_is_refused(tmp_path: Path, template: object) -> None:
    directory = write_model(tmp_path, byte_level_bpe(), None, {"chat_template": template})
    with pytest.raises(ConfigError):
        TextModel.load(directory)


def test_missing_and_oversized_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextModel.load(tmp_path)
    directory = write_model(tmp_path, byte_level_bpe())
    (directory / "chat_template.jinja").write_bytes(b" " * (MODEL_FILE_BYTES_MAX + 1))
    with pytest.raises(LimitError):
        TextModel.load(directory)


def test_a_cache_size_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError):
        TextConfig(segment_cache_bytes=-1)


def test_tools_of_a_request_that_wants_none_are_shown_as_configured(tmp_path: Path) -> None:
    directory = write_model(tmp_path, byte_level_bpe(), "{{ tools | length if tools else 'no' }}")
    chat = [{"role": "user", "content": "x"}]
    options = ChatOptions(tools=[{"type": "function"}], tool_choice="none")
    assert TextModel.load(directory).render_chat(chat, options) == "1"
    config = TextConfig(tools_when_none=ToolsWhenNone.LEAVE_OUT)
    assert TextModel.load(directory, config).render_chat(chat, options) == "no"


def test_metaspace_models_keep_their_space_at_the_start_only(tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path, metaspace_bpe("first", ["<s>"])))
    assert model.decode(model.encode("the fox", SpecialTokens.OMIT).tolist()) == "the fox"


@given(text=st.text(st.characters(codec="utf-8")), more=st.text(st.characters(codec="utf-8")))
def test_pseudo_tokens_of_a_prefix_are_a_prefix(text: str, more: str) -> None:
    short, long = pseudo_tokens(text), pseudo_tokens(text + more)
    assert short.dtype == np.uint32
    assert long[: len(short)].tolist() == short.tolist()
    assert len(short) == len(text.encode()) // 4


@given(one=st.binary(min_size=4, max_size=4), other=st.binary(min_size=4, max_size=4))
def test_different_windows_have_different_pseudo_tokens(one: bytes, other: bytes) -> None:
    texts = [
        window.decode("latin-1").encode("ascii", "replace").decode() for window in (one, other)
    ]
    tokens = [pseudo_tokens(text).tolist() for text in texts]
    assert (tokens[0] == tokens[1]) == (texts[0] == texts[1])


def test_a_chat_that_goes_on_keeps_its_pseudo_tokens() -> None:
    chat: list[dict[str, object]] = [{"role": "user", "content": "héllo"}]
    more: list[dict[str, object]] = [
        *chat,
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    ]
    short, long = chat_pseudo_tokens(chat), chat_pseudo_tokens(more)
    assert long[: len(short)].tolist() == short.tolist()
    assert chat_pseudo_tokens(chat, [{"type": "function"}]).tolist() != short.tolist()
    with pytest.raises(CallerError):
        pseudo_tokens("\ud800")
    assert len(HASHED_TEXT_DIGEST) == 32
