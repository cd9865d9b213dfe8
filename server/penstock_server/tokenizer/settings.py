"""The settings in a folder's JSON files, with the defaults of the tokenizer's transformers class."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import GPT2, QWEN2, PreTokenizer
from penstock_server.tokenizer.layout import AddedToken, tokenizer_json

# The files that hold settings of the tokenizer.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Style:
    """The defaults of a transformers class."""

    prefix: tuple[str, ...] = ()  # the roles of the tokens added before every text
    suffix: tuple[str, ...] = ()  # the roles of the tokens added after every text
    defaults: tuple[tuple[str, str], ...] = ()  # (role, token) for roles that no file defines
    pre_tokenizer: PreTokenizer = GPT2
    extra_ids: int = 0  # the default number of sentinel tokens after the vocabulary


LLAMA_TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))
GEMMA_TOKENS = (("pad_token", "<pad>"), ("bos_token", "<bos>"), ("eos_token", "<eos>"), ("unk_token", "<unk>"))
BART_TOKENS = (*LLAMA_TOKENS, ("sep_token", "</s>"), ("pad_token", "<pad>"), ("cls_token", "<s>"))
BERT_TOKENS = (("unk_token", "[UNK]"), ("sep_token", "[SEP]"), ("pad_token", "[PAD]"), ("cls_token", "[CLS]"))
GPT2_TOKENS = tuple((role, "<|endoftext|>") for role in ("bos_token", "eos_token", "unk_token"))
QWEN2_TOKENS = tuple((role, "<|endoftext|>") for role in ("eos_token", "unk_token", "pad_token"))
LLAMA = Style(("bos_token",), (), LLAMA_TOKENS)
T5_TOKENS = (("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>"))
T5 = Style((), ("eos_token",), T5_TOKENS, extra_ids=100)
PEGASUS_TOKENS = (*T5_TOKENS, ("mask_token_sent", "<mask_1>"), ("mask_token", "<mask_2>"))
PEGASUS = Style((), ("eos_token",), PEGASUS_TOKENS)
BART = Style(("cls_token",), ("sep_token",), (*BART_TOKENS, ("mask_token", "<mask>")))
STYLES = {
    "Baichuan": LLAMA,
    "Bart": BART,
    "Bert": Style(("cls_token",), ("sep_token",), (*BERT_TOKENS, ("mask_token", "[MASK]"))),
    "GPT2": Style(defaults=GPT2_TOKENS),
    "Gemma": Style(("bos_token",), (), GEMMA_TOKENS),
    "InternLM2": LLAMA,
    "Llama": LLAMA,
    "Pegasus": PEGASUS,
    "Qwen2": Style(defaults=QWEN2_TOKENS, pre_tokenizer=QWEN2),
    "Roberta": BART,
    "T5": T5,
}
# model_type → style, for folders that do not name the class
STYLES_BY_MODEL = {
    **dict.fromkeys(("baichuan", "internlm2", "llama", "mistral", "mixtral"), "Llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "Gemma"),
    **dict.fromkeys(("mt5", "t5", "umt5"), "T5"),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), "GPT2"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2"),
    **dict.fromkeys(("bart", "roberta"), "Bart"),
    "bert": "Bert",
    "pegasus": "Pegasus",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one folder."""

    values: dict[str, Any]
    added: dict[int, dict[str, Any]]  # by id
    style: Style
    is_known: bool  # whether STYLES has the class
    class_name: str = ""  # the tokenizer's class
    model_type: str = ""

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Raises ConfigError when a file is not a JSON object."""
        config, tokens_map, added_ids, model = (read_object(folder / name) for name in SETTINGS)
        values = {**tokens_map, **config}
        class_name = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "")
        model_type = str(model.get("model_type") or "")
        name = class_root(config, model)
        name = {"MT5": "T5", "CodeLlama": "Llama"}.get(name, name)
        if name not in STYLES:
            name = STYLES_BY_MODEL.get(model_type, "")
        added = {int(id_): {"content": text, "special": False} for text, id_ in added_ids.items()}
        for id_, entry in (config.get("added_tokens_decoder") or {}).items():
            added[int(id_)] = entry
        return cls(values, added, STYLES.get(name, Style()), name in STYLES, class_name, model_type)

    def token(self, role: str) -> str | None:
        """The token with this role."""
        value = self.values[role] if role in self.values else dict(self.style.defaults).get(role)
        return value.get("content") if isinstance(value, dict) else value

    def special_tokens(self) -> list[str]:
        """All tokens that the settings declare special."""
        more = self.values.get("additional_special_tokens") or []
        texts = [self.token(role) for role in ROLES]
        texts += [entry.get("content") if isinstance(entry, dict) else entry for entry in more]
        return list(dict.fromkeys(text for text in texts if isinstance(text, str)))

    def complete(
        self, parts: dict[str, Any], ids: dict[str, int], whole: list[AddedToken], sentinels: list[str] | None = None
    ) -> dict[str, Any]:
        """Builds `tokenizer.json` from its parts. Tokens that the vocabulary lacks are appended to it.

        whole: tokens of the vocabulary that are never split.
        """
        added = {token.id: token for token in whole}
        for id_, entry in self.added.items():
            flags = {key: bool(entry.get(key, False)) for key in ("special", "lstrip", "rstrip", "normalized")}
            added[id_] = AddedToken(id_, entry["content"], single_word=bool(entry.get("single_word", False)), **flags)
        known = {**ids, **{token.content: token.id for token in added.values()}}
        for text in (sentinels or []) + self.special_tokens():
            id_ = known.setdefault(text, max(known.values(), default=-1) + 1)
            added[id_] = replace(added.get(id_, AddedToken(id_, text, special=True)), special=True)
        prefix = self._automatic(self.style.prefix, "add_bos_token", "bos_token")
        suffix = self._automatic(self.style.suffix, "add_eos_token", "eos_token")
        by_text = {token.content: token for token in added.values()}
        around = ([by_text[text] for text in texts if text in by_text] for texts in (prefix, suffix))
        return tokenizer_json(parts, list(added.values()), *around)

    def _automatic(self, roles: tuple[str, ...], key: str, switched: str) -> list[str | None]:
        """The tokens that are added to every text. The settings can switch BOS and EOS on and off, but not others."""
        if roles in ((), (switched,)):
            roles = (switched,) if self.values.get(key, bool(roles)) else ()
        return [self.token(role) for role in roles]


def class_root(config: dict[str, Any], model: dict[str, Any]) -> str:
    """The name of the transformers class without its suffixes, as "GPT2"; of models that do not name it, by their type.

    config: tokenizer_config.json. model: config.json.
    """
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "")
    return named.removesuffix("Fast").removesuffix("Tokenizer") or STYLES_BY_MODEL.get(str(model.get("model_type")), "")


def read_text(path: Path) -> str:
    """Reads a text file. Raises ConfigError when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty when there is no such file. Raises ConfigError when the file is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
