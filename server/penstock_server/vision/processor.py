"""The image processors that are our own, because those of transformers need torchvision."""

from __future__ import annotations

from pathlib import Path

from penstock_server.vision.crops import CropProcessor
from penstock_server.vision.patches import PatchProcessor
from penstock_server.vision.tiles import TileProcessor

OwnProcessor = CropProcessor | PatchProcessor | TileProcessor


def own_processor(folder: Path) -> OwnProcessor | None:
    """None: the image processor of the model in the folder is one of transformers. Raises ConfigError."""
    return TileProcessor.of(folder) or CropProcessor.of(folder) or PatchProcessor.of(folder)
