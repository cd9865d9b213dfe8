"""Converted tokenizers give the ids and texts of the SentencePiece library and of transformers' classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf_files import write_gguf
from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import byte_spelling
from penstock_server.tokenizer.folder import with_tokenizer
from penstock_server.tokenizer.layout import tokenizer_json
from penstock_server.tokenizer.sentencepiece_file import read_sentencepiece
from penstock_server.tokenizer.sentencepiece_json import Vocabulary, sentencepiece_json
from penstock_server.tokenizer.slow import convert
from penstock_server.weights.gguf.header import read_header
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.tokenizer import tokenizer_config
from penstock_server.weights.gguf.tokenizer import tokenizer_json as gguf_tokenizer_json
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

pytestmark = pytest.mark.usefixtures("model_cache")

MODELS = Path(__file__).parent / "sentencepiece"
EXPECTED: dict[str, Any] = json.loads((MODELS / "expected.json").read_text(encoding="utf-8"))
TEXTS: list[str] = EXPECTED["texts"]


def model_folder(tmp_path: Path, file: str, **config: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(parents=True)
    shutil.copy(MODELS / file, folder / ("spiece.model" if file.startswith("t5") else "tokenizer.model"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def converted(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(convert(folder)))


@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "unigram"])
def test_a_sentencepiece_file_gives_the_ids_and_texts_of_the_library(name: str) -> None:
    vocabulary = read_sentencepiece(MODELS / f"{name}.model")
    parts = sentencepiece_json(vocabulary, "sentencepiece" if vocabulary.adds_prefix else "never")
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(parts, [])))
    for text, ids, decoded in zip(TEXTS, EXPECTED[name]["ids"], EXPECTED[name]["decoded"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        # The library decodes unknown tokens to a special sign, and drops a leading ▁ of the text itself.
        if vocabulary.unknown_id not in ids and not text.startswith("▁"):
            assert tokenizer.decode(ids) == decoded


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_gguf_file_of_a_sentencepiece_model_gives_the_ids_and_texts_of_the_library(name: str, tmp_path: Path) -> None:
    vocabulary = read_sentencepiece(MODELS / f"{name}.model")
    tokenizer = Tokenizer.from_str(json.dumps(gguf_tokenizer_json(gguf_metadata(vocabulary, tmp_path))))
    bos = vocabulary.pieces.index(next(piece for piece in vocabulary.pieces if piece.text in ("<s>", "<bos>")))
    for text, ids, decoded in zip(TEXTS, EXPECTED[name]["ids"], EXPECTED[name]["decoded"], strict=True):
        assert tokenizer.encode(text).ids == [bos, *ids], text
        if not text.startswith("▁"):
            assert tokenizer.decode([bos, *ids]) == decoded


@pytest.mark.parametrize("name", ["t5", "unigram"])
def test_unigrams_in_a_gguf_file_give_the_ids_and_texts_of_the_library(name: str, tmp_path: Path) -> None:
    vocabulary = read_sentencepiece(MODELS / f"{name}.model")
    tokenizer = Tokenizer.from_str(json.dumps(gguf_tokenizer_json(gguf_metadata(vocabulary, tmp_path))))
    for text, ids, decoded in zip(TEXTS, EXPECTED[name]["ids"], EXPECTED[name]["decoded"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        if vocabulary.unknown_id not in ids and not text.startswith("▁"):
            assert tokenizer.decode(ids) == decoded


def test_t5_in_a_gguf_file_equals_its_transformers_class(tmp_path: Path) -> None:
    vocabulary = read_sentencepiece(MODELS / "t5.model")
    metadata = gguf_metadata(vocabulary, tmp_path, architecture="t5")
    ours = Tokenizer.from_str(json.dumps(gguf_tokenizer_json(metadata)))
    theirs = converted(model_folder(tmp_path, "t5.model", tokenizer_class="T5Tokenizer"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    assert ours.encode("the\n dog").tokens[-1] == "</s>"
    assert not tokenizer_config(metadata)["add_bos_token"]


def gguf_metadata(vocabulary: Vocabulary, folder: Path, architecture: str = "llama") -> Metadata:
    unknown = vocabulary.unknown_id
    ids = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces)}
    values = {
        "general.architecture": architecture,
        f"{architecture}.context_length": 64,
        "tokenizer.ggml.model": {"bpe": "llama", "unigram": "t5"}[vocabulary.kind],
        "tokenizer.ggml.tokens": [piece.text for piece in vocabulary.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in vocabulary.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in vocabulary.pieces],
        "tokenizer.ggml.unknown_token_id": unknown,
        "tokenizer.ggml.bos_token_id": ids.get("<s>", ids.get("<bos>")),
        "tokenizer.ggml.eos_token_id": ids.get("</s>", ids.get("<eos>")),
        "tokenizer.ggml.add_space_prefix": vocabulary.adds_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": vocabulary.removes_extra_spaces,
        "tokenizer.ggml.precompiled_charsmap": list(vocabulary.charsmap),
    }
    if not vocabulary.charsmap:
        del values["tokenizer.ggml.precompiled_charsmap"]
    path = write_gguf(folder / "tokenizer.gguf", {k: v for k, v in values.items() if v is not None}, {})
    return Metadata(read_header(path), path)


def test_a_gguf_file_without_scores_is_refused(tmp_path: Path) -> None:
    metadata = gguf_metadata(read_sentencepiece(MODELS / "llama.model"), tmp_path)
    assert tokenizer_config(metadata)["add_bos_token"]
    metadata.header.metadata["tokenizer.ggml.scores"] = [0.0]
    with pytest.raises(ConfigError, match="the tokenizer has 900 tokens but 1 scores"):
        gguf_tokenizer_json(metadata)


def test_llama_adds_bos_and_no_space_after_special_tokens(tmp_path: Path) -> None:
    tokenizer = converted(model_folder(tmp_path, "llama.model", tokenizer_class="LlamaTokenizer"))
    assert tokenizer.encode("Hello").tokens[:2] == ["<s>", "▁"]
    assert tokenizer.encode("Hello</s>you", add_special_tokens=False).tokens[-2:] == ["</s>", "you"]
    old = model_folder(tmp_path / "old", "llama.model", tokenizer_class="LlamaTokenizer", legacy=True)
    assert converted(old).encode("Hello</s>you").tokens[-2:] == ["</s>", "▁you"]


@pytest.mark.parametrize(
    ("settings", "around"),
    [({}, ("<s>", None)), ({"add_bos_token": False}, (None, None)), ({"add_eos_token": True}, ("<s>", "</s>"))],
)
def test_the_settings_switch_bos_and_eos(
    settings: dict[str, Any], around: tuple[str | None, str | None], tmp_path: Path
) -> None:
    tokens = (
        converted(model_folder(tmp_path, "llama.model", tokenizer_class="LlamaTokenizer", **settings))
        .encode("you")
        .tokens
    )
    assert (tokens[0] == "<s>", tokens[-1] == "</s>") == (around[0] is not None, around[1] is not None)


def test_added_tokens_keep_their_ids_and_are_not_split(tmp_path: Path) -> None:
    added = {"900": {"content": "<|im_start|>", "special": True}, "901": {"content": "<tool>", "special": False}}
    folder = model_folder(
        tmp_path, "llama.model", tokenizer_class="LlamaTokenizer", added_tokens_decoder=added, pad_token="[PAD]"
    )
    (folder / "added_tokens.json").write_text('{"<more>": 902}')
    tokenizer = converted(folder)
    ids = tokenizer.encode("<|im_start|>you<tool>are<more>", add_special_tokens=False).ids
    assert [id_ for id_ in ids if id_ >= 900] == [900, 901, 902]
    assert tokenizer.token_to_id("[PAD]") == 903
    assert tokenizer.decode(ids).replace(" ", "") == "you<tool>are<more>"


def test_the_model_type_replaces_a_missing_class(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "gemma.model")
    (folder / "config.json").write_text('{"model_type": "gemma2"}')
    tokenizer = converted(folder)
    assert tokenizer.encode("<start_of_turn>you").tokens == ["<bos>", "<start_of_turn>", "you"]
    for text, ids in zip(TEXTS, EXPECTED["gemma"]["ids"], strict=True):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("▁", " ")
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids


def test_t5_splits_at_whitespace_adds_eos_and_has_sentinels(tmp_path: Path) -> None:
    tokenizer = converted(model_folder(tmp_path, "t5.model", tokenizer_class="T5Tokenizer"))
    assert tokenizer.encode("the\n\tdog").ids == tokenizer.encode("the dog").ids
    assert tokenizer.encode("the dog").tokens[-1] == "</s>"
    assert tokenizer.token_to_id("<extra_id_99>") == 210
    assert tokenizer.token_to_id("<extra_id_0>") == 309
    for text, ids in zip(TEXTS, EXPECTED["t5"]["ids"], strict=True):
        if not set(text) & set("\t\n\r\u200b\u200d▁"):
            assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    no_sentinels = model_folder(tmp_path / "mt5", "t5.model", tokenizer_class="MT5Tokenizer", extra_ids=0)
    assert converted(no_sentinels).token_to_id("<extra_id_0>") is None


@pytest.mark.parametrize("model_type", ["t5", "mt5"])
def test_a_folder_with_only_a_sentencepiece_file_gives_the_ids_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Only the model type is known. Each text gets EOS, and the sentinels follow the vocabulary."""
    folder = model_folder(tmp_path, "t5.model")
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = Tokenizer.from_file(str(with_tokenizer(folder, model_type) / "tokenizer.json"))
    vocabulary = read_sentencepiece(MODELS / "t5.model")
    pieces = [(piece.text, piece.score) for piece in vocabulary.pieces]
    sentinels = [(f"<extra_id_{index}>", 0.0) for index in reversed(range(100))]
    theirs = transformers.T5Tokenizer([*pieces, *sentinels], _spm_precompiled_charsmap=vocabulary.charsmap)
    for text in [*TEXTS, "fill <extra_id_0> and <extra_id_99>.", "end</s> again"]:
        assert ours.encode(text).ids == theirs.encode(text), text
    assert ours.encode("x").tokens[-1] == "</s>"


