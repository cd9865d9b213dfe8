"""fairseq tokenizers made from their SentencePiece file give the ids of the library and of transformers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import transformers
from penstock_server.errors import ConfigError
from penstock_server.tokenizer.fairseq import FAIRSEQ_FILE
from penstock_server.tokenizer.folder import with_tokenizer
from penstock_server.tokenizer.sentencepiece_file import read_sentencepiece
from penstock_server.tokenizer.sentencepiece_json import CONTROL, NORMAL, UNKNOWN
from penstock_server.tokenizer.slow import convert
from tokenizers import Tokenizer
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES as MBART_LANGUAGES
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as MBART50_LANGUAGES
from transformers.tokenization_utils_base import generate_merges

pytestmark = pytest.mark.usefixtures("model_cache")

MODELS = Path(__file__).parent / "sentencepiece"
EXPECTED: dict[str, Any] = json.loads((MODELS / "expected.json").read_text(encoding="utf-8"))
TEXTS: list[str] = EXPECTED["texts"]
NLLB_LANGUAGES = ["deu_Latn", "eng_Latn", "zho_Hans"]


def field(number: int, content: bytes) -> bytes:
    """Encodes a bytes field of a protocol buffer."""
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def folder_with(
    tmp_path: Path, source: str = "t5", *, normalizes: bool = True, model: dict[str, Any] | None = None, **config: Any
) -> Path:
    """A folder with a tiny fairseq model: its first three pieces, then a test model's, with t5's normalization."""
    vocabulary = read_sentencepiece(MODELS / f"{source}.model")
    pieces = [(text, 0.0, type_) for text, type_ in (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))]
    pieces += [(piece.text, piece.score, NORMAL) for piece in vocabulary.pieces if piece.type == NORMAL]
    content = b"".join(
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, type_]))
        for text, score, type_ in pieces
    )
    content += field(2, bytes([0x18, {"unigram": 1, "bpe": 2}[vocabulary.kind]]))
    content += field(3, field(2, read_sentencepiece(MODELS / "t5.model").charsmap if normalizes else b""))
    folder = tmp_path / "model"
    folder.mkdir(parents=True)
    (folder / FAIRSEQ_FILE).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "mbart"} if model is None else model))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def converted(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(with_tokenizer(folder, "tiny") / "tokenizer.json"))


def pieces_of(folder: Path) -> list[tuple[str, float]]:
    pieces = read_sentencepiece(folder / FAIRSEQ_FILE).pieces
    first = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    return [*first, *((piece.text, piece.score) for piece in pieces[3:])]


def compare(ours: Tokenizer, theirs: Any) -> None:
    special = " ".join(theirs.all_special_tokens)
    more = [
        "",
        "  two  spaces ",
        f"a {special} b",
        special.replace(" ", ""),
        "x<mask> y <mask>",
        "Deutsch de_DE eng_Latn",
    ]
    for text in [*TEXTS, *more]:
        ids = theirs.encode(text)
        assert ours.encode(text).ids == ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    for token, id_ in theirs.get_vocab().items():
        assert ours.token_to_id(token) == id_


def test_ids_are_one_higher_than_in_the_file(tmp_path: Path) -> None:
    """Compares with the library's ids for the same pieces in t5's file."""
    ours = converted(folder_with(tmp_path))
    for text, ids in zip(TEXTS, EXPECTED["t5"]["ids"], strict=True):
        if not set(text) & set("\t\n\r\u200b\u200d▁"):
            expected = [3 if id_ == 2 else id_ + 1 for id_ in ids]
            assert ours.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize("config", [{}, {"src_lang": None}, {"tokenizer_class": "MBartTokenizer", "src_lang": "de_DE"}])
def test_mbart_equals_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """transformers 5 drops the file's normalization rules, so the test file has none; published files have them."""
    folder = folder_with(tmp_path, normalizes=False, **config)
    added = [(language, 0.0) for language in MBART_LANGUAGES]
    theirs = transformers.MBartTokenizer([*pieces_of(folder), *added, ("<mask>", 0.0)], src_lang=config.get("src_lang"))
    ours = converted(folder)
    compare(ours, theirs)
    assert ours.encode("the dog").tokens[-2:] == ["</s>", config.get("src_lang") or "en_XX"]
    assert ours.get_vocab_size() == len(pieces_of(folder)) + 25 + 1


