"""GGUF metadata → `tokenizer.json` and `tokenizer_config.json`. Imports no torch and no tokenizers.

Byte-level BPE only ("gpt2" in GGUF's words); other kinds are refused by name. Which pre-tokenizer a model was trained
with is said by `tokenizer.ggml.pre`: a wrong one gives plausible but different ids, so an unknown one is refused.
"""

from __future__ import annotations

from typing import Any

from penstock_server.weights.gguf_metadata import Metadata

# tokenizer.ggml.token_type
CONTROL, USER_DEFINED = 3, 4

# Words with one leading character that is no letter, numbers, punctuation, line ends, other whitespace. The patterns
# differ in how many digits make a piece.
WORD_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST_PATTERN = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = WORD_PATTERN + r"\p{N}{1,3}" + REST_PATTERN
QWEN2_PATTERN = WORD_PATTERN + r"\p{N}" + REST_PATTERN


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [first, second]}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


GPT2 = _byte_level(use_regex=True)
SINGLE_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
LLAMA3 = _sequence(_split(LLAMA3_PATTERN), _byte_level(use_regex=False))
QWEN2 = _sequence(_split(QWEN2_PATTERN), _byte_level(use_regex=False))

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "gpt2": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
}
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer.json` as the tokenizers library reads it."""
    kind = metadata.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise metadata.refuse(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2 (byte-level BPE)")
    pre = _pre_tokenizer_name(metadata)
    if pre not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise metadata.refuse(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {supported}")
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not tokens:
        raise metadata.refuse("the tokenizer's vocabulary is empty")
    if len(types) != len(tokens):
        raise metadata.refuse(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types")
    spelling = byte_spelling()
    alphabet = set(spelling.values())
    added = []
    vocabulary = {}
    for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type in (CONTROL, USER_DEFINED):
            added.append(_added_token(token_id, token, special=token_type == CONTROL))
        elif not alphabet.issuperset(token):
            token = "".join(spelling[byte] for byte in token.encode())
        vocabulary[token] = token_id
    if len(vocabulary) != len(tokens):
        raise metadata.refuse("the tokenizer's vocabulary holds a token twice")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3 takes a whole word that is in the vocabulary without asking the merges.
            "ignore_merges": pre in LLAMA3_NAMES,
            "vocab": vocabulary,
            "merges": metadata.require("tokenizer.ggml.merges"),
        },
    }


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer_config.json`: the special tokens by role, and the chat template."""
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(metadata),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.require_model("context_length")),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token_of(metadata, tokens, f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{role}_token"] = token
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def byte_spelling() -> dict[int, str]:
    """GPT-2's spelling of each byte as a printable character: itself where it is one, else a letter from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelling = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelling]
    return spelling | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _pre_tokenizer_name(metadata: Metadata) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _adds_bos(metadata: Metadata) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_bos_token", _pre_tokenizer_name(metadata) in LLAMA3_NAMES))


def _added_token(token_id: int, content: str, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _token_of(metadata: Metadata, tokens: list[str], key: str) -> str | None:
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise metadata.refuse(f"{key} is {token_id}, but the vocabulary has {len(tokens)} tokens")
    return tokens[token_id]


def _post_processor(metadata: Metadata, tokens: list[str]) -> dict[str, Any] | None:
    """Puts the begin token before and the end token behind every text, where the model wants them."""
    bos = _token_of(metadata, tokens, "tokenizer.ggml.bos_token_id") if _adds_bos(metadata) else None
    eos = None
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = _token_of(metadata, tokens, "tokenizer.ggml.eos_token_id")
    if bos is None and eos is None:
        return None

    def around(*names: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, name in enumerate(names):
            if bos is not None:
                pieces.append({"SpecialToken": {"id": bos, "type_id": type_id}})
            pieces.append({"Sequence": {"id": name, "type_id": type_id}})
            if eos is not None:
                pieces.append({"SpecialToken": {"id": eos, "type_id": type_id}})
        return pieces

    special = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        for token in (bos, eos)
        if token is not None
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": special,
    }
