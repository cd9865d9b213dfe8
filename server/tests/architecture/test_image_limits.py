"""Images that are too large, towers that fail, and callers that leave cost a request an error, and nobody else time or
memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from image_cases import file_of, make_image_model, picture
from penstock_server.errors import ImageError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.plan import Image, ImageSpan
from penstock_server.vision import encoder as encoder_module
from penstock_server.vision.encoder import ImageEncoder
from tested_device import DEVICE

# Their images have any size.
GROWING = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "llava-pixtral", "mistral3")


def image(seed: int, width: int, height: int) -> Image:
    data = file_of(picture(seed, width, height))
    return Image(hashlib.sha256(data).digest(), data)


def load(name: str, folder: Path) -> tuple[Decoder, ImageEncoder]:
    make_image_model(name, folder)
    model = load_model(LoadOptions(folder, torch.float32, DEVICE, 16), RankGroup())
    assert isinstance(model, Decoder)
    assert model.images is not None
    return model, model.images


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    return load("llava", tmp_path_factory.mktemp("llava"))[1]


@pytest.mark.parametrize("name", [*GROWING, pytest.param("phi4-multimodal", marks=pytest.mark.native)])
def test_an_image_with_more_tokens_than_a_sequence_is_refused_before_its_tower_runs(name: str, tmp_path: Path) -> None:
    model, encoder = load(name, tmp_path)
    large, other = image(1, 60, 62), image(2, 60, 62)
    (placed,) = encoder.placed([ImageSpan(large, 0)])
    num_tokens = len(placed.image.embeddings)
    model.serve_up_to(num_tokens)
    encoder.encode([other])
    model.serve_up_to(num_tokens - 1)
    encoder._tower = None  # type: ignore[assignment]
    refusal = f"image 1 has {num_tokens} tokens, at most {num_tokens - 1} are allowed in a sequence; send a smaller one"
    with pytest.raises(ImageError, match=refusal):
        encoder.encode([image(3, 60, 62)])
    encoder.close()


def test_the_longest_sequence_and_the_largest_image_bound_the_memory_for_towers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(encoder_module, "_ACTIVATIONS", 0)
    _, encoder = load("qwen2-vl", tmp_path)

    def num_bytes(num_tokens: int) -> int:
        encoder.max_tokens = num_tokens
        return encoder.max_bytes

    least = num_bytes(0)
    assert least < num_bytes(1) < num_bytes(2)
    assert num_bytes(2) - least == 2 * (num_bytes(1) - least)
    # The image processor makes at most 64 × 64 pixels, which are 16 tokens of 2 × 2 patches of 8 × 8 pixels.
    assert num_bytes(16) == num_bytes(1 << 20) > num_bytes(15)
    encoder.close()
