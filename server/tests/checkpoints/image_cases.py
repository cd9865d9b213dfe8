"""Tiny random models that read images, one or more of each family, with tokenizer and image processor."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<img>", "<IMG_CONTEXT>", "</img>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    *("<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"),
    *("<|image_start|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>"),
    "<bos>",
    "<|endoftext10|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4) if row * column <= 4),
    "<|img_thumbnail|>",
]
CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(CHARACTERS) + len(SPECIAL)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def token_id(text: str) -> int:
    return len(CHARACTERS) + SPECIAL.index(text)


@dataclass(frozen=True)
class ImageCase:
    """Arguments of a configuration class of transformers, and of the model's image processor. processor: a class of
    transformers; empty: the image processor is ours."""

    config: str
    processor: str
    values: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    processor_values: dict[str, Any] = field(default_factory=dict)
    image_token: str = "<image>"
    options: dict[str, Any] = field(default_factory=dict)  # what transformers' processor of this model passes


IDEFICS3_PIXELS = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 3}
PIXTRAL = {"model_type": "pixtral", "image_size": 64, "head_dim": 16}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
SQUARE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
GRIDS = [[32, 64], [64, 32], [64, 64]]
PERCEIVER = {"resampler_n_latents": 5, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 24}
QWEN = {"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1000.0}
QWEN_PIXELS = {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, "patch_size": 8}
QWEN3_VISION = {
    "hidden_size": 32,
    "out_hidden_size": 48,
    "depth": 3,
    "num_heads": 2,
    "patch_size": 8,
    "intermediate_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
DRAFTING_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Qwen3-VL's without features for the first layers of the text model.
QWEN3_5_VISION = {key: value for key, value in QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
QWEN3_5_TEXT = {
    "num_hidden_layers": 4,
    "rms_norm_eps": 0.1,
    "head_dim": 32,
    "rope_parameters": {**QWEN, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
IMAGE_CASES: dict[str, ImageCase] = {
    "idefics2": ImageCase(
        "Idefics2Config",
        "Idefics2ImageProcessorPil",
        values={"perceiver_config": {**PERCEIVER, "num_key_value_heads": 1}},
        text={"model_type": "mistral", "sliding_window": None},
        processor_values={"size": {"shortest_edge": 24, "longest_edge": 32}, "do_image_splitting": True},
    ),
    "aya-vision": ImageCase(
        "AyaVisionConfig",
        "GotOcr2ImageProcessorPil",
        values={"vision_feature_select_strategy": "full"},
        text={"model_type": "cohere2", "sliding_window": 12},
        vision=SIGLIP,
        processor_values={"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 3},
        image_token="<|IMG_PATCH|>",
        options={"crop_to_patches": True},
    ),
    "gemma3": ImageCase(
        "Gemma3Config",
        "Gemma3ImageProcessorPil",
        values={"mm_tokens_per_image": 9},
        # The window is shorter than an image.
        text={"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        vision={**SIGLIP, "image_size": 48},
        processor_values={"size": {"height": 48, "width": 48}},
        image_token="<image_soft_token>",
    ),
    "paligemma": ImageCase(
        "PaliGemmaConfig",
        "SiglipImageProcessorPil",
        values={"projection_dim": 48},
        text={"model_type": "gemma", "head_dim": 16},
        vision={**SIGLIP, "image_size": 24},
        processor_values={"size": {"height": 24, "width": 24}},
    ),
    "paligemma2": ImageCase(
        "PaliGemmaConfig",
        "SiglipImageProcessorPil",
        values={"projection_dim": 48},
        text={"model_type": "gemma2", "head_dim": 16, "sliding_window": 240},
        vision={**SIGLIP, "image_size": 24},
        processor_values={"size": {"height": 24, "width": 24}},
    ),
    # Its image processor in transformers needs torchvision. The second layer is dense, the third one without rope.
    "llama4": ImageCase(
        "Llama4Config",
        "",
        text={
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "moe_layers": [0, 2],
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 12,
            "floor_scale": 10,
            "attn_scale": 0.5,
        },
        vision={
            "projector_input_dim": 20,
            "projector_output_dim": 20,
            "vision_output_dim": 20,
            # The pixels that are shuffled into one.
            "intermediate_size": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        processor_values={
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 3,
        },
        image_token="<|patch|>",
    ),
    # The third layer gets the features that name it last.
    "granite4-vision": ImageCase(
        "Granite4VisionConfig",
        "LlavaNextImageProcessorPil",
        values={
            "image_grid_pinpoints": GRIDS,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[1, 0], [-1, 2]],
            "spatial_target_layers": [1, 2, 3],
            "qformer_config": {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 40},
        },
        text={"num_hidden_layers": 4, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
        vision={**SIGLIP, "hidden_size": 64},
        processor_values={**SQUARE, "image_grid_pinpoints": GRIDS},
    ),
    # Its image processor in transformers needs torchvision. The second picture is split into tiles.
    "lfm2-vl": ImageCase(
        "Lfm2VlConfig",
        "",
        values={"projector_hidden_size": 40},
        text={
            "model_type": "lfm2",
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "block_multiple_of": 48,
            "norm_eps": 1e-5,
        },
        vision={"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        processor_values={
            "image_processor_type": "Lfm2VlImageProcessor",
            "tile_size": 32,
            "encoder_patch_size": 8,
            "min_image_tokens": 2,
            "max_image_tokens": 4,
            "max_tiles": 4,
        },
    ),
    "llava": ImageCase(
        "LlavaConfig", "CLIPImageProcessorPil", text={"model_type": "llama"}, vision=CLIP, processor_values=SQUARE
    ),
    "llava-pixtral": ImageCase(
        "LlavaConfig",
        "PixtralImageProcessorPil",
        values={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        text={"model_type": "mistral", "sliding_window": None},
        vision=PIXTRAL,
        processor_values={"size": {"longest_edge": 40}, "patch_size": {"height": 8, "width": 8}},
        image_token="[IMG]",
    ),
    "llava-next": ImageCase(
        "LlavaNextConfig",
        "LlavaNextImageProcessorPil",
        values={"image_grid_pinpoints": GRIDS},
        text={"model_type": "qwen2"},
        vision=CLIP,
        processor_values={**SQUARE, "image_grid_pinpoints": GRIDS},
    ),
    "llava-onevision": ImageCase(
        "LlavaOnevisionConfig",
        "LlavaOnevisionImageProcessorPil",
        values={"image_grid_pinpoints": GRIDS, "video_token_id": token_id("<|video_pad|>")},
        text={"model_type": "qwen2"},
        vision=SIGLIP,
        processor_values={"size": {"height": 32, "width": 32}, "image_grid_pinpoints": GRIDS},
    ),
    # Its image processor in transformers needs torchvision. The first picture has too many crops for a grid of its own.
    "phi4-multimodal": ImageCase(
        "Phi4MultimodalConfig",
        "",
        values={
            **TEXT,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 1.8, 2.0],
                "long_factor": [1.2, 2.0, 4.0, 8.0, 8.0, 8.0],
            },
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 16,
                "depthwise_separable_out_channel": 16,
                "nemo_conv_channels": 8,
            },
        },
        vision={"crop_size": 32, "image_token_id": token_id("<|endoftext10|>")},
        processor_values={
            "image_processor_type": "Phi4MultimodalImageProcessor",
            "size": {"height": 32, "width": 32},
            "patch_size": 8,
            "dynamic_hd": 3,
        },
        image_token="<|endoftext10|>",
    ),
    # The image token has no row in the head. The last picture has fewer tiles than the others.
    "mllama": ImageCase(
        "MllamaConfig",
        "MllamaImageProcessorPil",
        text={
            "vocab_size": token_id("<|image|>"),
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,  # one on each of two ranks
            "num_hidden_layers": 5,
            "cross_attention_layers": [0, 3],
            "bos_token_id": 1,
        },
        vision={
            "attention_heads": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "max_num_tiles": 4,
        },
        processor_values={"size": {"height": 32, "width": 32}, "max_image_tiles": 4},
        image_token="<|image|>",
    ),
    "vipllava": ImageCase(
        "VipLlavaConfig",
        "CLIPImageProcessorPil",
        values={"vision_feature_layers": [-2, -1, 1]},
        text={"model_type": "llama"},
        vision=CLIP,
        processor_values=SQUARE,
    ),
    "mistral3": ImageCase(
        "Mistral3Config",
        "PixtralImageProcessorPil",
        values={"spatial_merge_size": 2},
        text={"model_type": "mistral", "sliding_window": None},
        vision=PIXTRAL,
        processor_values={"size": {"longest_edge": 60}, "patch_size": {"height": 8, "width": 8}},
        image_token="[IMG]",
        options={"patch_size": 16},
    ),
    "ministral3": ImageCase(
        "Mistral3Config",
        "PixtralImageProcessorPil",
        values={"spatial_merge_size": 2},
        text={"model_type": "ministral3", "head_dim": 16},
        vision=PIXTRAL,
        processor_values={"size": {"longest_edge": 60}, "patch_size": {"height": 8, "width": 8}},
        image_token="[IMG]",
        options={"patch_size": 16},
    ),
    "internvl": ImageCase(
        "InternVLConfig",
        "GotOcr2ImageProcessorPil",
        text={"model_type": "qwen2"},
        vision={"image_size": [32, 32], "patch_size": [8, 8]},
        processor_values={"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 3},
        image_token="<IMG_CONTEXT>",
        options={"crop_to_patches": True},
    ),
    "qwen2-vl": ImageCase(
        "Qwen2VLConfig",
        "Qwen2VLImageProcessorPil",
        text={"rope_parameters": QWEN},
        vision={"embed_dim": 32, "hidden_size": 48, "depth": 2, "num_heads": 2, "patch_size": 8},
        processor_values=QWEN_PIXELS,
        image_token="<|image_pad|>",
    ),
    "qwen2.5-vl": ImageCase(
        "Qwen2_5_VLConfig",
        "Qwen2VLImageProcessorPil",
        text={"rope_parameters": QWEN},
        vision={
            "hidden_size": 32,
            "out_hidden_size": 48,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "intermediate_size": 48,
        },
        processor_values=QWEN_PIXELS,
        image_token="<|image_pad|>",
    ),
    "qwen3-vl": ImageCase(
        "Qwen3VLConfig",
        "Qwen2VLImageProcessorPil",
        text={"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": {**QWEN, "mrope_interleaved": True}},
        vision=QWEN3_VISION,
        processor_values=QWEN_PIXELS,
        image_token="<|image_pad|>",
    ),
    "qwen3-vl-moe": ImageCase(
        "Qwen3VLMoeConfig",
        "Qwen2VLImageProcessorPil",
        text={
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_parameters": {**QWEN, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
        vision=QWEN3_VISION,
        processor_values=QWEN_PIXELS,
        image_token="<|image_pad|>",
    ),
    "qwen3.5": ImageCase(
        "Qwen3_5Config",
        "Qwen2VLImageProcessorPil",
        text=QWEN3_5_TEXT,
        vision=QWEN3_5_VISION,
        processor_values=QWEN_PIXELS,
        image_token="<|image_pad|>",
    ),
    "qwen3.5-moe": ImageCase(
        "Qwen3_5MoeConfig",
        "Qwen2VLImageProcessorPil",
        text={
            **QWEN3_5_TEXT,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
        vision=QWEN3_5_VISION,
        processor_values=QWEN_PIXELS,
        image_token="<|image_pad|>",
    ),
    "idefics3": ImageCase(
        "Idefics3Config", "Idefics3ImageProcessorPil", text={"model_type": "llama"}, processor_values=IDEFICS3_PIXELS
    ),
    "smolvlm-tied": ImageCase(
        "SmolVLMConfig",
        "SmolVLMImageProcessorPil",
        values={"tie_word_embeddings": True},
        text={"model_type": "llama"},
        processor_values=IDEFICS3_PIXELS,
    ),
}


def make_image_model(name: str, folder: Path) -> transformers.PreTrainedModel:
    """In float32, saved in the folder."""
    case = IMAGE_CASES[name]
    is_phi = case.config.startswith("Phi")  # its configuration is that of its text model
    parts = {} if is_phi else {"text_config": {**TEXT, **case.text}, "image_token_id": token_id(case.image_token)}
    config = getattr(transformers, case.config)(
        vision_config={**(case.vision if case.config.startswith("Qwen") else {**VISION, **case.vision})},
        **parts,
        **case.values,
    )
    torch.manual_seed(zlib.crc32(name.encode()))
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
            else:
                parameter.normal_(std=0.8 / parameter[0].numel() ** 0.5)
    model.eval().save_pretrained(folder)
    if case.config == "Qwen3VLMoeConfig":
        _transpose_experts(folder / "model.safetensors")
    if case.config == "Qwen3_5Config":
        _add_drafting_layer(folder / "model.safetensors", model.config.text_config)
    if case.processor:
        getattr(transformers, case.processor)(**case.processor_values).save_pretrained(folder)
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(case.processor_values), encoding="utf-8")
    if is_phi:
        _add_image_adapter(model, folder / "vision-lora")
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(CHARACTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def _transpose_experts(file: Path) -> None:
    """As they are published; transformers reads both layouts, and does not transpose when it saves."""
    tensors = load_file(file)
    experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file({**tensors, **experts}, file, {"format": "pt"})


def _add_drafting_layer(file: Path, config: Any) -> None:
    """The multi-token prediction layer, with the weights of the model's last layer."""
    tensors, last = load_file(file), f"model.language_model.layers.{config.num_hidden_layers - 1}."
    layer = {
        name.replace(last, "mtp.layers.0."): each.clone() for name, each in tensors.items() if name.startswith(last)
    }
    norms = {f"mtp.{name}.weight": torch.rand(config.hidden_size) - 0.5 for name in DRAFTING_NORMS}
    project = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.6 / config.hidden_size**0.5
    save_file({**tensors, **layer, **norms, "mtp.fc.weight": project}, file, {"format": "pt"})


