"""Completes `tokenizer.json` by the folder's other files: tokens that it lacks, their flags, and `add_prefix_space`.

The rules are those of transformers, so that ids are those of `AutoTokenizer`. How texts are normalized, split and
surrounded stays as `tokenizer.json` says (docs/adr/tokenizers.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import with_prefix_space
from penstock_server.tokenizer.settings import ROLES, SETTINGS, STYLES, class_root, read_object

Json = dict[str, Any]

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Classes that set `add_prefix_space` of their byte-level pre-tokenizer, and its default.
PREFIX_SPACES = {
    **dict.fromkeys(
        ("CodeGen", "Cohere", "Deberta", "GPT2", "GPTNeoX", "Qwen2", "Qwen3_5", "Roberta", "Whisper"), False
    ),
    **dict.fromkeys(("Bart", "Longformer", "Luke", "MarkupLM"), False),
    **dict.fromkeys(("Blenderbot", "LayoutLMv3"), True),
}
# Classes that make every special token one without flags.
PLAIN_SPECIAL_TOKENS = ("Qwen2",)
# PERF: the added tokens come before the vocabulary, so the beginning of the file is enough. Reading all of a large file
# takes half a second at each start.
HEAD_BYTES = 1 << 22


def is_complete(folder: Path) -> bool:
    """Whether the folder's tokenizer.json, which exists, and tokenizer_config.json need no changes.

    Raises ConfigError when one of the other files is damaged. A damaged tokenizer.json is left to its reader.
    """
    settings, head = Declared.read(folder), _head(folder / TOKENIZER)
    return head is None or (settings.complete(head) == head and not settings.other_roles)


def completed_files(folder: Path, tokenizer: Json) -> dict[str, Json]:
    """The changed ones of tokenizer.json, whose content is `tokenizer`, and tokenizer_config.json, by name."""
    settings, files = Declared.read(folder), {}
    completed = settings.complete(tokenizer)
    if completed != tokenizer:
        files[TOKENIZER] = completed
    if settings.other_roles:
        files[CONFIG] = {**read_object(folder / CONFIG), **settings.other_roles}
    return files


@dataclass(frozen=True, slots=True)
class Declared:
    """What the files beside tokenizer.json say."""

    config: Json  # contents of tokenizer_config.json, with the special tokens of special_tokens_map.json
    other_roles: Json  # special tokens by role that special_tokens_map.json sets otherwise than tokenizer_config.json
    model: Json  # config.json
    added_ids: Json | None  # contents of added_tokens.json, by text; None: it is not read

    @classmethod
    def read(cls, folder: Path) -> Declared:
        """Raises ConfigError when a file is not a JSON object."""
        config, tokens_map, added_ids, model = (read_object(folder / name) for name in SETTINGS)
        # COMPAT: transformers reads the older files only if the newer one does not list the added tokens.
        if "added_tokens_decoder" in config:
            return cls(config, {}, model, None)
        has_more = "additional_special_tokens" in config or isinstance(config.get("extra_special_tokens"), list)
        merged = dict(config)
        for key, value in tokens_map.items():
            if key == "additional_special_tokens" and has_more:
                continue
            if key == "extra_special_tokens" and isinstance(value, list):
                given = config.get(key) or []
                given = given if isinstance(given, list) else list(given.values())
                value = given + [token for token in value if token not in given]
            merged[key] = value
        other_roles = {
            key: value
            for key, value in merged.items()
            if key.endswith("_token") and _text(value) is not None and _text(value) != _text(config.get(key))
        }
        return cls(merged, other_roles, model, added_ids)

    def complete(self, tokenizer: Json) -> Json:
        """The tokenizer with all tokens. Tokens without a vocabulary to number them get no id."""
        listed = tokenizer.get("added_tokens") or []
        tokens = {entry["content"]: entry for entry in listed}
        numbered = [entry for _, entry in sorted(self._numbered(listed).items(), key=lambda item: item[0])]
        named, more = self._special()
        texts = {entry["content"] for entry in named}
        known = tokens.keys() | {entry["content"] for entry in numbered}
        wanted = numbered + [entry for entry in named + more if entry["content"] not in known]
        for entry in wanted:
            text = entry["content"]
            if text:
                tokens[text] = {**tokens.get(text, {}), **entry, "special": entry["special"] or text in texts}
        if self._class in PLAIN_SPECIAL_TOKENS:
            plain = _special_tokens(entry["content"] for entry in named + more)
            tokens |= {entry["content"]: {**tokens[entry["content"]], **entry} for entry in plain if entry["content"]}
        completed = dict(tokenizer)
        if tokens:
            entries, model = list(tokens.values()), tokenizer.get("model")
            completed["added_tokens"] = _with_ids(entries, model) if isinstance(model, dict) else entries
        if isinstance(tokenizer.get("pre_tokenizer"), dict):
            completed["pre_tokenizer"] = self._split(tokenizer["pre_tokenizer"])
        return completed

    def _numbered(self, listed: list[Json]) -> dict[int, Json]:
        """The tokens by id: those of tokenizer_config.json, or else of added_tokens.json and tokenizer.json."""
        try:
            if self.added_ids is None:
                decoder = self.config["added_tokens_decoder"] or {}
                return {int(id_): _entry(value) for id_, value in decoder.items()}
            special = {entry["content"] for entry in self._named(ROLES) + self._more("extra_special_tokens")}
            tokens = {
                int(id_): _entry({"content": text, "special": text in special}) for text, id_ in self.added_ids.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"the added tokens of {CONFIG} or added_tokens.json are damaged: {error}") from error
        return tokens | {entry["id"]: _entry(entry) for entry in listed}

    def _special(self) -> tuple[list[Json], list[Json]]:
        """The special tokens with a role, and the others."""
        others = [key for key in self.config if key.endswith("_token") and key not in ROLES]
        with_flags = [key for key in others if isinstance(self.config[key], dict)]
        named = self._named([*ROLES, *with_flags, *(key for key in others if key not in with_flags)])
        for key in ("model_specific_special_tokens", "extra_special_tokens"):
            if isinstance(self.config.get(key), dict):
                named += _special_tokens(self.config[key].values())
        return named, self._more("extra_special_tokens") or self._more("additional_special_tokens")

    def _named(self, roles: Iterable[str]) -> list[Json]:
        defaults = dict(STYLES[self._class].defaults) if self._class in STYLES and self._class in PREFIX_SPACES else {}
        values = [self.config.get(role, defaults.get(role)) for role in roles]
        return _special_tokens(value for value in values if _text(value) is not None)

    def _more(self, key: str) -> list[Json]:
        listed = self.config.get(key) or []
        return _special_tokens(listed) if isinstance(listed, list) else []

    def _split(self, pre_tokenizer: Json) -> Json:
        if self._class not in PREFIX_SPACES:
            return pre_tokenizer
        given = self.config.get("add_prefix_space")
        return with_prefix_space(pre_tokenizer, PREFIX_SPACES[self._class] if given is None else bool(given))

    @property
    def _class(self) -> str:
        return class_root(self.config, self.model)


def _special_tokens(values: Iterable[Any]) -> list[Json]:
    return [_entry({"content": value} if isinstance(value, str) else value, special=True) for value in values]


def _text(value: Any) -> str | None:
    """The text of a token that is a text or an object; None: it is neither."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _entry(value: Any, special: bool = False) -> Json:
    """A token as in tokenizer.json, without its id. special: the default. Raises ConfigError when it has no text."""
    if not isinstance(value, dict) or _text(value) is None:
        raise ConfigError(f"{CONFIG} is damaged: {json.dumps(value)[:100]} is not a token, which has a text as content")
    special = bool(value.get("special", special))
    flags = {"normalized": not special, **value, "special": special}
    return {"content": value["content"], **{flag: bool(flags.get(flag, False)) for flag in FLAGS}}


