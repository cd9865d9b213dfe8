"""Llama 3.2 Vision: layers that attend to images are beside those of the text, and the keys and values of images in a
pool of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import SIZES
from penstock_server.errors import ConfigError, ImageError
from penstock_server.models.registry import read_spec
from penstock_server.vision.states import StatePool


def spec_of(folder: Path, **text: Any) -> Any:
    values = {"model_type": "mllama", "image_token_index": 131, "text_config": {**SIZES, "bos_token_id": 1, **text}}
    (folder / "config.json").write_text(json.dumps(values))
    return read_spec(folder)


def test_layers_keep_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    spec, names = spec_of(tmp_path, num_hidden_layers=6)
    assert spec.num_layers == 5
    assert [place for place, _ in spec.image_layers] == [3], "the fourth attends to images"
    assert spec.max_image_states == 4 * (32 * 32 + 1)
    for layout, prefix in ((names, "language_model.model"), (names.alternatives[0], "model.language_model")):
        stored = [layout.locate(f"layers.{layer}.mlp.up.weight").name for layer in range(5)]
        assert stored == [f"{prefix}.layers.{number}.mlp.up_proj.weight" for number in (0, 1, 2, 4, 5)]
        assert layout.locate("image_layers.0.attention.q.weight").name == f"{prefix}.layers.3.cross_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cross_attention_layers": [0, 1, 2]}, "every layer attends to images"),
        ({"cross_attention_layers": [2]}, r"cross_attention_layers is \[2\]; the last layer must be another one"),
        ({"cross_attention_layers": []}, "cross_attention_layers is empty"),
        ({"cross_attention_layers": "1"}, "transformers rejects it: .*cross_attention_layers"),
    ],
)
def test_what_cannot_be_built_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(tmp_path, **values)


def states(num: int) -> list[torch.Tensor]:
    return [torch.zeros(num, 8)]


def test_sequences_share_a_run_and_its_blocks_are_used_again_when_none_has_it() -> None:
    pool = StatePool(4, 16)
    first = pool.run((b"a",), states(33))
    assert pool.run((b"a",), states(33)) is first
    pool.run((b"b",), states(16))
    with pytest.raises(ImageError, match="need 4 blocks for their keys and values, 1 of 4 are free; try again later"):
        pool.run((b"c",), states(64))
    blocks = set(first.blocks)
    del first
    assert set(pool.run((b"a",), states(33)).blocks) == blocks, "kept while there is room"
    assert len(pool.run((b"c",), states(64)).blocks) == 4
    with pytest.raises(ImageError, match="need 5 blocks"):
        pool.run((b"d",), states(65))


def test_images_next_to_each_other_are_written_together_and_once() -> None:
    run = StatePool(4, 16).run((b"a", b"b"), [torch.full((20, 8), 1.0), torch.full((3, 8), 2.0)])
    assert run.take_states()[:, 0].tolist() == [1.0] * 20 + [2.0] * 3
    assert not run.unwritten
    assert len(set(run.slots.tolist())) == 32
