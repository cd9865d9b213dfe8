"""Llama 4's image processor against results of transformers' own, which needs torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from image_cases import picture
from penstock_server.errors import ConfigError
from penstock_server.vision.tiles import TileProcessor
from PIL import Image

# From transformers 5.23 for tiles of 32 × 32 pixels, at most six: the width and height of `picture(1, …)`; rows and
# columns of its canvas, and the mean of the pixel values. Then the same of images that fill the largest canvas.
RESULTS = [
    (32, 32, (1, 1), -0.008, (2, 2), -0.006),
    (1, 1, (1, 1), 0.352, (2, 2), 0.352),
    (33, 32, (1, 2), -0.328, (2, 3), -0.273),
    (64, 64, (2, 2), 0.01, (2, 2), 0.01),
    (90, 30, (1, 3), -0.084, (1, 3), 0.008),
    (30, 90, (3, 1), -0.084, (3, 1), 0.008),
    (200, 10, (1, 6), -0.614, (1, 6), -0.614),
    (97, 65, (2, 3), -0.0, (2, 3), -0.0),
    (150, 140, (2, 3), -0.244, (2, 3), -0.244),
    (500, 31, (1, 6), -0.559, (1, 6), -0.559),
]


@pytest.mark.parametrize(("width", "height", "canvas", "mean", "largest", "largest_mean"), RESULTS)
def test_canvas_and_pixels_are_those_of_transformers(
    width: int, height: int, canvas: tuple[int, int], mean: float, largest: tuple[int, int], largest_mean: float
) -> None:
    for is_enlarged, shape, expected in ((False, canvas, mean), (True, largest, largest_mean)):
        made = TileProcessor(32, 6, is_enlarged)([picture(1, width, height)])
        assert tuple(made["aspect_ratios"][0]) == shape
        num_tiles = shape[0] * shape[1]
        assert made["pixel_values"].shape == (num_tiles + (num_tiles > 1), 3, 32, 32)
        assert abs(float(made["pixel_values"].mean()) - expected) < 2e-3


def test_tiles_are_in_rows_and_the_last_one_is_the_whole_image() -> None:
    left, right = (np.full((32, 32, 3), level, np.uint8) for level in (0, 255))
    made = TileProcessor(32)([Image.fromarray(np.concatenate((left, right), axis=1))])
    assert made["aspect_ratios"].tolist() == [[1, 2]]
    assert [sorted({float(tile.min()), float(tile.max())}) for tile in made["pixel_values"]] == [[-1], [1], [-1, 1]]


def test_the_stored_processor_decides(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    assert TileProcessor.of(tmp_path) is None
    path.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    assert TileProcessor.of(tmp_path) is None
    stored = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 48, "width": 48}, "max_patches": 3}
    path.write_text(json.dumps({**stored, "image_mean": [0.1, 0.2, 0.3]}))
    assert TileProcessor.of(tmp_path) == TileProcessor(48, 3, mean=[0.1, 0.2, 0.3])
    path.write_text(json.dumps({**stored, "max_patches": 65}))
    with pytest.raises(ConfigError, match="max_patches is 65; equal height and width of at least 1, and 1 to 64"):
        TileProcessor.of(tmp_path)