@pytest.mark.parametrize("in_model", [True, False])
def test_mbart_50_equals_transformers(in_model: bool, tmp_path: Path) -> None:
    """Published folders name the class in either file; their model type is that of the first mBART."""
    named = {"tokenizer_class": "MBart50Tokenizer"}
    model = {"model_type": "mbart", **(named if in_model else {})}
    folder = folder_with(tmp_path, model=model, src_lang="sl_SI", **({} if in_model else named))
    rules = read_sentencepiece(folder / FAIRSEQ_FILE).charsmap
    vocabulary = [*pieces_of(folder), *((language, 0.0) for language in MBART50_LANGUAGES), ("<mask>", 0.0)]
    ours = converted(folder)
    compare(ours, transformers.MBart50Tokenizer(vocabulary, _spm_precompiled_charsmap=rules, src_lang="sl_SI"))
    tokens = ours.encode("the dog").tokens
    assert (tokens[0], tokens[-1]) == ("sl_SI", "</s>")


def test_xlm_r_equals_transformers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, model={"model_type": "xlm-roberta"})
    rules = read_sentencepiece(folder / FAIRSEQ_FILE).charsmap
    theirs = transformers.XLMRobertaTokenizer([*pieces_of(folder), ("<mask>", 0.0)], _spm_precompiled_charsmap=rules)
    theirs.mask_token = transformers.AddedToken("<mask>", lstrip=True, normalized=True)  # as published
    compare(converted(folder), theirs)


@pytest.mark.parametrize("legacy", [True, False])
def test_nllb_equals_transformers(legacy: bool, tmp_path: Path) -> None:
    config = {"tokenizer_class": "NllbTokenizer", "src_lang": "zho_Hans", "additional_special_tokens": NLLB_LANGUAGES}
    folder = folder_with(tmp_path, "llama", legacy_behaviour=legacy, **config)
    pieces = pieces_of(folder)
    vocabulary = {text: id_ for id_, (text, _) in enumerate(pieces)}
    # transformers 5 would put the mask token before the languages; published files have it after them.
    added = {text: len(pieces) + index for index, text in enumerate([*NLLB_LANGUAGES, "<mask>"])}
    theirs = transformers.NllbTokenizer(
        {**vocabulary, **added},
        generate_merges(vocabulary),
        _spm_precompiled_charsmap=read_sentencepiece(folder / FAIRSEQ_FILE).charsmap,
        extra_special_tokens=NLLB_LANGUAGES,
        src_lang="zho_Hans",
        legacy_behaviour=legacy,
    )
    ours = converted(folder)
    compare(ours, theirs)
    tokens = ours.encode("the dog").tokens
    assert (tokens[-2:] == ["</s>", "zho_Hans"], tokens[0] == "zho_Hans") == (legacy, not legacy)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tokenizer_class": "XGLMTokenizer"},
            "class XGLMTokenizer is not supported; supported: MBart, MBart50",
        ),
        ({"src_lang": "xx_XX"}, "the source language 'xx_XX' is not among the 25 known languages"),
        ({"tokenizer_class": "NllbTokenizer"}, "the source language 'eng_Latn' is not among the 0 known languages"),
    ],
)
def test_unknown_classes_and_languages_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(folder_with(tmp_path, **config))


def test_a_vocabulary_of_another_program_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / FAIRSEQ_FILE).write_bytes((MODELS / "t5.model").read_bytes())
    with pytest.raises(ConfigError, match=r"begins with \['<pad>', '</s>', '<unk>'\]; a fairseq vocabulary begins"):
        convert(folder)
