"""How images are encoded on a GPU beside the steps, without a GPU: on which device and on which stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from current_device import CurrentDevice
from image_cases import file_of, make_image_model, picture
from penstock_server.plan import Image
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.vision.family import FAMILIES, Arrays
from torch import Tensor

GPU = torch.device("cuda", 1)
IMAGES = [Image(bytes([number]), file_of(picture(number, 32, 32))) for number in (1, 2)]
NUM_TOKENS = 16  # of each of them


class FakeTower:
    """Says that it is on a GPU, and calls `on_run` instead of computing."""

    device = GPU
    computed_in = torch.float32
    num_bytes = 0

    def __init__(self, on_run: Callable[[], None]) -> None:
        self._on_run = on_run

    def __call__(self, arrays: Arrays) -> Tensor:
        self._on_run()
        return torch.zeros(NUM_TOKENS, 8)


def make_encoder(folder: Path, on_run: Callable[[], None]) -> ImageEncoder:
    make_image_model("llava", folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    return ImageEncoder(folder, config, FAMILIES["llava"], FakeTower(on_run))  # type: ignore[arg-type]


def test_images_are_encoded_on_the_gpu_of_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = CurrentDevice.patched(monkeypatch)
    found = []
    encoder = make_encoder(tmp_path, lambda: found.append(current.device))
    encoder.encode(IMAGES)
    encoder.close()
    assert found == [GPU] * 2
    assert current.device == torch.device("cuda", 0), "the caller's"
