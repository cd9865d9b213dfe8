"""Converts slow tokenizers, published as a vocabulary and a transformers class, to `tokenizer.json`.

The behaviour of known classes is data: how a text is split, and which tokens are added around it. An unknown class gets
the default behaviour of its file format. Only tiktoken files need a known class, because they lack the split pattern.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import byte_level_json, with_prefix_space
from penstock_server.tokenizer.fairseq import FAIRSEQ_FILE, fairseq_json
from penstock_server.tokenizer.pegasus import pegasus_json
from penstock_server.tokenizer.sentencepiece_file import read_sentencepiece
from penstock_server.tokenizer.sentencepiece_json import Vocabulary, sentencepiece_json, t5_json, whole_tokens
from penstock_server.tokenizer.settings import PEGASUS, T5, Settings, read_object, read_text
from penstock_server.tokenizer.tekken import TEKKEN_FILE, tekken_json
from penstock_server.tokenizer.tiktoken import is_rank_file, tiktoken_json

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")


def vocabulary_files(folder: Path) -> tuple[Path, ...]:
    """The files of the folder's slow tokenizer; empty when none can be converted."""
    if (folder / TEKKEN_FILE).is_file():
        return (folder / TEKKEN_FILE,)
    models = [folder / name for name in (*SENTENCEPIECE_FILES, FAIRSEQ_FILE)]
    for path in (*models, folder / "tiktoken.model", *sorted(folder.glob("*.tiktoken"))):
        if path.is_file():
            return (path,)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return (folder / "vocab.json", folder / "merges.txt")
    return (folder / "vocab.txt",) if (folder / "vocab.txt").is_file() else ()


def convert(folder: Path) -> dict[str, Any]:
    """Builds `tokenizer.json` for a folder with vocabulary files. Raises ConfigError when a file is damaged."""
    files, settings = vocabulary_files(folder), Settings.read(folder)
    if files[0].name == TEKKEN_FILE:
        return tekken_json(files[0])
    if files[0].name == FAIRSEQ_FILE:
        return fairseq_json(files[0], settings)
    if is_rank_file(files[0]):
        return tiktoken_json(files[0], settings)
    if files[0].name in SENTENCEPIECE_FILES:
        return _sentencepiece(read_sentencepiece(files[0]), settings)
    if files[0].name == "vocab.json":
        return _byte_level(files[0], files[1], settings)
    return _word_piece(files[0], settings)


def _sentencepiece(vocabulary: Vocabulary, settings: Settings) -> dict[str, Any]:
    ids = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces)}
    whole = whole_tokens(vocabulary)
    if settings.style is T5:
        num_extra = int(settings.values.get("extra_ids", settings.style.extra_ids))
        sentinels = [f"<extra_id_{index}>" for index in reversed(range(num_extra))]
        return settings.complete(t5_json(vocabulary), ids, whole, sentinels)
    if settings.style is PEGASUS:
        return pegasus_json(vocabulary, settings)
    if not vocabulary.adds_prefix or settings.values.get("add_prefix_space") is False:
        parts = sentencepiece_json(vocabulary, "never")
    elif not settings.is_known:
        parts = sentencepiece_json(vocabulary, "sentencepiece")
    else:
        # COMPAT: transformers adds a space to the text after a special token only in legacy mode.
        parts = sentencepiece_json(vocabulary, "always" if settings.values.get("legacy", False) else "first")
    return settings.complete(parts, ids, whole)


def _byte_level(vocabulary_path: Path, merges_path: Path, settings: Settings) -> dict[str, Any]:
    ids = read_object(vocabulary_path)
    if not ids or not all(isinstance(id_, int) for id_ in ids.values()):
        raise ConfigError(f"{vocabulary_path} is not a vocabulary: it must map each token to its id")
    lines = read_text(merges_path).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    broken = next((line for line in merges if line.count(" ") != 1), None)
    if broken is not None:
        raise ConfigError(f"{merges_path} is damaged: {broken!r} is not two tokens separated by a space")
    parts = byte_level_json(ids, merges, settings.style.pre_tokenizer)
    if settings.values.get("add_prefix_space", False):
        parts["pre_tokenizer"] = with_prefix_space(parts["pre_tokenizer"])
    return settings.complete(parts, ids, [])


def _word_piece(path: Path, settings: Settings) -> dict[str, Any]:
    ids = {token: id_ for id_, token in enumerate(read_text(path).rstrip("\n").split("\n"))}
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