def _with_ids(tokens: list[Json], model: Json) -> list[Json]:
    """The tokens by id. One of the vocabulary keeps its id; others get the next one, as in the tokenizers library."""
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: id_ for id_, entry in enumerate(vocabulary)}
    numbered: dict[int, Json] = {}
    next_id = len(vocabulary)
    for token in tokens:
        id_ = vocabulary.get(token["content"], next_id)
        next_id = max(next_id, id_ + 1)
        numbered[id_] = {"id": id_, **{key: value for key, value in token.items() if key != "id"}}
    return [numbered[id_] for id_ in sorted(numbered)]


def _head(path: Path) -> Json | None:
    """The members that `Declared.complete` changes; None: the file is damaged, which its reader reports."""
    with path.open("rb") as file:
        start = file.read(HEAD_BYTES)
        for content in (start, None):
            content = start + file.read() if content is None else content
            try:
                members = _members(content.decode(errors="replace"), {"added_tokens", "pre_tokenizer"})
            except (ValueError, IndexError):
                continue
            tokens = members.get("added_tokens") or []
            is_readable = isinstance(tokens, list) and all(
                isinstance(entry, dict) and "id" in entry and "content" in entry for entry in tokens
            )
            return members if is_readable else None
    return None


def _members(text: str, wanted: set[str]) -> Json:
    """These members of a JSON object. Raises ValueError or IndexError when the text ends before them."""
    decoder, members = json.JSONDecoder(), Json()
    index = _after_space(text, 0)
    while text[index] in "{," and members.keys() != wanted:
        index = _after_space(text, index + 1)
        if text[index] == "}":
            break
        key, index = decoder.raw_decode(text, index)
        value, index = decoder.raw_decode(text, _after_space(text, _after_space(text, index) + 1))
        if key in wanted:
            members[key] = value
        index = _after_space(text, index)
    return members


def _after_space(text: str, index: int) -> int:
    while text[index] in " \t\r\n":
        index += 1
    return index
