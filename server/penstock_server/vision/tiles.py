"""Llama 4's image processor, whose code in transformers needs torch and torchvision: an image becomes the square tiles
of a canvas that it fits best, and a tile with all of it. The pixel values are those of transformers, up to the rounding
of resized pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import ConfigError
from penstock_server.vision.stored import stored_settings, stored_side

_TYPES = ("Llama4ImageProcessor", "Llama4ImageProcessorFast")
_KEYS = {
    "max_patches": "max_tiles",
    "resize_to_max_canvas": "is_enlarged",
    "image_mean": "mean",
    "image_std": "deviation",
    "rescale_factor": "factor",
    "resample": "resample",
}
MAX_TILES = 64


@dataclass(frozen=True, slots=True)
class TileProcessor:
    side: int  # pixels of a tile's side
    max_tiles: int = 16
    is_enlarged: bool = False  # fills the largest canvas
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    deviation: Sequence[float] = (0.5, 0.5, 0.5)
    factor: float = 1 / 255
    resample: int = 2  # as Pillow numbers it: bilinear

    @classmethod
    def of(cls, folder: Path) -> TileProcessor | None:
        """None: the model's image processor is another one. Raises ConfigError."""
        settings = stored_settings(folder, _TYPES)
        if settings is None:
            return None
        given = {field: settings[key] for key, field in _KEYS.items() if key in settings}
        size, max_tiles = settings.get("size") or {"height": 336, "width": 336}, given.get("max_tiles", 16)
        side = stored_side(size)
        if not side or type(max_tiles) is not int or not 1 <= max_tiles <= MAX_TILES:
            raise ConfigError(
                f"{folder}: the image processor's tiles have the size {size}, and max_patches is {max_tiles}; equal "
                f"height and width of at least 1, and 1 to {MAX_TILES}, are possible"
            )
        return cls(side, **given)

    def __call__(self, images: list[Any], return_tensors: str = "np") -> dict[str, npt.NDArray[Any]]:
        """images: one image of Pillow → "pixel_values" [tiles, 3, side, side] float32, row by row, and if there are
        several, all of the image; "aspect_ratios" [1, 2]: rows and columns."""
        (image,) = images
        rows, columns = self.canvas(image.width, image.height)
        width, height = self._resized(image.width, image.height, rows, columns)
        pixels = np.zeros((rows * self.side, columns * self.side, 3), np.uint8)
        pixels[:height, :width] = np.asarray(image.resize((width, height), self.resample))
        tiles = pixels.reshape(rows, self.side, columns, self.side, 3).transpose(0, 2, 4, 1, 3)
        tiles = tiles.reshape(rows * columns, 3, self.side, self.side)
        if rows * columns > 1:
            whole = np.asarray(image.resize((self.side, self.side), self.resample)).transpose(2, 0, 1)
            tiles = np.concatenate((tiles, whole[None]))
        return {"pixel_values": self._normalized(tiles), "aspect_ratios": np.array([[rows, columns]])}

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles: enlarges the image least, or else shrinks it least, and has the fewest tiles."""
        canvases = self._canvases()
        # COMPAT: transformers compares numbers in float32.
        sides = np.array(canvases, np.float32) * self.side
        scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
        enlarging = scales[scales >= 1]
        if not len(enlarging):
            scale = scales.max()
        elif self.is_enlarged:
            scale = enlarging.max()
        else:
            scale = enlarging.min()
        fitting = [each for each, of_each in zip(canvases, scales, strict=True) if of_each == scale]
        return min(fitting, key=lambda each: each[0] * each[1])

    def _canvases(self) -> list[tuple[int, int]]:
        """By shape, in the order in which transformers prefers one of equals."""
        by_shape: dict[float, list[tuple[int, int]]] = {}
        for num_tiles in range(self.max_tiles, 0, -1):
            for rows in range(1, num_tiles + 1):
                if num_tiles % rows == 0:
                    columns = num_tiles // rows
                    by_shape.setdefault(rows / columns, []).append((rows, columns))
        return [canvas for canvases in by_shape.values() for canvas in canvases]

    def _resized(self, width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
        """The size of the image on its canvas. An image is not enlarged beyond one tile, unless it fills the canvas."""
        max_width, max_height = columns * self.side, rows * self.side
        if not self.is_enlarged:
            max_width, max_height = min(max(width, self.side), max_width), min(max(height, self.side), max_height)
        by_width, by_height = max_width / width, max_height / height
        if by_width < by_height:
            return max_width, max(min(floor(height * by_width), max_height), 1)
        return max(min(floor(width * by_height), max_width), 1), max_height

    def _normalized(self, tiles: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """[tiles, 3, side, side]. COMPAT: each step is rounded to bfloat16, as in the publisher's code."""
        mean, deviation = (_rounded(np.array(each, np.float32))[:, None, None] for each in (self.mean, self.deviation))
        scaled = _rounded(tiles.astype(np.float32) * np.float32(self.factor))
        return _rounded(_rounded(scaled - mean) / deviation)


def _rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """To the nearest bfloat16, of finite numbers."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
