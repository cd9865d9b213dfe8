"""Slow-only tokenizers, published as a vocabulary and a class of transformers → `tokenizer.json`.

What the class does is data here: how a text is cut, and what is put around it. A class that is not known is treated as
the plain kind of its files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import GPT2, QWEN2, Cutting, byte_level_json, with_prefix_space
from penstock_server.tokenizer.layout import AddedToken, tokenizer_json
from penstock_server.tokenizer.sentencepiece_file import read_sentencepiece
from penstock_server.tokenizer.sentencepiece_json import (
    CONTROL,
    SPACE,
    USER_DEFINED,
    Vocabulary,
    sentencepiece_json,
    sentencepiece_model,
)

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
# The files that an answer depends on, beside the vocabulary.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Style:
    """What a class of transformers adds to a vocabulary."""

    before: str | None = None  # the role of the token put before every text
    behind: str | None = None
    defaults: tuple[tuple[str, str], ...] = ()  # tokens by role, where no file says them
    cutting: Cutting = GPT2
    extra_ids: int = 0  # sentinels behind the vocabulary, where the configuration does not say


LLAMA_TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))
GEMMA_TOKENS = (("pad_token", "<pad>"), ("bos_token", "<bos>"), ("eos_token", "<eos>"), ("unk_token", "<unk>"))
BART_TOKENS = (*LLAMA_TOKENS, ("sep_token", "</s>"), ("pad_token", "<pad>"), ("cls_token", "<s>"))
BERT_TOKENS = (("unk_token", "[UNK]"), ("sep_token", "[SEP]"), ("pad_token", "[PAD]"), ("cls_token", "[CLS]"))
GPT2_TOKENS = tuple((role, "<|endoftext|>") for role in ("bos_token", "eos_token", "unk_token"))
LLAMA = Style("bos_token", None, LLAMA_TOKENS)
T5 = Style(None, "eos_token", (("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")), extra_ids=100)
BART = Style("cls_token", "sep_token", (*BART_TOKENS, ("mask_token", "<mask>")))
STYLES = {
    "Baichuan": LLAMA,
    "Bart": BART,
    "Bert": Style("cls_token", "sep_token", (*BERT_TOKENS, ("mask_token", "[MASK]"))),
    "GPT2": Style(defaults=GPT2_TOKENS),
    "Gemma": Style("bos_token", None, GEMMA_TOKENS),
    "InternLM2": LLAMA,
    "Llama": LLAMA,
    "Qwen2": Style(defaults=(("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")), cutting=QWEN2),
    "Roberta": BART,
    "T5": T5,
}
# model_type → style, for folders that do not name their class
STYLES_BY_MODEL = {
    **dict.fromkeys(("baichuan", "internlm2", "llama", "mistral", "mixtral"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "Gemma"),
    **dict.fromkeys(("mt5", "t5", "umt5"), "T5"),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), "GPT2"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2"),
    **dict.fromkeys(("bart", "roberta"), "Bart"),
    "bert": "Bert",
}


def vocabulary_files(folder: Path) -> tuple[Path, ...]:
    """The files of the folder's slow tokenizer; empty when it has none that can be converted."""
    for name in SENTENCEPIECE_FILES:
        if (folder / name).is_file():
            return (folder / name,)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return (folder / "vocab.json", folder / "merges.txt")
    return (folder / "vocab.txt",) if (folder / "vocab.txt").is_file() else ()


