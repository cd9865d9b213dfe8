"""Images in models that keep a state between tokens: rows of an image have the same bits however a prompt is cut, after
going back into the image, and from a snapshot inside of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_cases import make_image_model
from model_driver import ModelDriver
from penstock_server.device.state import CHUNK_TOKENS
from test_images import IMAGES, Made, Prompt, driven, text
from test_states import advance

pytestmark = pytest.mark.native

BEFORE = 12  # tokens in front of the image, in which the first chunk ends


@pytest.mark.parametrize("name", ["lfm2-vl", "qwen3.5"])
def test_states_of_images_have_the_same_bits(name: str, tmp_path: Path) -> None:
    model, encoder = Made(name, make_image_model(name, tmp_path), tmp_path).load(dtype=torch.bfloat16)
    (image,) = encoder.encode(IMAGES[1:2])
    prompt = Prompt([*text(1, BEFORE), *image.token_ids.tolist(), *text(2, 40)], [1], [BEFORE])
    length, end = len(prompt.token_ids), BEFORE + len(image.token_ids)
    assert BEFORE < CHUNK_TOKENS < end
    driver = ModelDriver(model, CHUNK_TOKENS)
    first = driven(driver, encoder, prompt)
    whole = advance(driver, first, length, length)
    for chunk in (1, 7, CHUNK_TOKENS):
        sequence = driven(driver, encoder, prompt)
        assert torch.equal(advance(driver, sequence, length, chunk), whole), chunk
        driver.free(sequence)
    for back_to in (BEFORE - 1, BEFORE, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, end):
        sequence = driven(driver, encoder, prompt)
        advance(driver, sequence, back_to + 5, length)
        sequence.num_computed = back_to
        assert torch.equal(advance(driver, sequence, length - back_to, 7), whole[back_to:]), back_to
        driver.free(sequence)
    assert model.states is not None
    sequence = driven(driver, encoder, prompt)
    advance(driver, sequence, CHUNK_TOKENS + 3, length)
    model.states.save(sequence.slot, CHUNK_TOKENS, 1)
    second = driven(driver, encoder, prompt)
    second.blocks, second.num_computed = sequence.blocks[:1], CHUNK_TOKENS
    model.states.restore(1, second.slot, CHUNK_TOKENS)
    assert torch.equal(advance(driver, second, length - CHUNK_TOKENS, 7), whole[CHUNK_TOKENS:])
    encoder.close()
