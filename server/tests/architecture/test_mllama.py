"""Llama 3.2 Vision: layers that attend to images are beside those of the text, and the keys and values of images in a
pool of their own."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from cases import SIZES
from penstock_server.engine import batch
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.errors import ConfigError, ImageError
from penstock_server.models.registry import read_spec
from penstock_server.plan import Failure, Fault, Image, ImageSpan, NewSequence
from penstock_server.vision.encoded import EncodedImage
from penstock_server.vision.encoder import ImageEncoder, PlacedImage
from penstock_server.vision.states import ImageGroup, ImageKvPool
from plans import Advance, columns


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


def image(num_states: int, value: float = 0.0) -> EncodedImage:
    token = torch.zeros(1, 8)
    return EncodedImage(np.array([131], np.int32), np.arange(2), token, states=torch.full((num_states, 8), value))


def written(pool: ImageKvPool, name: bytes, num_states: int) -> ImageGroup:
    group = pool.group((name,), [image(num_states)])
    group.take_states()
    return group


def test_sequences_share_a_group_and_its_blocks_are_used_again_when_none_has_it() -> None:
    pool = ImageKvPool(4, 16)
    first = written(pool, b"a", 33)
    assert pool.group((b"a",), [image(33)]) is first
    written(pool, b"b", 16)
    with pytest.raises(ImageError, match="keys and values of 64 states, 16 fit beside those of other requests; try"):
        pool.group((b"c",), [image(64)])
    blocks = set(first.blocks)
    del first
    assert set(pool.group((b"a",), [image(33)]).blocks) == blocks, "kept while there is room"
    assert len(pool.group((b"c",), [image(64)]).blocks) == 4
    with pytest.raises(ImageError, match="keys and values of 65 states, at most 64 fit; send fewer or smaller ones"):
        pool.group((b"d",), [image(65)])


def test_a_group_that_no_step_wrote_frees_its_blocks_and_states_with_its_last_sequence() -> None:
    pool, of_group = ImageKvPool(4, 16), image(64)
    group, encoded = pool.group((b"a",), [of_group]), weakref.ref(of_group)
    del of_group
    assert encoded() is not None, "the encoder counts what is referenced"
    del group
    assert encoded() is None
    other = pool.group((b"b",), [image(64)])
    assert other.unwritten


def test_images_next_to_each_other_are_written_together_and_once() -> None:
    group = ImageKvPool(4, 16).group((b"a", b"b"), [image(20, 1.0), image(3, 2.0)])
    assert group.take_states()[:, 0].tolist() == [1.0] * 20 + [2.0] * 3
    assert not group.unwritten
    assert len(set(group.slots.tolist())) == 32


def test_a_sequence_whose_images_find_no_room_is_not_a_defect_of_the_server() -> None:
    class Full:
        def placed(self, spans: list[ImageSpan]) -> list[PlacedImage]:
            raise ImageError("no room; try again later")

    table = SequenceTable(TableLimits(200, 4, 8, 16, 2), encoder=cast(ImageEncoder, Full()))
    table.add(NewSequence(1, [131, 5], 2, images=[ImageSpan(Image(b"hash", b"data"), 0)]))
    (output,) = batch.select(table, columns([Advance(1, 2, [0])])).failures
    assert output == Failure(1, "no room; try again later", Fault.REQUEST)
    table.free(1)
    table.add(NewSequence(1, [200, 5], 2))
    assert table.failure(1).fault is Fault.SERVER