def convert(folder: Path) -> dict[str, Any]:
    """`tokenizer.json` of a folder with vocabulary files. Raises ConfigError when one of them is damaged."""
    files, settings = vocabulary_files(folder), Settings.read(folder)
    if files[0].name in SENTENCEPIECE_FILES:
        return _sentencepiece(read_sentencepiece(files[0]), settings)
    if files[0].name == "vocab.json":
        return _byte_level(files[0], files[1], settings)
    return _word_piece(files[0], settings)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files beside the vocabulary say."""

    values: dict[str, Any]
    added: dict[int, dict[str, Any]]  # by id
    style: Style
    is_known: bool  # whether the style is the class's own

    @classmethod
    def read(cls, folder: Path) -> Settings:
        config, tokens_map, added_ids, model = (_read_object(folder / name) for name in SETTINGS)
        values = {**tokens_map, **config}
        name = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
        name = {"MT5": "T5", "CodeLlama": "Llama"}.get(name, name)
        if name not in STYLES:
            name = STYLES_BY_MODEL.get(str(model.get("model_type")), "")
        added = {int(id_): {"content": text, "special": False} for text, id_ in added_ids.items()}
        for id_, entry in (config.get("added_tokens_decoder") or {}).items():
            added[int(id_)] = entry
        return cls(values, added, STYLES.get(name, Style()), name in STYLES)

    def token(self, role: str) -> str | None:
        """The text of a token, by its role."""
        value = self.values[role] if role in self.values else dict(self.style.defaults).get(role)
        return value.get("content") if isinstance(value, dict) else value

    def special_tokens(self) -> list[str]:
        more = self.values.get("additional_special_tokens") or []
        texts = [self.token(role) for role in ROLES]
        texts += [entry.get("content") if isinstance(entry, dict) else entry for entry in more]
        return list(dict.fromkeys(text for text in texts if isinstance(text, str)))

    def complete(
        self, parts: dict[str, Any], ids: dict[str, int], whole: list[AddedToken], sentinels: list[str] | None = None
    ) -> dict[str, Any]:
        """whole: the vocabulary's own tokens that no merge may touch. Tokens that the vocabulary lacks go behind it."""
        added = {token.id: token for token in whole}
        for id_, entry in self.added.items():
            flags = {key: bool(entry.get(key, False)) for key in ("special", "lstrip", "rstrip", "normalized")}
            added[id_] = AddedToken(id_, entry["content"], single_word=bool(entry.get("single_word", False)), **flags)
        known = {**ids, **{token.content: token.id for token in added.values()}}
        for text in (sentinels or []) + self.special_tokens():
            id_ = known.setdefault(text, max(known.values(), default=-1) + 1)
            added[id_] = replace(added.get(id_, AddedToken(id_, text, special=True)), special=True)
        before = self._around(self.style.before, "add_bos_token", "bos_token")
        behind = self._around(self.style.behind, "add_eos_token", "eos_token")
        by_text = {token.content: token for token in added.values()}
        return tokenizer_json(parts, list(added.values()), by_text.get(before or ""), by_text.get(behind or ""))

    def _around(self, role: str | None, key: str, switched: str) -> str | None:
        """Configurations can switch begin and end tokens, but not BERT's."""
        if role is None or role == switched:
            return self.token(switched) if self.values.get(key, role is not None) else None
        return self.token(role)


def _sentencepiece(vocabulary: Vocabulary, settings: Settings) -> dict[str, Any]:
    ids = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces)}
    whole = [
        AddedToken(id_, piece.text, special=piece.type == CONTROL)
        for id_, piece in enumerate(vocabulary.pieces)
        if piece.type in (CONTROL, USER_DEFINED)
    ]
    if settings.style is T5:
        num_extra = int(settings.values.get("extra_ids", settings.style.extra_ids))
        sentinels = [f"<extra_id_{index}>" for index in reversed(range(num_extra))]
        return settings.complete(_t5(vocabulary), ids, whole, sentinels)
    if not vocabulary.adds_prefix or settings.values.get("add_prefix_space") is False:
        parts = sentencepiece_json(vocabulary, "never")
    elif not settings.is_known:
        parts = sentencepiece_json(vocabulary, "sentencepiece")
    else:
        # COMPAT: transformers puts no space before a text behind a special token unless the class is its old self.
        parts = sentencepiece_json(vocabulary, "always" if settings.values.get("legacy", False) else "first")
    return settings.complete(parts, ids, whole)


def _t5(vocabulary: Vocabulary) -> dict[str, Any]:
    """Word by word; whitespace is nothing but what separates them."""
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    parts = sentencepiece_json(replace(vocabulary, removes_extra_spaces=False), "first")
    return {
        "normalizer": parts["normalizer"],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": sentencepiece_model(vocabulary),
    }


def _byte_level(vocabulary_path: Path, merges_path: Path, settings: Settings) -> dict[str, Any]:
    ids = _read_object(vocabulary_path)
    if not ids or not all(isinstance(id_, int) for id_ in ids.values()):
        raise ConfigError(f"{vocabulary_path} is no vocabulary: it must give every token its number")
    lines = _read_text(merges_path).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    broken = next((line for line in merges if line.count(" ") != 1), None)
    if broken is not None:
        raise ConfigError(f"{merges_path} is damaged: {broken!r} is not two tokens with a space between")
    parts = byte_level_json(ids, merges, settings.style.cutting)
    if settings.values.get("add_prefix_space", False):
        parts["pre_tokenizer"] = with_prefix_space(parts["pre_tokenizer"])
    return settings.complete(parts, ids, [])


def _word_piece(path: Path, settings: Settings) -> dict[str, Any]:
    ids = {token: id_ for id_, token in enumerate(_read_text(path).rstrip("\n").split("\n"))}
    values = settings.values
    parts = {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": bool(values.get("tokenize_chinese_chars", True)),
            "strip_accents": values.get("strip_accents"),
            "lowercase": bool(values.get("do_lower_case", True)),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": settings.token("unk_token") or "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
    return settings.complete(parts, ids, [])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
