"""Builds `tokenizer.json` and `tokenizer_config.json` from GGUF metadata. Imports no torch and no tokenizers.

GGUF calls byte-level BPE "gpt2", SentencePiece BPE "llama" and SentencePiece unigrams "t5". Other kinds are refused by
name. `tokenizer.ggml.pre` names the pre-tokenizer of byte-level BPE; an unknown name is refused.
"""

from __future__ import annotations

from typing import Any

from penstock_server.tokenizer.byte_level import PRE_TOKENIZERS, byte_level_json
from penstock_server.tokenizer.layout import AddedToken
from penstock_server.tokenizer.layout import tokenizer_json as complete
from penstock_server.tokenizer.sentencepiece_json import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    Vocabulary,
    sentencepiece_json,
    t5_json,
)
from penstock_server.weights.gguf.metadata import Metadata


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer.json` as the tokenizers library reads it. Raises ConfigError when the metadata are damaged."""
    kind = metadata.require("tokenizer.ggml.model")
    if kind not in KINDS:
        raise metadata.error(
            f"GGUF tokenizer {kind!r} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece), "
            "t5 (unigrams)"
        )
    tokens = _tokens(metadata)
    types = _types(metadata, tokens)
    if not tokens:
        raise metadata.error("the tokenizer's vocabulary is empty")
    if len(types) != len(tokens):
        raise metadata.error(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types")
    if len(set(tokens)) != len(tokens):
        raise metadata.error("the tokenizer's vocabulary contains a token twice")
    added = [
        AddedToken(token_id, token, special=type_ == CONTROL)
        for token_id, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (CONTROL, USER_DEFINED)
    ]
    prefix, suffix = (_automatic(metadata, tokens, role) for role in ("bos", "eos"))
    return complete(KINDS[kind](metadata, tokens, types), added, prefix, suffix)


def end_token_ids(metadata: Metadata) -> list[int]:
    """The tokens that end a text: those that the metadata name, and control tokens with known texts."""
    ids = {id_ for role in ("eos", "eot", "eom") if (id_ := special_token_id(metadata, role)) is not None}
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    known = {
        token: id_
        for id_, (token, type_) in enumerate(zip(tokens, _types(metadata, tokens), strict=False))
        if token in END_TOKENS and type_ == CONTROL
    }
    # In the formats with these, <|end|> ends a message, and the turn goes on.
    if known.keys() >= {"<|return|>", "<|call|>"}:
        known.pop("<|end|>", None)
    return sorted(ids | set(known.values()))


def special_token_id(metadata: Metadata, role: str) -> int | None:
    """The id of a special token. Without it, tokenizers of SentencePiece have llama.cpp's defaults."""
    key = f"tokenizer.ggml.{role}_token_id"
    # The header may have been read without the vocabulary.
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", range(0xFFFFFFFF)))
    token_id = metadata.get(key)
    if token_id is None:
        default = DEFAULT_IDS.get(metadata.get("tokenizer.ggml.model"), {}).get(role)
        return default if default is not None and default < num_tokens else None
    # COMPAT: converters of models without a token wrote -1, or the next id, which are none in llama.cpp, too.
    if token_id in (-1, 0xFFFFFFFF) or (role in ("unknown", "padding") and token_id >= num_tokens):
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise metadata.error(f"{key} is {token_id}, but the vocabulary has {num_tokens} tokens")
    return token_id


def _tokens(metadata: Metadata) -> list[str]:
    """The texts of all tokens. As in llama.cpp, one without a text has a made-up text."""
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    return [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)] if "" in tokens else tokens


def _types(metadata: Metadata, tokens: list[str]) -> list[int]:
    """The type of each token. Some files give marks of turns another type than CONTROL by mistake."""
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not END_MARKS.intersection(tokens):
        return types
    marks = [token in END_MARKS for token in tokens]
    return [CONTROL if is_mark else type_ for type_, is_mark in zip(types, marks, strict=False)] + types[len(tokens) :]


def _automatic(metadata: Metadata, tokens: list[str], role: str) -> list[AddedToken]:
    token = _token(metadata, tokens, role)
    return [token] if token is not None and _adds(metadata, role) else []


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer_config.json`: the special tokens by role and the chat template."""
    tokens = _tokens(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.require_model("context_length")),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token(metadata, tokens, key)
        if token is not None:
            config[f"{role}_token"] = token.content
    if templates := _chat_templates(metadata):
        named = [{"name": name, "template": template} for name, template in templates.items()]
        config["chat_template"] = templates["default"] if templates.keys() == {"default"} else named
    return config


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    """By name, among them `tool_use`, for conversations with tools."""
    key = "tokenizer.chat_template"
    keys = [key, *(each for each in metadata.header.metadata if each.startswith(f"{key}."))]
    given = {each.removeprefix(key).removeprefix(".") or "default": metadata.get(each) for each in keys}
    return {name: template for name, template in given.items() if template}


def _byte_level(metadata: Metadata, tokens: list[str], _types: list[int]) -> dict[str, Any]:
    pre = _pre_tokenizer_name(metadata)
    if pre == UNSPECIFIED:
        raise metadata.error(
            f"the file does not name its pre-tokenizer, and models of architecture {metadata.architecture!r} use "
            "different ones; convert the model again with a newer llama.cpp, which writes tokenizer.ggml.pre"
        )
    if pre not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise metadata.error(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {supported}")
    # A token with a character outside of the byte-level alphabet stands for itself: merges only see the alphabet, so no
    # text is encoded to it, and it decodes to its own text. Command R has such a token next to that of the same bytes.
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return byte_level_json(vocabulary, metadata.require("tokenizer.ggml.merges"), PRE_TOKENIZERS[pre])


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    vocabulary = Vocabulary(_pieces(metadata, tokens, types), "bpe", byte_fallback=BYTE in types)
    adds_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return sentencepiece_json(vocabulary, "sentencepiece" if adds_prefix else "never")


def _unigrams(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    # The normalization rules are bytes, stored as signed or unsigned numbers.
    charsmap = bytes(value & 0xFF for value in metadata.get("tokenizer.ggml.precompiled_charsmap", []))
    vocabulary = Vocabulary(
        _pieces(metadata, tokens, types),
        "unigram",
        byte_fallback=BYTE in types,
        adds_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        removes_extra_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=charsmap,
    )
    if vocabulary.unknown_id is None:
        raise metadata.error("the tokenizer has no unknown token")
    if metadata.architecture in ("t5", "t5encoder"):
        return t5_json(vocabulary)
    return sentencepiece_json(vocabulary, "sentencepiece" if vocabulary.adds_prefix else "never")


def _pieces(metadata: Metadata, tokens: list[str], types: list[int]) -> list[Piece]:
    scores: list[float] = metadata.require("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise metadata.error(f"the tokenizer has {len(tokens)} tokens but {len(scores)} scores")
    pieces = [Piece(*entry) for entry in zip(tokens, scores, types, strict=True)]
    unknown = special_token_id(metadata, "unknown")
    if unknown is not None:
        pieces[unknown] = Piece(tokens[unknown], scores[unknown], UNKNOWN)
    return pieces


# tokenizer.ggml.model → role → the id of files that do not name it
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "t5": {"eos": 1, "unknown": 2, "padding": 0}}
# tokenizer.ggml.model → builder of the parts of tokenizer.json
KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigrams}
# Tokens that end a turn whatever their type, ...
END_MARKS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<|eot|>"),
    "<｜end▁of▁sentence｜>",
}
# ... and if they are control tokens.
END_TOKENS = END_MARKS | {"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"}
# What llama.cpp writes for an unknown pre-tokenizer.
UNSPECIFIED = "default"
# For files older than `tokenizer.ggml.pre`: architectures whose models all use the same pre-tokenizer.
PRE_TOKENIZER_BY_ARCHITECTURE = {
    **{name: name for name in ("bloom", "command-r", "dbrx", "falcon", "mpt", "qwen2", "starcoder")},
    **dict.fromkeys(("gpt2", "gptj", "phi2"), "gpt-2"),
    "gptneox": "olmo",
    "starcoder2": "starcoder",
}


def _pre_tokenizer_name(metadata: Metadata) -> str:
    pre = str(metadata.get("tokenizer.ggml.pre", UNSPECIFIED))
    return PRE_TOKENIZER_BY_ARCHITECTURE.get(metadata.architecture, UNSPECIFIED) if pre == UNSPECIFIED else pre


def _adds(metadata: Metadata, role: str) -> bool:
    """Whether a BOS or EOS token is added to every text. The defaults are llama.cpp's."""
    kind = metadata.get("tokenizer.ggml.model")
    default = role == "eos" and kind == "t5"
    if role == "bos":
        pre_tokenizer = PRE_TOKENIZERS.get(_pre_tokenizer_name(metadata)) if kind == "gpt2" else None
        default = kind == "llama" or (pre_tokenizer is not None and pre_tokenizer.adds_bos)
    return bool(metadata.get(f"tokenizer.ggml.add_{role}_token", default))


def _token(metadata: Metadata, tokens: list[str], role: str) -> AddedToken | None:
    token_id = special_token_id(metadata, role)
    return None if token_id is None else AddedToken(token_id, tokens[token_id], special=True)