@pytest.mark.parametrize("config", [{"tokenizer_class": "PegasusTokenizer"}, {"offset": 5}])
def test_pegasus_inserts_its_training_tokens_after_the_first_two(config: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "t5.model", **config)
    (folder / "config.json").write_text('{"model_type": "pegasus"}')
    vocabulary = read_sentencepiece(MODELS / "t5.model")
    offset = config.get("offset", 103)
    pieces = [(piece.text, piece.score) for piece in vocabulary.pieces]
    between = [("<mask_1>", 0.0), ("<mask_2>", 0.0), *((f"<unk_{index}>", -100.0) for index in range(2, offset))]
    theirs = transformers.PegasusTokenizer(
        [*pieces[:2], *between, *pieces[2:]], _spm_precompiled_charsmap=vocabulary.charsmap, offset=offset
    )
    ours = converted(folder)
    for text in [*TEXTS, "fill <mask_1> and <mask_2>.", "end</s> again", "x <unk_3>"]:
        assert ours.encode(text).ids == theirs.encode(text), text
    assert (ours.token_to_id("<mask_1>"), ours.token_to_id("<unk>")) == (2, offset + 2)
    (folder / "spiece.model").write_bytes((MODELS / "llama.model").read_bytes())
    with pytest.raises(ConfigError, match=r"begins with \['<unk>', '<s>'\]; a Pegasus vocabulary begins with"):
        convert(folder)


