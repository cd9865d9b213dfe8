"""Llama 3.2 Vision: layers that attend to images are beside those of the text, and the keys and values of images in a
pool of their own."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from cases import SIZES
from engine_run import EngineRun
from image_cases import file_of, make_image_model, picture
from penstock_server.engine import batch
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.errors import ConfigError, ImageError
from penstock_server.models.image_layer import ImageLayer
from penstock_server.models.registry import read_spec
from penstock_server.protocol.plan import Failure, Fault, Image, ImageSpan, NewSequence, Sampling
from penstock_server.vision.encoded import EncodedImage, ImageStates
from penstock_server.vision.encoder import ImageEncoder, PlacedImage
from penstock_server.vision.states import ImageGroup, ImageKvPool
from plans import Advance, columns, plan, step


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
    states = ImageStates(torch.full((num_states, 8), value))
    return EncodedImage(np.array([131], np.int32), np.arange(2), token, states=states)


def pool_of(num_blocks: int) -> ImageKvPool:
    return ImageKvPool(num_blocks, 16, 100, 20, 8, lambda states: {0: states[:, None]})


def written(pool: ImageKvPool, name: bytes, num_states: int) -> ImageGroup:
    group = pool.add((name,), [image(num_states)])
    group.take_states()
    return group


def test_sequences_share_a_group_and_its_blocks_are_used_again_when_none_has_it() -> None:
    pool = pool_of(4)
    first = written(pool, b"a", 33)
    assert pool.find((b"a",)) is first
    assert pool.has_written(b"a")
    assert pool.num_bytes == pool.bytes_of(33) + pool.bytes_of(16) == 400
    assert pool.room_bytes == pool.room_of(33) + pool.room_of(16) == 4 * 16 * 20
    written(pool, b"b", 16)
    with pytest.raises(ImageError, match="have 64 states, but only 16 fit"):
        pool.add((b"c",), [image(64)])
    assert not pool.has_written(b"b")
    del first
    written(pool, b"a", 33)
    assert pool.find((b"a",)) is not None, "kept while there is room"
    assert len(pool.add((b"c",), [image(64)]).blocks) == 4
    assert pool.find((b"a",)) is None


def test_a_group_that_no_step_wrote_frees_its_blocks_and_states_with_its_last_sequence() -> None:
    pool, of_group = pool_of(4), image(64)
    group, encoded = pool.add((b"a",), [of_group]), weakref.ref(of_group)
    del of_group
    assert encoded() is not None, "the encoder counts what is referenced"
    del group
    assert encoded() is None
    other = pool.add((b"b",), [image(64)])
    assert other.unwritten


def test_images_next_to_each_other_are_written_together_and_once() -> None:
    group = pool_of(4).add((b"a", b"b"), [image(20, 1.0), image(3, 2.0)])
    taken = [each.states[:, 0].tolist() for each in group.take_states()]
    assert taken == [[1.0] * 20, [2.0] * 3]
    assert group.take_states() == []
    assert len(set(group.slots.tolist())) == 23


def test_steps_copy_the_keys_and_values_of_images_that_were_encoded_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_image_model("mllama", tmp_path)
    engine = EngineRun(tmp_path).engine
    encoder, blocks = engine.model.images, [0, 1, 2]
    assert encoder is not None
    assert encoder.pool is not None
    project, threads = ImageLayer.project_kv, []

    def noting(layer: ImageLayer, states: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name.partition("_")[0])
        return project(layer, states)

    monkeypatch.setattr(ImageLayer, "project_kv", noting)
    images = [Image(name.encode(), file_of(picture(1, 40, 64))) for name in "ab"]
    found = []
    for number, image in enumerate(images, 1):
        if number == 1:
            (size,) = engine.encode_images([image])
            assert encoder.pool.room_of(1) == encoder.pool.bytes_of(1), "on one rank"
            assert size.num_bytes % encoder.pool.room_of(1) == 0
            assert 0 < size.num_bytes <= encoder.room_bytes
            assert threads == ["images"] * 2, "one for each layer that attends to images"
        token_ids = [5, *size.token_ids.tolist(), 6, 7]
        new = NewSequence(number, token_ids, 4, images=[ImageSpan(image, 1)], sampling=Sampling(top_n=9))
        freed = [number - 1] if number > 1 else []
        (output,) = step(engine, plan(number, freed, [new], [Advance(number, 4, blocks, sample=True)]))
        found.append(output.tokens)
    assert threads == ["images"] * 2 + [threading.current_thread().name.partition("_")[0]] * 2, "not encoded before"
    assert found[0] == found[1], "the same bits"
    assert encoder._alive[images[0].hash].states.kv is None, "they are in the pool"
    engine.encode_images(images)
    assert len(threads) == 4, "nor are they computed again while they are there"
    states = encoder._alive[images[0].hash].states
    needed = len(states) * encoder.pool.projected_bytes
    for missing in (1, 0):
        encoder.kept_bytes = encoder._num_bytes() + needed - missing
        encoder._project(encoder.pool, states)
        assert (states.kv is None) == bool(missing), "only where there is room"
    assert sum(kv.nbytes for kv in states.kv.values()) == needed
    engine.close()


def test_a_sequence_whose_images_find_no_room_is_a_defect_of_the_server() -> None:
    class Full:
        def placed(self, spans: list[ImageSpan]) -> list[PlacedImage]:
            raise ImageError("no room")

    table = SequenceTable(TableLimits(200, 4, 8, 16, 2), encoder=cast(ImageEncoder, Full()))
    table.add(NewSequence(1, [131, 5], 2, images=[ImageSpan(Image(b"hash", b"data"), 0)]))
    (output,) = batch.select(table, columns([Advance(1, 2, [0])])).failures
    assert output == Failure(1, "no room", Fault.SERVER), "the scheduler keeps it for them"
