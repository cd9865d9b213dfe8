"""The model types that read images, as data: where a checkpoint keeps what, and which tokens an image becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
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

    layouts: tuple[TextLayout, ...]
    tower: tuple[str, ...]  # regular expressions that match the whole names of the tensors that images are encoded with
    expand: Expand
    inputs: tuple[str, ...]  # what the image processor makes that images are encoded from
    text_model: str = "language_model"  # the attribute of transformers' model that is its decoder
    # The module of transformers' model that writes the image's embeddings over those of a prompt. Empty: the model
    # without its decoder encodes images.
    writer: str = ""
    unused: tuple[str, ...] = ()  # tensors for other inputs than images and text, named as in `tower`
    has_adapter: bool = False  # prompts with images have a LoRA adapter, which is beside the weights
    placeholder: str = "{image}"  # in prompts without a chat template, with {image} for the text of the image token
    options: Callable[[Any], Mapping[str, Any]] = lambda config: {}  # configuration → arguments of the image processor
    # Embeddings that an image becomes, by the configuration and what the image processor made. None: known only when it
    # is encoded; the image processor makes a bounded number of squares of a fixed size.
    num_embeddings: Callable[[Any, Arrays], int] | None = None
    # Configuration → the text model's layers in front of which image tokens get features, ascending. Those of layer 0
    # are the embeddings. has_layer_features: the tower names the layer of each.
    features: Callable[[Any], tuple[int, ...]] = lambda config: ()
    has_layer_features: bool = False
    # Image tokens have positions of their own: a row and a column (M-RoPE, https://arxiv.org/abs/2409.12191).
    has_grid: bool = False
    # COMPAT: sections of the rope's frequencies where the configuration has none, by time, row and column. With them,
    # frequencies take turns, whatever the configuration says.
    sections: tuple[int, ...] = ()
    is_whole: bool = False  # the image tokens that follow each other attend to each other
    is_prompt_whole: bool = False  # all tokens of a prompt attend to each other
    # An image is one token, and layers of their own attend to its states (Mllama), see `vision/states.py`.
    uses_cross_attention: bool = False
    # In prompts without a chat template: text after the last image, which then replaces what the tokenizer adds, and
    # text at the end.
    text_prefix: str = ""
    text_suffix: str = ""
    # What chat templates write for an image, if it is not `placeholder`, which replaces it. If it is also in
    # `placeholder`, it is the token that stands for the image; otherwise the image token is.
    template_text: str = ""


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


def _parts(image: str, num_embeddings: int, arrays: Arrays) -> str:
    """Idefics 2: all of the image, or its quarters and all of it."""
    num_parts = arrays["pixel_values"].shape[1]
    part = image * (num_embeddings // num_parts) + "<fake_token_around_image>"
    return "<fake_token_around_image>" + part * num_parts


def _lines(image: str, num_embeddings: int, arrays: Arrays) -> str:
    """Pixtral: the image's patches, row by row. Other towers make square images, whose rows do not end with a token."""
    if "image_sizes" not in arrays:
        return _repeated(image, num_embeddings, arrays)
    (height, width), *_ = arrays["image_sizes"].tolist()
    side = isqrt(height * width // num_embeddings)  # side in pixels of what becomes one embedding
    lines = [image * (width // side)] * (height // side)
    return "[IMG_BREAK]".join(lines) + "[IMG_END]"


def _bracketed(image: str, num_embeddings: int, _: Arrays) -> str:
    return f"<img>{image * num_embeddings}</img>"


def _framed(image: str, num_embeddings: int, _: Arrays) -> str:
    return f"<start_of_image>{image * num_embeddings}<end_of_image>"


def _numbered(image: str, num_embeddings: int, arrays: Arrays) -> str:
    """Aya Vision: numbered tiles, then all of the image."""
    num_tiles = int(arrays["num_patches"].item())
    tokens = image * (num_embeddings // num_tiles)
    tiles = "".join(f"TILE_{number}{tokens}" for number in range(1, num_tiles))
    return f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{tokens}<|END_OF_IMG|>"


def _canvas(image: str, num_embeddings: int, arrays: Arrays) -> str:
    """Llama 4: the tiles of an image row by row, and all of it; or a single tile."""
    rows, columns = arrays["aspect_ratios"][0].tolist()
    num_tiles = rows * columns
    tile = image * (num_embeddings // (num_tiles + (num_tiles > 1)))
    row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    return f"<|image_start|>{row * rows if num_tiles > 1 else ''}<|image|>{tile}<|image_end|>"


def _parts_in_grid(image: str, num_embeddings: int, arrays: Arrays) -> str:
    """LFM2-VL: the tiles of an image row by row, and all of it; or all of it alone."""
    patches = arrays["spatial_shapes"].prod(axis=1)
    rows, columns = arrays["tile_grid"].tolist()
    marks = [""]
    if rows * columns > 1:
        marks = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        marks.append("<|img_thumbnail|>")
    counts = (patches * num_embeddings // patches.sum()).tolist()
    parts = (mark + image * count for mark, count in zip(marks, counts, strict=False))  # all of it may be left out
    return f"<|image_start|>{''.join(parts)}<|image_end|>"


def _num_in_lines(config: Any, arrays: Arrays) -> int:
    """Embeddings of an image from Pixtral's tower. 0: another tower, for squares of a fixed size."""
    if "image_sizes" not in arrays:
        return 0
    height, width = (int(pixels) for pixels in arrays["image_sizes"][0])
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return (height // side) * (width // side)


def _num_in_grid(config: Any, arrays: Arrays) -> int:
    """Embeddings of an image from Qwen's towers, which merge squares of patches."""
    return int(arrays["image_grid_thw"][0].prod()) // config.vision_config.spatial_merge_size**2


def _num_in_parts(config: Any, arrays: Arrays) -> int:
    """Embeddings of an image of LFM2-VL, whose projector merges squares of patches."""
    return int(arrays["spatial_shapes"].prod(axis=1).sum()) // config.downsample_factor**2


def _first_layers(config: Any) -> tuple[int, ...]:
    """Qwen3-VL: features of a layer of the tower each for the first layers."""
    return tuple(range(1, 1 + len(config.vision_config.deepstack_visual_indexes)))


def _chosen_layers(config: Any) -> tuple[int, ...]:
    """Granite 4 Vision: features of several layers of the tower, and of four places in each square of patches."""
    return tuple(sorted({layer for _, layer in config.deepstack_layer_map} | set(config.spatial_target_layers)))


def _patch_size(config: Any) -> Mapping[str, Any]:
    """Setting of Pixtral's image processor: the side in pixels of what becomes one embedding."""
    if config.vision_config.model_type != "pixtral":
        return {}
    return {"patch_size": config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)}


def image_token_id(config: Any) -> int:
    """config: of transformers."""
    holder = config if hasattr(config, "image_token_id") else config.vision_config
    token_id: int = holder.image_token_id
    return token_id


_LLAVA = ImageFamily(
    layouts=(TextLayout("model.language_model."), TextLayout("language_model.model.", "language_model.")),
    tower=(r"(model\.)?(vision_tower|multi_modal_projector)\..*", r"(model\.)?image_newline"),
    expand=_lines,
    inputs=("pixel_values", "image_sizes"),
    options=_patch_size,
)
_PIXTRAL = replace(_LLAVA, num_embeddings=_num_in_lines)
_QWEN_VL = ImageFamily(
    layouts=(TextLayout("model.language_model."), TextLayout("model.")),
    tower=(r"(model\.)?visual\..*",),
    expand=_repeated,
    inputs=("pixel_values", "image_grid_thw"),
    placeholder="<|vision_start|>{image}<|vision_end|>",
    num_embeddings=_num_in_grid,
    has_grid=True,
)
_QWEN3_VL = replace(_QWEN_VL, features=_first_layers, sections=(24, 20, 20))
_QWEN3_5 = replace(_QWEN_VL, sections=(11, 11, 10))
_IDEFICS3 = ImageFamily(
    text_model="text_model",
    layouts=(TextLayout("model.text_model."),),
    tower=(r"model\.(vision_model|connector)\..*",),
    expand=_tiles,
    inputs=("pixel_values", "pixel_attention_mask"),
    options=lambda config: {"return_row_col_info": True},
)

FAMILIES: dict[str, ImageFamily] = {
    "aya_vision": replace(
        _LLAVA,
        expand=_numbered,
        inputs=("pixel_values",),
        options=lambda config: {"crop_to_patches": True},
        template_text="<image>",
    ),
    "gemma3": replace(
        _LLAVA,
        expand=_framed,
        inputs=("pixel_values",),
        options=lambda config: {},
        placeholder="\n\n<start_of_image>\n\n",
        template_text="<start_of_image>",
        is_whole=True,
    ),
    "granite4_vision": replace(
        _LLAVA,
        tower=(r"(model\.)?(vision_tower|layerwise_projectors|spatial_projectors)\..*", r"(model\.)?image_newline"),
        expand=_repeated,
        options=lambda config: {},
        features=_chosen_layers,
        has_layer_features=True,
    ),
    "idefics2": replace(_IDEFICS3, expand=_parts, options=lambda config: {}),
    "idefics3": _IDEFICS3,
    "internvl": replace(
        _LLAVA, expand=_bracketed, inputs=("pixel_values",), options=lambda config: {"crop_to_patches": True}
    ),
    "lfm2_vl": replace(
        _LLAVA,
        expand=_parts_in_grid,
        inputs=("pixel_values", "pixel_attention_mask", "spatial_shapes"),
        options=lambda config: {},
        num_embeddings=_num_in_parts,
    ),
    "llama4": ImageFamily(
        layouts=(TextLayout("language_model.model.", "language_model."),),
        tower=(r"(vision_model|multi_modal_projector)\..*",),
        expand=_canvas,
        inputs=("pixel_values",),
        placeholder="<|image|>",
        template_text="<|image|>",
    ),
    "llava": _PIXTRAL,
    "llava_next": replace(_LLAVA, expand=_repeated),
    "llava_onevision": replace(
        _LLAVA,
        expand=_repeated,
        inputs=("pixel_values", "image_sizes", "batch_num_images"),
        options=lambda config: {},
    ),
    "mistral3": _PIXTRAL,
    "mllama": ImageFamily(
        layouts=(TextLayout("language_model.model.", "language_model."), TextLayout("model.language_model.")),
        tower=(r"(model\.)?(vision_model|multi_modal_projector)\..*",),
        expand=_repeated,
        inputs=("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
        uses_cross_attention=True,
    ),
    # COMPAT: its positions begin at 1 in transformers; attention by rope depends on their differences only.
    "paligemma": replace(
        _LLAVA,
        expand=_repeated,
        inputs=("pixel_values",),
        options=lambda config: {},
        is_prompt_whole=True,
        text_prefix="<bos>",
        text_suffix="\n",
    ),
    "phi4_multimodal": ImageFamily(
        layouts=(TextLayout("model."),),
        tower=(r"model\.embed_tokens_extend\.image_embed\..*",),
        unused=(r"model\.embed_tokens_extend\.audio_embed\..*",),
        expand=_repeated,
        inputs=("image_pixel_values", "image_sizes", "image_attention_mask"),
        num_embeddings=lambda config, arrays: int(arrays["num_image_tokens"].item()),
        writer="model.embed_tokens_extend.image_embed",
        has_adapter=True,
    ),
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "smolvlm": _IDEFICS3,
    "vipllava": replace(_LLAVA, expand=_repeated, inputs=("pixel_values",), options=lambda config: {}),
}
