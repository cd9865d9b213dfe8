"""LFM2-VL's image processor against results of transformers' own, which needs torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import picture
from penstock_server.errors import ConfigError, ImageError
from penstock_server.vision.patches import PatchProcessor
from PIL import Image

SMALL = PatchProcessor(side=32, patch=8, min_tokens=2, max_tokens=4, max_tiles=4)
# From transformers 5.23 with torchvision 0.29.2, for tiles of 32 × 32 pixels in patches of 8 × 8: the width and height
# of `picture(1, …)`; rows and columns of tiles, rows and columns of the whole image's patches, and the means of the
# pixel values of each part.
RESULTS = [
    (32, 32, (1, 1), (4, 4), [-0.009]),
    (1, 1, (1, 1), (4, 4), [0.352]),
    (33, 32, (1, 1), (4, 4), [-0.009]),
    (64, 64, (2, 2), (4, 4), [0.016, -0.011, 0.02, 0.011, 0.01]),
    (40, 64, (1, 1), (4, 2), [0.007]),
    (90, 30, (1, 3), (2, 6), [0.019, 0.003, -0.002, 0.007]),
    (30, 90, (3, 1), (6, 2), [-0.005, 0.008, 0.018, 0.007]),
    (60, 10, (1, 1), (2, 8), [-0.004]),
    (97, 65, (2, 2), (2, 4), [0.01, 0.007, 0.008, 0.004, 0.007]),
    (150, 140, (2, 2), (2, 4), [0.013, -0.001, 0.002, 0.008, 0.005]),
    (11, 60, (1, 1), (8, 2), [-0.007]),
    (24, 40, (1, 1), (4, 4), [-0.008]),
    (8, 7, (1, 1), (4, 4), [-0.039]),
    (48, 43, (2, 2), (2, 4), [-0.01, -0.01, 0.009, 0.016, 0.002]),
]
# Rows and columns of tiles and of the whole image's patches, of the published processor.
SIZES = {
    (448, 448): ((1, 1), (28, 28)),
    (5000, 60): ((1, 1), (2, 292)),
    (60, 4000): ((1, 1), (250, 4)),
    (640, 480): ((1, 1), (26, 36)),
    (1000, 700): ((2, 3), (26, 38)),
    (300, 1200): ((1, 1), (64, 16)),
    (4000, 900): ((1, 4), (14, 66)),
    (20, 20): ((1, 1), (16, 16)),
}


@pytest.mark.parametrize(("width", "height", "grid", "whole", "means"), RESULTS)
def test_tiles_and_pixels_are_those_of_transformers(
    width: int, height: int, grid: tuple[int, int], whole: tuple[int, int], means: list[float]
) -> None:
    made = SMALL([picture(1, width, height)])
    num_tiles = grid[0] * grid[1] if grid != (1, 1) else 0
    assert made["tile_grid"].tolist() == list(grid)
    assert made["spatial_shapes"].tolist() == [[4, 4]] * num_tiles + [list(whole)]
    pixels, mask = made["pixel_values"], made["pixel_attention_mask"]
    assert pixels.shape == (num_tiles + 1, 16, 3 * 64)
    assert pixels.dtype == np.float32
    assert mask.sum(1).tolist() == [16] * num_tiles + [whole[0] * whole[1]]
    assert not pixels[mask == 0].any()
    found = [float(part[:count].mean()) for part, count in zip(pixels, mask.sum(1), strict=True)]
    assert found == pytest.approx(means, abs=1.5e-3)


@pytest.mark.parametrize(("size", "grid", "whole"), [(size, *made) for size, made in SIZES.items()])
def test_an_image_has_as_many_patches_as_in_transformers(
    size: tuple[int, int], grid: tuple[int, int], whole: tuple[int, int]
) -> None:
    made = PatchProcessor()([Image.new("RGB", size)])
    assert made["tile_grid"].tolist() == list(grid)
    assert made["spatial_shapes"][-1].tolist() == list(whole)


def test_patches_are_row_by_row_in_tiles_row_by_row() -> None:
    levels = np.arange(64, dtype=np.uint8).reshape(8, 8).repeat(8, 0).repeat(8, 1)
    made = SMALL([Image.fromarray(levels).convert("RGB")])
    *tiles, _ = made["pixel_values"]
    seen = [np.rint((patches[:, 0] + 1) * 127.5).reshape(4, 4) for patches in tiles]
    assert np.array_equal(np.block([seen[:2], seen[2:]]), np.arange(64).reshape(8, 8))


def test_a_model_may_make_no_tiles_or_leave_the_whole_image_out() -> None:
    (image,) = [picture(1, 64, 64)]
    no_tiles = PatchProcessor(side=32, patch=8, min_tokens=2, max_tokens=4, min_tiles=1, max_tiles=1)
    assert no_tiles([image])["spatial_shapes"].tolist() == [[4, 4]]
    no_whole = PatchProcessor(side=32, patch=8, min_tokens=2, max_tokens=4, max_tiles=4, has_whole=False)
    assert no_whole([image])["spatial_shapes"].tolist() == [[4, 4]] * 4


def test_an_image_that_is_too_narrow_is_refused() -> None:
    """transformers fails, or makes patches that its model cannot read."""
    with pytest.raises(ImageError, match="its 97 × 13 pixels become 20 patches, at most 16 are possible"):
        SMALL([picture(1, 97, 13)])


def test_the_stored_processor_decides(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    assert PatchProcessor.of(tmp_path) is None
    path.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    assert PatchProcessor.of(tmp_path) is None
    stored = {"image_processor_type": "Lfm2VlImageProcessorFast", "image_mean": [0.1, 0.2, 0.3]}
    path.write_text(json.dumps({**stored, "encoder_patch_size": 8, "use_thumbnail": False, "max_num_patches": 1024}))
    assert PatchProcessor.of(tmp_path) == PatchProcessor(patch=8, has_whole=False, mean=[0.1, 0.2, 0.3])
    path.write_text(json.dumps({**stored, "do_image_splitting": False}))
    assert PatchProcessor.of(tmp_path) == PatchProcessor(min_tiles=1, max_tiles=1, mean=[0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tile_size": 500}, "tile_size is 500, encoder_patch_size 16 and downsample_factor 2; a multiple"),
        ({"encoder_patch_size": 0}, "encoder_patch_size 0 and downsample_factor 2"),
        ({"downsample_factor": "2"}, "downsample_factor '2'"),
        ({"max_tiles": 65}, "makes 2 to 65 tiles; 2 to 64 are possible"),
        ({"min_tiles": 1}, "makes 1 to 10 tiles; 2 to 64 are possible"),
        ({"max_image_tokens": 5000}, "makes 64 to 5000 tokens; at most 4096 are possible"),
        ({"min_image_tokens": 300}, "makes 300 to 256 tokens"),
    ],
)
def test_settings_that_make_no_patches_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    stored = {"image_processor_type": "Lfm2VlImageProcessor", **values}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=message):
        PatchProcessor.of(tmp_path)