def bpe_files(folder: Path, special: list[str]) -> None:
    """Writes vocab.json and merges.txt, trained on the texts."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(byte_spelling().values())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))


SPECIAL = {
    "GPT2Tokenizer": ["<|endoftext|>"],
    "Qwen2Tokenizer": ["<|endoftext|>"],
    "RobertaTokenizer": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
    "BartTokenizer": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
}


@pytest.mark.parametrize("class_name", SPECIAL)
@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"additional_special_tokens": ["<|user|>"]}])
def test_byte_level_files_give_the_ids_and_texts_of_transformers(
    class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    bpe_files(folder, SPECIAL[class_name])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name, **settings}))
    compare(folder, class_name)


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False, "tokenize_chinese_chars": False}])
def test_word_pieces_give_the_ids_and_texts_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    characters = sorted({character for text in TEXTS for character in text if not character.isspace()})
    words = ["hello", "the", "quick", "##ing", "##own", "##s", "you"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *characters, *(f"##{c}" for c in characters)]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    compare(folder, "BertTokenizer")


def compare(folder: Path, class_name: str) -> None:
    ours, theirs = converted(folder), getattr(transformers, class_name).from_pretrained(folder)
    special = " ".join(theirs.all_special_tokens)
    for text in [*TEXTS, f"a {special} b", special.replace(" ", "")]:
        ids = theirs.encode(text)
        assert ours.encode(text).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_the_prepared_folder_is_complete_and_made_once(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama.model", tokenizer_class="LlamaTokenizer")
    (folder / "model.safetensors").write_bytes(b"weights")
    made = with_tokenizer(folder, "tiny")
    assert made != folder
    assert made.parent == tmp_path / "cache" / "penstock"
    assert (made / "model.safetensors").read_bytes() == b"weights"
    stamp = (made / "tokenizer.json").stat().st_mtime_ns
    assert with_tokenizer(folder, "tiny") == made
    assert (made / "tokenizer.json").stat().st_mtime_ns == stamp
    (folder / "added_tokens.json").write_text('{"<more>": 900}')
    again = with_tokenizer(folder, "tiny")
    assert again != made
    assert Tokenizer.from_file(str(again / "tokenizer.json")).token_to_id("<more>") == 900
    assert with_tokenizer(again, "tiny") == again


def test_a_folder_without_a_vocabulary_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    assert with_tokenizer(tmp_path, "tiny") == tmp_path


@pytest.mark.parametrize("content", [b"", b"not a model", (MODELS / "llama.model").read_bytes()[:-700] + b"\xff" * 9])
def test_a_damaged_sentencepiece_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.model is (damaged or )?not a SentencePiece model"):
        with_tokenizer(tmp_path, "tiny")
    assert not list((tmp_path / "cache").glob("**/tokenizer.json"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "[1]", r"vocab\.json is not a JSON object"),
        ("vocab.json", '{"a": "b"}', r"vocab\.json is not a vocabulary"),
        ("merges.txt", "#version: 0.2\na b\nc\n", r"merges\.txt is damaged: 'c' is not two tokens"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
    ],
)
def test_damaged_files_are_refused_by_name(name: str, content: str, message: str, tmp_path: Path) -> None:
    bpe_files(tmp_path, ["<|endoftext|>"])
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        with_tokenizer(tmp_path, "tiny")
