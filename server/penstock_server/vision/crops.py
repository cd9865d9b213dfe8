"""Phi-4-multimodal's image processor, whose code in transformers needs torch and torchvision: an image fills a grid of
square crops as far as it can, white fills the rest, and one more crop has all of it. The pixel values are those of
transformers, up to the rounding of resized pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import ConfigError, ImageError
from penstock_server.vision.stored import stored_settings, stored_side

_TYPES = ("Phi4MultimodalImageProcessor", "Phi4MultimodalImageProcessorFast")
_KEYS = {
    "patch_size": "patch",
    "dynamic_hd": "max_crops",
    "image_mean": "mean",
    "image_std": "deviation",
    "rescale_factor": "factor",
}
MAX_CROPS = 64
_MIN_PIXELS = 10  # pixels of an image on its grid, in each direction
_BILINEAR = 2  # as Pillow numbers it
_SHARPNESS = -0.75  # coefficient of torch's bicubic interpolation


@dataclass(frozen=True, slots=True)
class CropProcessor:
    side: int = 448  # pixels of a crop's side
    patch: int = 14  # the side of a patch
    max_crops: int = 36  # crops of a grid
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    deviation: Sequence[float] = (0.5, 0.5, 0.5)
    factor: float = 1 / 255

    @classmethod
    def of(cls, folder: Path) -> CropProcessor | None:
        """None: the model's image processor is another one. Raises ConfigError."""
        settings = stored_settings(folder, _TYPES)
        if settings is None:
            return None
        given = {field: settings[key] for key, field in _KEYS.items() if key in settings}
        size = settings.get("size", {"height": 448, "width": 448})
        side, patch, max_crops = stored_side(size), given.get("patch", 14), given.get("max_crops", 36)
        counts = type(patch) is int and type(max_crops) is int
        if not counts or not 1 <= patch <= side or not 1 <= max_crops <= MAX_CROPS:
            raise ConfigError(
                f"{folder}: the image processor's crops have the size {size}, patch_size is {patch!r}, and dynamic_hd "
                f"is {max_crops!r}; equal height and width of at least patch_size, and 1 to {MAX_CROPS}, are possible"
            )
        return cls(side, **given)

    def __call__(self, images: list[Any], return_tensors: str = "np") -> dict[str, npt.NDArray[Any]]:
        """images: one image of Pillow. Raises ImageError if it is too narrow.

        "image_pixel_values" [1, crops, 3, side, side] float32: all of the image, and its grid row by row;
        "image_sizes" [1, 2]: height and width of the grid in pixels;
        "image_attention_mask" [1, crops, patches, patches] bool, by row and column: the patches that have a part of the
        image; "num_image_tokens" [1].
        """
        (image,) = images
        columns, rows = self.grid(image.width, image.height)
        width, height = columns * self.side, rows * self.side
        by_width, by_height = width / image.width, height / image.height
        if by_width < by_height:
            filled = width, int(image.height * by_width)
        else:
            filled = int(image.width * by_height), height
        if min(filled) < _MIN_PIXELS:
            raise ImageError(
                f"is too narrow: its {image.width} × {image.height} pixels become {filled[0]} × {filled[1]}, at least "
                f"{_MIN_PIXELS} are needed in each direction"
            )
        pixels = np.full((height, width, 3), 255, np.uint8)
        pixels[: filled[1], : filled[0]] = np.asarray(image.resize(filled, _BILINEAR))
        normalized = self._normalized(pixels)
        whole = _bicubic(_bicubic(normalized, 0, self.side), 1, self.side)
        mask = np.ones((rows * self._patches, columns * self._patches), np.bool_)
        if unfilled := (width - filled[0]) // self.patch:
            mask[:, -unfilled:] = False
        if unfilled := (height - filled[1]) // self.patch:
            mask[-unfilled:] = False
        crops = np.concatenate((whole[None], _cut(normalized, self.side))).transpose(0, 3, 1, 2)
        masks = np.concatenate((np.ones((1, self._patches, self._patches), np.bool_), _cut(mask, self._patches)))
        return {
            "image_pixel_values": crops[None],
            "image_sizes": np.array([[height, width]]),
            "image_attention_mask": masks[None],
            "num_image_tokens": np.array([self._num_tokens(mask)]),
        }

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of crops: as many as the image covers, or if these are too many, those whose shape is most
        like its own. Of equal shapes the larger one, if the image covers more than half of it."""
        columns, rows = ceil(width / self.side), ceil(height / self.side)
        if columns * rows <= self.max_crops:
            return columns, rows
        shape, best, distance = width / height, (1, 1), float("inf")
        for columns, rows in self._grids():
            its_distance = abs(shape - columns / rows)
            covers = width * height > 0.5 * self.side * self.side * columns * rows
            if its_distance < distance or (its_distance == distance and covers):
                best, distance = (columns, rows), its_distance
        return best

    def _grids(self) -> list[tuple[int, int]]:
        sides = range(1, self.max_crops + 1)
        grids = [(columns, rows) for columns in sides for rows in sides if columns * rows <= self.max_crops]
        return sorted(grids, key=lambda grid: grid[0] * grid[1])

    @property
    def max_patches(self) -> int:
        """The most patches of an image."""
        return (self.max_crops + 1) * self._patches**2

    @property
    def _patches(self) -> int:
        """Patches of a crop in each direction."""
        return self.side // self.patch

    def _num_tokens(self, mask: npt.NDArray[np.bool_]) -> int:
        """A token for each 2 × 2 patches: of the whole image, and of the part of the grid that it fills. A token ends
        each line, and one is between the two parts. mask [rows, columns] of the grid's patches."""
        halves = _joined(_cut(mask, self._patches)[:, ::2, ::2], mask.shape[1] // self._patches)
        rows, columns, side = int(halves[:, 0].sum()), int(halves[0].sum()), -(-self._patches // 2)
        return rows * (columns + 1) + 1 + side * (side + 1)

    def _normalized(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        # COMPAT: transformers scales mean and deviation instead of the pixels.
        mean, deviation = (np.array(each, np.float32) / np.float32(self.factor) for each in (self.mean, self.deviation))
        return (pixels.astype(np.float32) - mean) / deviation


def _cut(grid: npt.NDArray[Any], side: int) -> npt.NDArray[Any]:
    """[height, width, ...] → [crops, side, side, ...], row by row."""
    rows, columns = grid.shape[0] // side, grid.shape[1] // side
    cut = grid.reshape(rows, side, columns, side, *grid.shape[2:]).swapaxes(1, 2)
    return cut.reshape(rows * columns, side, side, *grid.shape[2:])


def _joined(crops: npt.NDArray[Any], columns: int) -> npt.NDArray[Any]:
    """[crops, side, side] → [height, width], the inverse of `_cut`."""
    side = crops.shape[1]
    return crops.reshape(-1, columns, side, side).swapaxes(1, 2).reshape(-1, columns * side)


def _bicubic(pixels: npt.NDArray[np.float32], axis: int, size: int) -> npt.NDArray[np.float32]:
    """Resized along an axis without antialiasing, as torch does: each value is a sum of four."""
    length = pixels.shape[axis]
    places = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(length / size) - np.float32(0.5)
    first = np.floor(places).astype(np.int64)
    part = places - first
    shape = [1] * pixels.ndim
    shape[axis] = size
    resized = np.zeros((*pixels.shape[:axis], size, *pixels.shape[axis + 1 :]), np.float32)
    for offset in (-1, 0, 1, 2):
        weight = _cubic(np.abs(part - offset)).reshape(shape)
        resized += weight * pixels.take(np.clip(first + offset, 0, length - 1), axis)
    return resized


def _cubic(distance: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The weight of a value at a distance of up to 2 (Keys, 1981)."""
    a = _SHARPNESS
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, far).astype(np.float32)
