"""LFM2-VL's image processor, whose code in transformers needs torch and torchvision: an image becomes the patches of
all of it at a bounded resolution, and a large one before that those of square tiles, which it fills in a grid. The
pixel values are those of transformers, up to the rounding of resized pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import ConfigError, ImageError
from penstock_server.vision.stored import stored_settings

_TYPES = ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")
_KEYS = {
    "tile_size": "side",
    "encoder_patch_size": "patch",
    "downsample_factor": "merged",
    "min_tiles": "min_tiles",
    "max_tiles": "max_tiles",
    "use_thumbnail": "has_whole",
    "min_image_tokens": "min_tokens",
    "max_image_tokens": "max_tokens",
    "max_pixels_tolerance": "tolerance",
    "image_mean": "mean",
    "image_std": "deviation",
    "rescale_factor": "factor",
    "resample": "resample",
}
MAX_TILES = 64
MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PatchProcessor:
    side: int = 512  # pixels of a tile's side
    patch: int = 16  # the side of a patch
    merged: int = 2  # patches that become one embedding, in each direction
    min_tiles: int = 2
    max_tiles: int = 10  # 1: no image is split into tiles
    has_whole: bool = True  # tiles are followed by the whole image
    min_tokens: int = 64  # bounds of the whole image
    max_tokens: int = 256
    tolerance: float = 2.0  # an image is split if it has more pixels than this many times those of its whole
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    deviation: Sequence[float] = (0.5, 0.5, 0.5)
    factor: float = 1 / 255
    resample: int = 2  # as Pillow numbers it: bilinear

    @classmethod
    def of(cls, folder: Path) -> PatchProcessor | None:
        """None: the model's image processor is another one. Raises ConfigError."""
        settings = stored_settings(folder, _TYPES)
        if settings is None:
            return None
        found = cls(**{field: settings[key] for key, field in _KEYS.items() if key in settings})
        if not settings.get("do_image_splitting", True):
            found = replace(found, min_tiles=1, max_tiles=1)
        sizes = found.side, found.patch, found.merged
        counts = *sizes, found.min_tiles, found.max_tiles, found.min_tokens, found.max_tokens
        if any(type(count) is not int or count < 1 for count in counts) or found.side % found.unit:
            raise ConfigError(
                f"{folder}: the image processor's tile_size is {found.side!r}, encoder_patch_size {found.patch!r} and "
                f"downsample_factor {found.merged!r}; a multiple of the product of the others is possible, and all "
                "counts must be at least 1"
            )
        least = 2 if found.max_tiles > 1 else 1
        if not least <= found.min_tiles <= found.max_tiles <= MAX_TILES:
            raise ConfigError(
                f"{folder}: the image processor makes {found.min_tiles} to {found.max_tiles} tiles; 2 to {MAX_TILES} "
                "are possible"
            )
        if not found.min_tokens <= found.max_tokens <= MAX_TOKENS:
            raise ConfigError(
                f"{folder}: the image processor makes {found.min_tokens} to {found.max_tokens} tokens; at most "
                f"{MAX_TOKENS} are possible"
            )
        return found

    @property
    def unit(self) -> int:
        """The side in pixels of what becomes one embedding."""
        return self.patch * self.merged

    @property
    def part_patches(self) -> int:
        """The most patches of a tile and of the whole image."""
        of_tile = (self.side // self.patch) ** 2 if self.max_tiles > 1 else 0
        return max(self.max_tokens * self.merged**2, of_tile)

    @property
    def max_patches(self) -> int:
        """The most patches of an image."""
        return (self.max_tiles + 1) * self.part_patches

    def __call__(self, images: list[Any], return_tensors: str = "np") -> dict[str, npt.NDArray[Any]]:
        """images: one image of Pillow. Raises ImageError if it is too narrow.

        "pixel_values" [parts, patches, values] float32: tiles row by row, and all of the image, padded with zeros;
        "pixel_attention_mask" [parts, patches] int32: 1 for patches, 0 for padding; "spatial_shapes" [parts, 2]: rows
        and columns of patches; "tile_grid" [2]: rows and columns of tiles.
        """
        (image,) = images
        columns, rows = self.grid(image.width, image.height)
        parts = []
        if columns * rows > 1:
            pixels = np.asarray(image.resize((columns * self.side, rows * self.side), self.resample))
            tiles = pixels.reshape(rows, self.side, columns, self.side, 3).swapaxes(1, 2)
            parts += list(tiles.reshape(-1, self.side, self.side, 3))
        if not parts or self.has_whole:
            parts.append(np.asarray(image.resize(self.whole(image.width, image.height), self.resample)))
        shapes = np.array([[part.shape[0] // self.patch, part.shape[1] // self.patch] for part in parts])
        counts = shapes.prod(axis=1)
        if counts.max() > self.part_patches:
            raise ImageError(
                f"is too narrow: its {image.width} × {image.height} pixels become {counts.max()} patches, at most "
                f"{self.part_patches} are possible"
            )
        values = np.zeros((len(parts), self.part_patches, 3 * self.patch**2), np.float32)
        for row, part in zip(values, parts, strict=True):
            patches = self._patches(part)
            row[: len(patches)] = patches
        mask = np.arange(self.part_patches) < counts[:, None]
        return {
            "pixel_values": values,
            "pixel_attention_mask": mask.astype(np.int32),
            "spatial_shapes": shapes,
            "tile_grid": np.array([rows, columns]),
        }

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles: those whose shape is most like that of an image which is too large to be encoded
        as a whole. Of equal shapes a larger one, if the image covers more than half of it."""
        width_units, height_units = (max(self.patch, self._rounded(side)) for side in (width, height))
        if self.max_tiles == 1 or width_units * height_units <= self.max_tokens * self.unit**2 * self.tolerance:
            return 1, 1
        shape, best, distance = width / height, (1, 1), float("inf")
        for columns, rows in self._grids():
            its_distance = abs(shape - columns / rows)
            covers = width * height > 0.5 * self.side * self.side * columns * rows
            if its_distance < distance or (its_distance == distance and covers):
                best, distance = (columns, rows), its_distance
        return best

    def whole(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the whole image in pixels: multiples of `unit` for at most `max_tokens` tokens and, if it
        has few, at least `min_tokens`."""
        sides = max(self.unit, self._rounded(width)), max(self.unit, self._rounded(height))
        most, least = (tokens * self.unit**2 for tokens in (self.max_tokens, self.min_tokens))
        if sides[0] * sides[1] > most:
            scale = sqrt(height * width / most)
            width, height = (max(self.unit, floor(side / scale / self.unit) * self.unit) for side in (width, height))
        elif sides[0] * sides[1] < least:
            scale = sqrt(least / (height * width))
            width, height = (ceil(side * scale / self.unit) * self.unit for side in (width, height))
        else:
            width, height = sides
        return width, height

    def _rounded(self, side: int) -> int:
        return round(side / self.unit) * self.unit

    def _grids(self) -> list[tuple[int, int]]:
        """COMPAT: in the order in which transformers prefers one of equals, that of its set of pairs."""
        sides = range(1, self.max_tiles + 1)
        grids = {
            (columns, rows)
            for most in range(self.min_tiles, self.max_tiles + 1)
            for columns in sides[:most]
            for rows in sides[:most]
            if self.min_tiles <= columns * rows <= self.max_tiles
        }
        return sorted(grids, key=lambda grid: grid[0] * grid[1])

    def _patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """[height, width, 3] → [patches, values], row by row."""
        # COMPAT: transformers scales mean and deviation instead of the pixels.
        mean, deviation = (np.array(each, np.float32) / np.float32(self.factor) for each in (self.mean, self.deviation))
        normalized = (pixels.astype(np.float32) - mean) / deviation
        rows, columns = pixels.shape[0] // self.patch, pixels.shape[1] // self.patch
        cut = normalized.reshape(rows, self.patch, columns, self.patch, 3).swapaxes(1, 2)
        return cut.reshape(rows * columns, -1)