def _add_image_adapter(model: transformers.PreTrainedModel, folder: Path) -> None:
    """The adapter that prompts with images have, as it is published: its tensors lack the prefix of peft."""
    rank, tensors = 4, {}
    for name, parameter in model.model.layers.named_parameters(prefix="model.layers"):
        if parameter.dim() == 2:
            sizes = {"A": (rank, parameter.shape[1]), "B": (parameter.shape[0], rank)}
            for part, size in sizes.items():
                tensor = torch.randn(size) * 0.6 / size[1] ** 0.5
                tensors[f"{name.removesuffix('.weight')}.lora_{part}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = r"model.layers.\d+.((self_attn.(qkv|o)_proj)|(mlp.(gate_up|down)_proj))"
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    model.load_adapter(str(folder), adapter_name="images")


def stacked(made: list[Mapping[str, npt.NDArray[Any]]]) -> dict[str, torch.Tensor]:
    """What Phi-4-multimodal's image processor makes of several images: all have as many crops."""
    num_crops = max(each["image_pixel_values"].shape[1] for each in made)

    def padded(name: str, fill: int) -> torch.Tensor:
        parts = [torch.from_numpy(each[name]) for each in made]
        rest = [part.new_full((1, num_crops - part.shape[1], *part.shape[2:]), fill) for part in parts]
        return torch.cat([torch.cat(both, dim=1) for both in zip(parts, rest, strict=True)])

    sizes = torch.cat([torch.from_numpy(each["image_sizes"]) for each in made])
    masks = padded("image_attention_mask", 1)
    return {"image_pixel_values": padded("image_pixel_values", 0), "image_sizes": sizes, "image_attention_mask": masks}


def picture(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
