"""Phi-4-multimodal's image processor against results of transformers' own, which needs torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from image_cases import picture
from penstock_server.errors import ConfigError, ImageError
from penstock_server.vision.crops import CropProcessor
from PIL import Image

# From transformers 5.23 with torchvision 0.29.2, for crops of 32 × 32 pixels in patches of 8 × 8, at most six: the
# and height of `picture(1, …)`; columns and rows of its grid, the patches with a part of the image, and the means of
# the pixel values of the whole image and of the grid.
RESULTS = [
    (32, 32, (1, 1), 32, -0.009, -0.009),
    (1, 1, (1, 1), 32, 0.352, 0.352),
    (33, 32, (2, 1), 36, 0.48, 0.48),
    (64, 64, (2, 2), 80, 0.009, 0.009),
    (90, 30, (3, 1), 64, -0.007, 0.007),
    (30, 90, (1, 3), 64, 0.013, 0.007),
    (40, 64, (2, 2), 56, 0.379, 0.379),
    (97, 65, (3, 2), 112, 0.001, 0.018),
    (150, 140, (2, 2), 80, 0.083, 0.083),
    (500, 31, (6, 1), 64, 0.658, 0.658),
    (11, 200, (1, 6), 64, 0.685, 0.689),
    (500, 60, (6, 1), 88, 0.283, 0.284),
]
# The numbers of tokens of images with these sizes, of the published processor.
SIZES = {(448, 448): 545, (640, 480): 1065, (1000, 700): 1777, (300, 1200): 897, (4000, 900): 5058}


@pytest.mark.parametrize(("width", "height", "grid", "num_patches", "mean", "grid_mean"), RESULTS)
def test_crops_and_pixels_are_those_of_transformers(
    width: int, height: int, grid: tuple[int, int], num_patches: int, mean: float, grid_mean: float
) -> None:
    made = CropProcessor(32, 8, 6)([picture(1, width, height)])
    columns, rows = grid
    assert made["image_sizes"].tolist() == [[32 * rows, 32 * columns]]
    (pixels,), (mask,) = made["image_pixel_values"], made["image_attention_mask"]
    assert pixels.shape == (1 + rows * columns, 3, 32, 32)
    assert pixels.dtype == np.float32
    assert mask.shape == (1 + rows * columns, 4, 4)
    assert mask.sum() == num_patches
    assert abs(float(pixels[0].mean()) - mean) < 1.5e-3
    assert abs(float(pixels[1:].mean()) - grid_mean) < 1.5e-3


@pytest.mark.parametrize(("size", "num_tokens"), SIZES.items())
def test_an_image_has_as_many_tokens_as_in_transformers(size: tuple[int, int], num_tokens: int) -> None:
    assert CropProcessor()([Image.new("RGB", size)])["num_image_tokens"].tolist() == [num_tokens]


def test_all_of_the_image_comes_first_and_its_grid_row_by_row() -> None:
    levels = np.array([[0, 85], [170, 255]], np.uint8).repeat(32, 0).repeat(32, 1)
    made = CropProcessor(32, 8)([Image.fromarray(levels).convert("RGB")])
    whole, *crops = made["image_pixel_values"][0]
    assert [np.ptp(crop) for crop in crops] == [0] * 4
    assert [crop[0, 0, 0] for crop in crops] == pytest.approx([-1, -1 / 3, 1 / 3, 1], abs=1e-6)
    assert [whole[0, y, x] for y in (3, 28) for x in (3, 28)] == pytest.approx([-1, -1 / 3, 1 / 3, 1], abs=1e-6)


def test_an_image_that_is_too_narrow_is_refused() -> None:
    with pytest.raises(ImageError, match="its 200 × 10 pixels become 192 × 9, at least 10 are needed"):
        CropProcessor(32, 8, 6)([picture(1, 200, 10)])


def test_the_stored_processor_decides(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    assert CropProcessor.of(tmp_path) is None
    path.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    assert CropProcessor.of(tmp_path) is None
    stored = {"image_processor_type": "Phi4MultimodalImageProcessorFast", "image_mean": [0.1, 0.2, 0.3]}
    path.write_text(json.dumps(stored))
    assert CropProcessor.of(tmp_path) == CropProcessor(mean=[0.1, 0.2, 0.3])
    path.write_text(json.dumps({**stored, "dynamic_hd": 65}))
    with pytest.raises(
        ConfigError, match="dynamic_hd is 65; equal height and width of at least patch_size, and 1 to 64"
    ):
        CropProcessor.of(tmp_path)
