"""A folder whose tokenizer.json lacks tokens or settings gives the ids of AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from penstock_server.errors import ConfigError
from penstock_server.tokenizer import completion
from penstock_server.tokenizer.byte_level import QWEN2, byte_spelling, with_prefix_space
from penstock_server.tokenizer.folder import with_tokenizer
from tokenizers import Tokenizer

pytestmark = pytest.mark.usefixtures("model_cache")

Json = dict[str, Any]
START, END, TOOL = "<|im_start|>", "<|im_end|>", "<tool>"
WORDS = ["fox", "Ġfox", "hello"]
TEXTS = [
    f"{START}user\nhi{END}",
    f"a {TOOL} b{TOOL}. [X]x",
    "<s>hello</s> hello fox",
    "foxfox fox.",
    " ÄÖ äö",
    "<|endoftext|><unk>a",
]


def flags(**given: bool) -> dict[str, bool]:
    return {**dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), "special": True, **given}


def added(*texts: str, first: int = 262, **given: bool) -> Json:
    return {str(first + index): {"content": text, **flags(**given)} for index, text in enumerate(texts)}


def tokenizer_file(**changes: Any) -> Json:
    vocabulary = {text: id_ for id_, text in enumerate(["<unk>", "<s>", "</s>", *sorted(byte_spelling().values())])}
    vocabulary |= {text: len(vocabulary) + index for index, text in enumerate(WORDS)}
    merges = [["f", "o"], ["fo", "x"], ["Ġ", "fox"], ["h", "e"], ["he", "l"], ["hel", "l"], ["hell", "o"]]
    vocabulary |= {
        "".join(pair): len(vocabulary) + n for n, pair in enumerate(merges) if "".join(pair) not in vocabulary
    }
    return {
        "version": "1.0",
        "added_tokens": [{"id": id_, "content": text, **flags()} for id_, text in enumerate(["<unk>", "<s>", "</s>"])],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        **changes,
    }


def model_folder(folder: Path, files: dict[str, Json], **changes: Any) -> Path:
    folder.mkdir()
    config = {"model_type": "llama"}
    for name, content in {"config": config, "tokenizer": tokenizer_file(**changes), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


NEXT = len(tokenizer_file()["model"]["vocab"])
FILES: dict[str, dict[str, Json]] = {
    "added_tokens_decoder": {
        "tokenizer_config": {"eos_token": END, "added_tokens_decoder": added(START, END, first=NEXT)}
    },
    "strips and words": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                **added(START, first=NEXT, lstrip=True, rstrip=True),
                **added(TOOL, first=NEXT + 1, single_word=True, special=False),
                **added("ÄÖ", first=NEXT + 2, normalized=True, special=False),
            }
        }
    },
    "flags that contradict tokenizer.json": {
        "tokenizer_config": {"added_tokens_decoder": added("<unk>", "<s>", "</s>", first=0, lstrip=True, rstrip=True)}
    },
    "ids with gaps": {
        "tokenizer_config": {"added_tokens_decoder": {**added(END, first=900), **added(START, first=700)}}
    },
    "a word of the vocabulary as EOS": {"tokenizer_config": {"eos_token": "fox", "added_tokens_decoder": {}}},
    "additional_special_tokens": {
        "tokenizer_config": {"additional_special_tokens": [START, {"__type": "AddedToken", "content": TOOL, **flags()}]}
    },
    "a list of extra_special_tokens": {
        "tokenizer_config": {"extra_special_tokens": [START, END], "additional_special_tokens": [TOOL]}
    },
    "named extra_special_tokens": {
        "tokenizer_config": {"extra_special_tokens": {"tool_token": TOOL}, "image_token": "[X]", "eos_token": END}
    },
    "added_tokens.json": {"tokenizer_config": {"eos_token": END}, "added_tokens": {END: NEXT + 1, TOOL: NEXT}},
    "special_tokens_map.json": {
        "tokenizer_config": {"eos_token": "</s>"},
        "special_tokens_map": {
            "eos_token": {"content": END, **flags(rstrip=True)},
            "additional_special_tokens": [START],
        },
    },
    "a newer and an older file": {
        "tokenizer_config": {"eos_token": END, "added_tokens_decoder": added(END, first=NEXT)},
        "special_tokens_map": {"eos_token": "<s>", "additional_special_tokens": [START]},
        "added_tokens": {TOOL: NEXT + 1},
    },
    "without tokenizer_config.json": {"special_tokens_map": {"eos_token": END}, "added_tokens": {START: NEXT}},
    "Llama": {
        "tokenizer_config": {
            "tokenizer_class": "LlamaTokenizerFast",
            "add_eos_token": True,
            "legacy": False,
            "bos_token": START,
        }
    },
    "GPT-2 with a space": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "pad_token": END}
    },
    "a space without a class": {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}
    },
}


@pytest.mark.parametrize("name", FILES)
def test_the_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    compare(model_folder(tmp_path / "model", FILES[name]))


@pytest.mark.parametrize("given", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2TokenizerFast"])
def test_the_config_decides_about_the_space_before_a_text(
    class_name: str, given: Json, stored: bool, tmp_path: Path
) -> None:
    splitter = QWEN2.steps if "Qwen2" in class_name else tokenizer_file()["pre_tokenizer"]
    changes = {"pre_tokenizer": with_prefix_space(splitter, stored)}
    config = {"tokenizer_class": class_name, "unk_token": "<unk>", "eos_token": END, **given}
    compare(model_folder(tmp_path / "model", {"tokenizer_config": {**config, "pad_token": START}}, **changes))


def compare(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    made = with_tokenizer(folder, "tiny")
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert len(theirs) == ours.get_vocab_size()
    assert with_tokenizer(made, "tiny") == made
    if theirs.eos_token is not None:
        config = json.loads((made / "tokenizer_config.json").read_text())
        eos = config.get("eos_token", "<|endoftext|>")
        assert (eos["content"] if isinstance(eos, dict) else eos) == theirs.eos_token


def test_a_complete_folder_is_used_in_place_without_reading_its_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [{"id": NEXT, "content": END, **flags()}]
    config = {"eos_token": END, "added_tokens_decoder": added(END, first=NEXT), "additional_special_tokens": [END]}
    tokens = {"added_tokens": [*tokenizer_file()["added_tokens"], *more]}
    folder = model_folder(tmp_path / "model", {"tokenizer_config": config}, **tokens)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("the rest of the file is not read")
    monkeypatch.setattr(completion, "HEAD_BYTES", 4096)
    assert with_tokenizer(folder, "tiny") == folder
    # A file whose members have another order is read as a whole.
    content = tokenizer_file(**tokens)
    (folder / "tokenizer.json").write_text(json.dumps({"model": content.pop("model"), **content}))
    assert with_tokenizer(folder, "tiny") == folder


def test_a_token_without_a_text_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", {"tokenizer_config": {"additional_special_tokens": [{"special": True}]}})
    with pytest.raises(ConfigError, match=r'tokenizer_config.json is damaged: {"special": true} is not a token'):
        with_tokenizer(folder, "tiny")
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"first": {"content": "a"}}}')
    with pytest.raises(ConfigError, match=r"added tokens of tokenizer_config.json .* are damaged: .*'first'"):
        with_tokenizer(folder, "tiny")
