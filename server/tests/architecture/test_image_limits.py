"""What fails a request with images, and nothing else: an image that is too large, an error of the tower, a caller that
has left."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_cases import file_of, make_image_model, picture
from penstock_server.errors import ImageError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Image, ImageSpan
from penstock_server.vision import encoder as encoder_module
from penstock_server.vision.encoder import ImageEncoder
from tested_device import DEVICE

# Their images have any size, or many tiles.
GROWING = ("lfm2-vl", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "llava-pixtral", "mistral3")


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


ERRORS: dict[str, tuple[Exception, str]] = {
    "full memory": (torch.OutOfMemoryError("CUDA out of memory"), "needs more memory than is free; send a smaller one"),
    "shape": (RuntimeError("shapes do not fit\nat line 3"), "cannot be encoded: shapes do not fit"),
    "value": (ValueError("no such size"), "cannot be encoded: no such size"),
}


def failing(error: Exception) -> Callable[..., torch.Tensor]:
    def tower(arrays: Any) -> torch.Tensor:
        raise error

    return tower


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_the_tower_is_the_error_of_its_image(
    name: str, llava: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, message = ERRORS[name]
    good, bad = image(1, 32, 32), image(20 + list(ERRORS).index(name), 32, 32)  # a new one in each test
    llava.encode([good])
    monkeypatch.setattr(llava, "_tower", failing(error))
    with pytest.raises(ImageError) as caught:
        llava.encode([good, bad])
    assert str(caught.value) == f"image 2 {message}"
    # In a step, one rank alone may lack memory, and ranks must agree on their sequences.
    with pytest.raises(ImageError if name == "value" else RuntimeError):
        llava.placed([ImageSpan(bad, 0)])
    monkeypatch.undo()
    assert len(llava.encode([bad])) == 1


def test_an_error_of_the_device_is_not_one_of_the_image(llava: ImageEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llava, "_tower", failing(torch.AcceleratorError("CUDA error: an illegal memory access")))
    with pytest.raises(torch.AcceleratorError):
        llava.encode([image(5, 32, 32)])


def test_a_tower_with_other_embeddings_than_tokens_is_the_error_of_the_image(
    llava: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand = llava.family.expand
    one_more = replace(llava.family, expand=lambda token, count, arrays: expand(token, count + 1, arrays))
    monkeypatch.setattr(llava, "family", one_more)
    with pytest.raises(ImageError, match=r"image 1 became 16 embeddings for 17 tokens"):
        llava.encode([image(6, 32, 32)])


def test_images_that_no_caller_awaits_are_not_encoded(llava: ImageEncoder) -> None:
    images = [image(seed, 32, 32) for seed in (7, 8, 9)]
    answers = iter([True, False])
    with pytest.raises(ImageError, match="image 2 is not awaited any more"):
        llava.encode(images, lambda: next(answers))
    assert [each.hash in llava._alive for each in images] == [True, False, False]
