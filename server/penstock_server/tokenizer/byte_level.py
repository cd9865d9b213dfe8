"""Byte-level BPE and its pre-tokenizers, by the names that GGUF files use.

A wrong pre-tokenizer gives plausible but different ids. The patterns are those of the published `tokenizer.json` files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Matches words with an optional leading symbol, numbers, punctuation, line ends and other whitespace. The patterns
# differ in the number of digits in a piece.
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3_PATTERN = WORDS + r"\p{N}{1,3}" + REST
QWEN2_PATTERN = WORDS + r"\p{N}" + REST
SEED_PATTERN = WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# A capital letter after lower-case letters starts a new word.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = r"[^\r\n\p{L}\p{N}]?"
CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_PATTERN = rf"{CASED}{UPPER}*{LOWER}+|{CASED}{UPPER}+{LOWER}*|\p{{N}}" + CASED_REST
GPT4O_PATTERN = (
    rf"{CASED}{UPPER}*{LOWER}+{CONTRACTIONS}?|{CASED}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}" + CASED_REST
)
# Words contain no Chinese characters.
KIMI_UPPER, KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI_PATTERN = (
    rf"[\p{{Han}}]+|{CASED}{KIMI_UPPER}*{KIMI_LOWER}+{CONTRACTIONS}?|{CASED}{KIMI_UPPER}+{KIMI_LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}" + REST
)
# Combining marks count as letters.
QWEN35_PATTERN = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
JAIS2_PATTERN = (
    WORDS
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}"
)
BAILING_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Groups of three digits, counted from the end of the number.
THOUSANDS_PATTERN = r"\d{1,3}(?=(?:\d{3})*\b)"
BLOOM_PATTERN = r" ?[^(\s|.,!?…。，、।۔،)]+"
CJK_PATTERN = "[一-龥ࠀ-一가-퟿]+"
# Letters that have a case, except mathematical ones. DeepSeek's own pattern lists them one by one.
CASED_LETTER = r"(?:(?![\x{1D400}-\x{1D7FF}])[\p{Lu}\p{Ll}\p{Lt}])"
DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Json = dict[str, Any]


def byte_level(use_regex: bool) -> Json:
    """The ByteLevel step. use_regex: whether it also splits the text by GPT-2's pattern."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split_by(*patterns: str) -> Json:
    """Splits by each pattern in turn, then maps bytes to characters."""
    return _sequence(*(_split(pattern) for pattern in patterns), byte_level(use_regex=False))


SINGLE = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is normalized and split before the merges."""

    steps: Json  # the pre_tokenizer of tokenizer.json
    nfc: bool = False
    ignore_merges: bool = False  # a word of the vocabulary becomes one token without applying merges
    adds_bos: bool = False  # the default for files that do not say whether to add a BOS token


GPT2 = PreTokenizer(byte_level(use_regex=True))
NEOX = PreTokenizer(byte_level(use_regex=True), nfc=True)
SINGLE_DIGITS = PreTokenizer(_sequence(SINGLE, byte_level(use_regex=True)))
COMMAND_R = PreTokenizer(SINGLE_DIGITS.steps, nfc=True)
CL100K = PreTokenizer(split_by(LLAMA3_PATTERN))
LLAMA3 = PreTokenizer(split_by(LLAMA3_PATTERN), ignore_merges=True, adds_bos=True)
QWEN2 = PreTokenizer(split_by(QWEN2_PATTERN), nfc=True)
SINGLE_DIGIT_WORDS = PreTokenizer(split_by(QWEN2_PATTERN))
TEKKEN = PreTokenizer(split_by(TEKKEN_PATTERN), ignore_merges=True, adds_bos=True)
GPT4O = PreTokenizer(split_by(GPT4O_PATTERN))
KIMI = PreTokenizer(split_by(KIMI_PATTERN), ignore_merges=True)
BLOOM = PreTokenizer(split_by(BLOOM_PATTERN))
VIKING = PreTokenizer(_sequence(_split(BLOOM_PATTERN), SINGLE, byte_level(use_regex=False)))
FALCON = PreTokenizer(
    _sequence(
        {"type": "Punctuation", "behavior": "Contiguous"},
        byte_level(use_regex=True),
        _split("[0-9][0-9][0-9]"),
    )
)
DEEPSEEK_LLM = PreTokenizer(
    _sequence(
        _split(r"[\r\n]"),
        _split(rf"\s?{CASED_LETTER}+"),
        _split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        _split(r"\s+$"),
        _split(CJK_PATTERN),
        SINGLE,
        byte_level(use_regex=False),
    )
)
DEEPSEEK_CODER = PreTokenizer(
    _sequence(
        _split(r"[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split(CJK_PATTERN),
        SINGLE,
        byte_level(use_regex=False),
    )
)
DEEPSEEK3 = PreTokenizer(split_by(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3_WORDS))

# By tokenizer.ggml.pre. "default" is missing on purpose: llama.cpp writes it for an unknown pre-tokenizer.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "jais", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("a.x-4.0", "exaone4", "gigachat", "mellum"), GPT2),
    **dict.fromkeys(("mpt", "olmo"), NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), SINGLE_DIGITS),
    "command-r": COMMAND_R,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), CL100K),
    "qwen2": QWEN2,
    "qwen35": PreTokenizer(split_by(QWEN35_PATTERN), nfc=True),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "grok-2"), SINGLE_DIGIT_WORDS),
    **dict.fromkeys(("kormo", "solar-open"), SINGLE_DIGIT_WORDS),
    "seed-coder": PreTokenizer(split_by(SEED_PATTERN)),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), GPT4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(split_by(THOUSANDS_PATTERN, GPT4O_PATTERN))),
    "kimi-k2": KIMI,
    "jais-2": PreTokenizer(split_by(JAIS2_PATTERN)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer(split_by(BAILING_PATTERN))),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    "viking": VIKING,
    "falcon": FALCON,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
}


def byte_spelling() -> dict[int, str]:
    """GPT-2's character for each byte: printable bytes stand for themselves, others for a character from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelling = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in spelling]
    return spelling | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_level_json(vocabulary: dict[str, int], merges: list[str] | list[list[str]], splitter: PreTokenizer) -> Json:
    """Normalizer, pre_tokenizer, decoder and model of `tokenizer.json`. Merges are pairs or "left right" strings."""
    return {
        "normalizer": {"type": "NFC"} if splitter.nfc else None,
        "pre_tokenizer": splitter.steps,
        "decoder": byte_level(use_regex=True),
        "model": bpe_model(vocabulary, merges, ignore_merges=splitter.ignore_merges),
    }


def with_prefix_space(pre_tokenizer: Json, is_added: bool = True) -> Json:
    """The same pre_tokenizer, but with or without a space added before the first word of a text."""
    if pre_tokenizer["type"] == "Sequence":
        steps = [with_prefix_space(step, is_added) for step in pre_tokenizer["pretokenizers"]]
        return {**pre_tokenizer, "pretokenizers": steps}
    return {**pre_tokenizer, "add_prefix_space": is_added} if pre_tokenizer["type"] == "ByteLevel" else pre_tokenizer


def bpe_model(vocabulary: dict[str, int], merges: list[Any], **options: Any) -> Json:
    """The BPE model of `tokenizer.json`; `options` override its defaults."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }
