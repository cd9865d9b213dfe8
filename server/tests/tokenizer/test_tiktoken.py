"""Converted tiktoken rank files and tekken.json give the ids and texts of the tiktoken library."""

from __future__ import annotations

import base64
import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import byte_spelling
from penstock_server.tokenizer.folder import with_tokenizer
from penstock_server.tokenizer.slow import convert
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers.integrations.mistral.tokenizer import MistralConverter

pytestmark = pytest.mark.usefixtures("model_cache")

EXPECTED = Path(__file__).parent / "sentencepiece" / "expected.json"
TEXTS: list[str] = json.loads(EXPECTED.read_text(encoding="utf-8"))["texts"]
# The patterns in the publishers' code.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + END
QWEN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + END
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    rf"{CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}|" + END
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def ranks() -> dict[bytes, int]:
    """A vocabulary of single bytes and of merges trained on the texts."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(byte_spelling().values())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    by_character = {character: byte for byte, character in byte_spelling().items()}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {bytes(by_character[character] for character in token): rank for token, rank in vocabulary}


def rank_file(path: Path, lines: dict[bytes, int] | None = None) -> None:
    found = ranks() if lines is None else lines
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in found.items()))


def model_folder(folder: Path, file: str, model_type: str = "", **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rank_file(folder / file)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def compare(folder: Path, pattern: str, special: dict[str, int], nfc: bool = False) -> Tokenizer:
    """Compares our ids, without added BOS and EOS tokens, with tiktoken's."""
    ours = Tokenizer.from_str(json.dumps(convert(folder)))
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=special)
    for text in [*TEXTS, "a".join(special), "".join(special) + " 12345 don't DON'T"]:
        normal = unicodedata.normalize("NFC", text) if nfc else text
        ids = theirs.encode(normal, allowed_special="all")
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    return ours


def test_qwen(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "qwen.tiktoken", tokenizer_class="QWenTokenizer")
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_1|>")
    tokenizer = compare(folder, QWEN, {name: len(ranks()) + index for index, name in enumerate(names)}, nfc=True)
    assert tokenizer.token_to_id("<|extra_204|>") == len(ranks()) + 207
    assert tokenizer.encode("you").ids == tokenizer.encode("you", add_special_tokens=False).ids


def test_kimi(tmp_path: Path) -> None:
    first = len(ranks())
    added = {str(first): {"content": "[BOS]", "special": True}, str(first + 2): {"content": "<|im_end|>"}}
    settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    folder = model_folder(tmp_path / "m", "tiktoken.model", "deepseek_v3", **settings)
    special = {"[BOS]": first, f"<|reserved_token_{first + 1}|>": first + 1, "<|im_end|>": first + 2}
    tokenizer = compare(folder, KIMI, special)
    assert tokenizer.token_to_id(f"<|reserved_token_{first + 255}|>") == first + 255
    assert tokenizer.get_vocab_size() == first + 256


def test_llama(tmp_path: Path) -> None:
    first = len(ranks())
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    added = {str(first + index): {"content": name, "special": True} for index, name in enumerate(names)}
    settings = {"bos_token": names[0], "added_tokens_decoder": added}
    folder = model_folder(tmp_path / "m", "tokenizer.model", "llama", **settings)
    tokenizer = compare(folder, LLAMA3, {name: first + index for index, name in enumerate(names)})
    assert tokenizer.encode("you").tokens[0] == names[0]
    assert tokenizer.get_vocab_size() == first + 3


def test_the_prepared_folder_has_the_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "qwen.tiktoken", "qwen")
    assert "<|im_start|>" in (with_tokenizer(folder, "x") / "tokenizer.json").read_text()


def tekken_file(folder: Path, special: list[str] | None, num_special: int = 24, num_ranks: int = 600) -> Path:
    """Writes a tekken.json with more ranks than the model uses, as published files have."""
    values: dict[str, Any] = {
        "config": {
            "pattern": TEKKEN,
            "default_vocab_size": num_ranks + num_special,
            "default_num_special_tokens": num_special,
            "num_vocab_tokens": len(ranks()),
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in ranks().items()
        ],
    }
    if special is not None:
        listed = enumerate(special)
        values["special_tokens"] = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in listed]
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(values))
    return folder


def test_tekken(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    folder = tekken_file(tmp_path / "m", special)
    ours = Tokenizer.from_str(json.dumps(convert(folder)))
    used = {token: rank for token, rank in ranks().items() if rank < 600}
    theirs = tiktoken.Encoding("x", pat_str=TEKKEN, mergeable_ranks=used, special_tokens={})
    mistral = MistralConverter(str(folder / "tekken.json")).converted()
    for text in TEXTS:
        ids = [24 + id_ for id_ in theirs.encode(text)]
        assert ours.encode(text).ids == [1, *ids], text
        assert ours.decode([1, *ids]) == text
        with_special = f"[INST]{text}[/INST]</s><SPECIAL_23>"
        assert ours.encode(with_special, add_special_tokens=False).ids == mistral.encode(with_special).ids
    assert ours.encode("[INST]<SPECIAL_23>").ids == [1, 3, 23]
    assert ours.get_vocab_size() == mistral.get_vocab_size() == 624


def test_old_tekken_files_without_a_list_of_special_tokens_are_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(convert(tekken_file(tmp_path / "m", None))))
    assert tokenizer.encode("[INST][TOOL_CONTENT]<SPECIAL_20>").ids == [1, 3, 19, 20]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "qwen.tiktoken",
            "IQ== 0\nIg== x\n",
            r"qwen\.tiktoken is damaged: line 2, 'Ig== x', is not a token and a rank",
        ),
        ("qwen.tiktoken", "IQ== 0\nI!== 1\n", "line 2, 'I!== 1', is not a token and a rank"),
        ("qwen.tiktoken", "IQ== 0\n", "255 bytes have no token, for example 0x00"),
        ("tekken.json", "{", r"tekken\.json is not valid JSON"),
        ("tekken.json", '{"config": {}}', r"tekken\.json is not a tekken vocabulary: KeyError 'pattern'"),
    ],
)
def test_damaged_files_are_refused(file: str, content: str, message: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "other.tiktoken", "qwen")
    (folder / "other.tiktoken").unlink()
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        with_tokenizer(folder, "x")


@pytest.mark.parametrize(
    ("special", "num_special", "message"),
    [(["<unk>", "<s>"], 1, "lists 2 special tokens but reserves 1 ids"), (["<unk>"], 24, "has no token <s>")],
)
def test_a_tekken_file_without_its_special_tokens_is_refused(
    special: list[str], num_special: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(tekken_file(tmp_path / "m", special, num_special))


def test_an_unknown_class_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "tokenizer.model", "chatglm", tokenizer_class="ChatGLM4Tokenizer")
    with pytest.raises(ConfigError, match="split pattern of ChatGLM4Tokenizer is not known; known: QWenTokenizer, "):
        convert(folder)


def test_ranks_without_special_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no special tokens, and tokenizer_config\.json has no"):
        convert(model_folder(tmp_path / "m", "tokenizer.model", "llama"))


def test_two_tokens_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "qwen.tiktoken", "qwen")
    rank_file(folder / "qwen.tiktoken", {**ranks(), b"\xff\xff\xff": 3})
    with pytest.raises(ConfigError, match="two tokens have the same rank"):
        convert(folder)
