"""The model of images.py, and its figures."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from figure import BENCHMARKS
from images import ENCODED, NUM_IMAGES, TEXT, VISION, chat, make_model, picture
from penstock_server.vision.reader import ImageReader
from tokenizers import Tokenizer, models

SMALL_TEXT = {**TEXT, "vocab_size": 128, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL_VISION = {**VISION, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 64}


def test_a_picture_is_cut_into_tiles_of_the_towers_size(tmp_path: Path) -> None:
    text_folder, folder = tmp_path / "text", tmp_path / "model"
    text_folder.mkdir()
    folder.mkdir()
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(text_folder / "tokenizer.json"))
    (text_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    make_model(folder, text_folder, 128, SMALL_TEXT, SMALL_VISION)
    config = json.loads((folder / "config.json").read_text())
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert config["image_token_id"] == tokens.token_to_id("<image>")
    reader = ImageReader(folder, {"return_row_col_info": True})
    arrays = reader.read(base64.b64decode(picture("a").partition(",")[2]))
    reader.close()
    assert arrays["pixel_values"].shape == (1, 5, 3, 64, 64), "two rows, two columns, and all of it"
    assert picture("a") != picture("b")
    assert [part["type"] for part in chat([picture("a")], "What?", 1)["messages"][0]["content"]] == [
        "image_url",
        "text",
    ]


def test_the_log_says_what_encoding_took() -> None:
    line = "INFO encoded an image of 1200 bytes into 320 tokens: read in 0.012 s, encoded in 1.500 s"
    assert ENCODED.findall(line) == [("320", "0.012", "1.500")]


def test_gaps_are_relative_to_those_without_images_in_the_same_repeat() -> None:
    def repeat(without: int, encoding: int, chats: int, different: int) -> dict[str, object]:
        gaps = {"without": without, "encoding": encoding, "chats": chats}
        return {
            "ttft_s": {str(num): {"fresh": 2.0, "again": 0.5} for num in NUM_IMAGES},
            "encoded": [{"encode_s": 1.0}, {"encode_s": 3.0}, {"encode_s": 1.5}],
            "num_different": different,
            "num_asked": 9,
            "loads": {name: {"gaps_us": [gap * 1000]} for name, gap in gaps.items()},
        }

    record = {"repeats": [repeat(10, 15, 20, 0), repeat(20, 30, 30, 1)]}
    values = {figure.name: figure.values for figure in BENCHMARKS["images"](record)}
    assert values["encoding an image, nothing else running"] == [1.5, 1.5]
    assert values["TTFT with 4 images, sent before"] == [0.5, 0.5]
    assert values["the same, to without images (encoding)"] == pytest.approx([1.5, 1.5])
    assert values["the same, to without images (chats)"] == pytest.approx([2.0, 1.5])
    assert values["answers in a batch that differ from those alone, of 18"] == [0.0, 1.0]
