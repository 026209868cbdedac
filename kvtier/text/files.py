"""Reads the text files of a model directory into plain values. Bounded; never writes.

What must not live here: tokenizers and templates made from them (model.py).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, LimitError
from kvtier.limits import CHAT_TEMPLATES_COUNT_MAX, MODEL_FILE_BYTES_MAX, TOKENIZER_BYTES_MAX

_NAMED_TOKENS: Final = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TOKENIZER_PARTS: Final = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
"""Of tokenizer.json, what decides which tokens a text gets."""


@dataclass(frozen=True, slots=True)
class AddedTokenSpec:
    """An added token that a model's files name."""

    id: int | None
    content: str
    special: bool
    normalized: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model directory says about text."""

    tokenizer_json: bytes
    tokenizer: Mapping[str, object]
    """The same, parsed."""
    special_tokens: Mapping[str, str]
    """By the name that templates use: `bos_token` and the like, and the model's own."""
    added_tokens: tuple[AddedTokenSpec, ...]
    """Beyond those of tokenizer.json, in the order in which they are added."""
    splits_special_tokens: bool
    templates: Mapping[str, str]
    """Chat templates by name; one without a name is `default`."""
    eos_token_ids: tuple[int, ...]
    """Where generation ends, of generation_config.json or config.json; may be empty."""

    def tokenizer_digest(self) -> bytes:
        """32 bytes, equal for files that give every text the same tokens and are merely laid out
        differently: white space, order of keys and merges in either spelling do not count."""
        parts = {name: self.tokenizer.get(name) for name in _TOKENIZER_PARTS}
        parts["model"] = _plain_model(parts["model"])
        added = [
            [spec.id, spec.content, spec.special, spec.normalized, spec.lstrip, spec.rstrip]
            for spec in self.added_tokens
        ]
        return _digest("kvtier.tokenizer.v1", [parts, added, self.splits_special_tokens])

    def template_digest(self) -> bytes | None:
        """32 bytes of all templates and the special tokens that they print; None without any."""
        if not self.templates:
            return None
        printed = [dict(self.templates), dict(self.special_tokens)]
        return _digest("kvtier.chat-template.v1", printed)


def read_model_files(directory: Path) -> ModelFiles:
    """Read what `directory` says about text; ConfigError where it is missing or wrong. Blocks.

    Looks for tokenizer.json (needed), tokenizer_config.json, special_tokens_map.json,
    chat_template.jinja, additional_chat_templates/*.jinja, generation_config.json and config.json.
    """
    raw = _read(directory / "tokenizer.json", TOKENIZER_BYTES_MAX)
    if raw is None:
        raise ConfigError(f"no tokenizer.json in model directory {directory.name!r}")
    tokenizer = _object("tokenizer.json", raw)
    config = _read_object(directory / "tokenizer_config.json")
    tokens = dict(config)
    if "added_tokens_decoder" not in config:
        tokens |= _read_object(directory / "special_tokens_map.json")
    return ModelFiles(
        tokenizer_json=raw,
        tokenizer=tokenizer,
        special_tokens=_special_tokens(tokens),
        added_tokens=_added_tokens(tokenizer, tokens),
        splits_special_tokens=config.get("split_special_tokens") is True,
        templates=_templates(directory, config),
        eos_token_ids=_eos_token_ids(directory),
    )


def _read(path: Path, bytes_max: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(content) > bytes_max:
        raise LimitError(f"{path.name} exceeds {bytes_max} bytes")
    return content


def _read_object(path: Path) -> dict[str, object]:
    raw = _read(path, MODEL_FILE_BYTES_MAX)
    return {} if raw is None else _object(path.name, raw)


def _object(name: str, raw: bytes) -> dict[str, object]:
    try:
        parsed: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} is not a JSON object")
    return parsed


def _content(token: object) -> str | None:
    """The text of a token that is written as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    own = extra if isinstance(extra, dict) else {}
    found = {}
    for name, value in (*config.items(), *own.items()):
        is_named = name in _NAMED_TOKENS
        is_own = name in own or (name.endswith("_token") and isinstance(value, str))
        content = _content(value)
        if content is not None and (is_named or is_own):
            found[name] = content
    return found


def _added_tokens(
    tokenizer: Mapping[str, object], config: Mapping[str, object]
) -> tuple[AddedTokenSpec, ...]:
    """Tokens that the configuration adds to those of tokenizer.json: by id, then the named ones."""
    known = {
        content for token in _list(tokenizer.get("added_tokens")) if (content := _content(token))
    }
    specs: list[AddedTokenSpec] = []

    def add(spec: AddedTokenSpec) -> None:
        if spec.content not in known:
            known.add(spec.content)
            specs.append(spec)

    decoder = config.get("added_tokens_decoder")
    numbered = {} if not isinstance(decoder, dict) else decoder
    if not all(number.isdecimal() for number in numbered):
        raise ConfigError("tokenizer_config.json: added_tokens_decoder has a key that is no id")
    for number in sorted(numbered, key=int):
        if isinstance(token := numbered[number], dict) and _content(token):
            add(_spec(token, int(number)))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for token in (*(config.get(name) for name in _special_tokens(config)), *_list(extra)):
        if (content := _content(token)) is not None:
            add(_spec(token, None) if isinstance(token, dict) else _named(content))
    return tuple(specs)


def _named(content: str) -> AddedTokenSpec:
    return AddedTokenSpec(id=None, content=content, special=True, normalized=False)


def _spec(token: Mapping[str, object], token_id: int | None) -> AddedTokenSpec:
    special = token_id is None or token.get("special") is True
    return AddedTokenSpec(
        id=token_id,
        content=str(token["content"]),
        special=special,
        normalized=bool(token.get("normalized", not special)),
        lstrip=token.get("lstrip") is True,
        rstrip=token.get("rstrip") is True,
        single_word=token.get("single_word") is True,
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _templates(directory: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Templates in files of their own stand before those in the configuration."""
    folder = directory / "additional_chat_templates"
    files = {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    files["default"] = directory / "chat_template.jinja"
    if len(files) > CHAT_TEMPLATES_COUNT_MAX:
        raise LimitError(f"{len(files)} chat templates exceed {CHAT_TEMPLATES_COUNT_MAX}")
    found = {name: text for name, path in files.items() if (text := _read_text(path)) is not None}
    return found or _configured_templates(config.get("chat_template"))


def _read_text(path: Path) -> str | None:
    raw = _read(path, MODEL_FILE_BYTES_MAX)
    try:
        # Line ends as a text file gives them
        return None if raw is None else raw.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is not UTF-8") from error


def _configured_templates(value: object) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            pairs = [
                (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
                for item in value
            ]
        case dict():
            pairs = list(value.items())
        case _:
            pairs = [(None, None)]
    found = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if len(found) != len(pairs) or len(found) > CHAT_TEMPLATES_COUNT_MAX:
        raise ConfigError("tokenizer_config.json: chat_template is no template and no list of them")
    return found


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read_object(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(each) is int and each >= 0 for each in ids):
            return tuple(ids)
    return ()


def _plain_model(model: object) -> object:
    """The model part with merges in one spelling: `["a", "b"]`, never `"a b"`."""
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list):
        return model
    merges: Iterable[object] = model["merges"]
    return model | {
        "merges": [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    }


def _digest(domain: str, value: object) -> bytes:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{domain}\0{canonical}".encode()).digest()
