"""The model types that read images, as data: where a checkpoint keeps what, and which tokens an image becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
Expand = Callable[[str, int, Arrays], str]
"""The text whose tokens replace an image's placeholder. It has the text of the image token (the first argument) once
for each embedding (the second is their number). The last argument is what the image processor made."""


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Names of the text model's tensors in a checkpoint: what `model.` is replaced by, and what precedes all others."""

    body: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How the models of one type read images."""

    text_model: str  # the attribute of transformers' model that is its decoder
    layouts: tuple[TextLayout, ...]
    tower: tuple[str, ...]  # regular expressions that match the whole names of the tensors that images are encoded with
    expand: Expand
    inputs: tuple[str, ...]  # what the image processor makes that images are encoded from
    placeholder: str = "{image}"  # in prompts without a chat template, with {image} for the text of the image token
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the image processor


def _repeated(image: str, num_embeddings: int, _: Arrays) -> str:
    return image * num_embeddings


def _tiles(image: str, num_embeddings: int, arrays: Arrays) -> str:
    """Idefics 3: the tiles of an image row by row, and all of it at a lower resolution."""
    rows, columns = int(arrays["rows"].item()), int(arrays["cols"].item())
    tokens = image * (num_embeddings // (rows * columns + 1))
    tile = "<fake_token_around_image>{}" + tokens
    whole = tile.format("<global-img>") + "<fake_token_around_image>"
    if not rows:
        return whole
    lines = ["".join(tile.format(f"<row_{r + 1}_col_{c + 1}>") for c in range(columns)) for r in range(rows)]
    return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


_LLAVA = (
    TextLayout("model.language_model."),
    TextLayout("language_model.model.", "language_model."),
)
_LLAVA_TOWER = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
_IDEFICS3 = ImageFamily(
    text_model="text_model",
    layouts=(TextLayout("model.text_model."),),
    tower=(r"model\.(vision_model|connector)\..*",),
    expand=_tiles,
    inputs=("pixel_values", "pixel_attention_mask"),
    options={"return_row_col_info": True},
)

FAMILIES: dict[str, ImageFamily] = {
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}
