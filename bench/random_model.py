"""Models of real sizes whose weights are random: made on the device, or nowhere, as a file that has a header only."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from penstock_server.device.quantized import SUPER_GROUP, QuantFormat, QuantizedMatrix, QuantizedRows
from penstock_server.weights.loader import Loader
from torch import Tensor

PIECE_ROWS = 4096  # rows of a quantized matrix that are made at a time


@dataclass(frozen=True, slots=True)
class Size:
    """A model's config.json, and the loads that it is measured with."""

    config: dict[str, Any]
    streams: Sequence[int]  # numbers of streams, with contexts of `context_tokens`
    prompts: Sequence[int]  # tokens of the prompts that measure the time to the first token
    batches: Sequence[tuple[int, int, int]]  # sequences, prompt tokens, output tokens
    long_prompt: int  # tokens of the prompt that arrives while 64 streams run
    max_sequences: int = 256
    format: QuantFormat | None = None  # format of the layers' weights
    deterministic: bool = False

    @property
    def context_tokens(self) -> int:
        """Context of the sequences that measure decode steps."""
        return min(1024, int(self.config["max_position_embeddings"]) // 4)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
TINY = Size(
    {
        **LLAMA,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    streams=(1, 4),
    prompts=(16, 100),
    batches=((4, 16, 4),),
    long_prompt=200,
    max_sequences=4,
)
SIZES = {
    "llama-8b": Size(
        {
            **LLAMA,
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
        },
        streams=(1, 32, 256),
        prompts=(512, 4096, 32768),
        batches=((256, 1024, 1024), (32, 4096, 128)),
        long_prompt=32768,
    ),
    "qwen3-30b-a3b": Size(
        {
            **LLAMA,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rms_norm_eps": 1e-6,
        },
        streams=(1, 32, 256),
        prompts=(512, 4096, 32768),
        batches=(),
        long_prompt=0,
    ),
    "deepseek-v2-lite": Size(
        {
            **LLAMA,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 163840,
            "rope_theta": 10000.0,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
        streams=(1, 32, 256),
        prompts=(512, 4096, 32768),
        batches=(),
        long_prompt=0,
    ),
    "tiny": TINY,
}
ROW = 1 << 14  # features of a group that is a whole row of any matrix here
FORMATS = {
    "w4": QuantFormat(4, 128, offset=8, number="float16"),  # GPTQ
    "w8": QuantFormat(8, 32, offset=128, number="float16"),  # Q8_0
    "q4k": QuantFormat(4, 32, has_mins=True, number="int8"),  # Q4_K
    "q6k": QuantFormat(6, 16, offset=32, number="int8"),  # Q6_K
    "fp8": QuantFormat(8, ROW, code="e4m3fn", has_narrow_inputs=True),
    "w8a8": QuantFormat(8, ROW, offset=128, has_narrow_inputs=True),
}
SIZES |= {
    f"{name}-{format_name}": replace(
        SIZES[name], format=format_, prompts=SIZES[name].prompts[:2], batches=(), long_prompt=0
    )
    for name in ("llama-8b", "tiny")
    for format_name, format_ in FORMATS.items()
}


SIZES |= {
    f"{name}-deterministic": replace(
        SIZES[name], deterministic=True, prompts=SIZES[name].prompts[:2], batches=(), long_prompt=0
    )
    for name in ("llama-8b", "tiny")
}


def write_model(config: dict[str, Any], folder: Path) -> Path:
    """A model folder whose weight file has a header, and holes instead of data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in _published(model.state_dict()).items():
        header[name] = {"dtype": "BF16", "shape": list(tensor), "data_offsets": [end, end := end + 2 * tensor.numel()]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def _published(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of the tensors as publishers store them: transformers 5 stacks a layer's experts."""
    shapes = {}
    for name, tensor in state.items():
        prefix, is_stacked, rest = name.partition(".experts.")
        if not is_stacked:
            shapes[name] = tensor.shape
            continue
        num_experts, rows, columns = tensor.shape
        for expert in range(num_experts):
            parts = ("gate_proj", "up_proj") if rest == "gate_up_proj" else ("down_proj",)
            for part in parts:
                shapes[f"{prefix}.experts.{expert}.{part}.weight"] = torch.Size((rows // len(parts), columns))
    return shapes


def read_random(loader: Loader, *names: str, dtype: torch.dtype | None = None) -> Tensor:
    """Random weights, made on the device. Replaces `Loader.read`."""
    parameters = [loader.parameters[name] for name in names]
    shapes = [parameter.local_shape for parameter in parameters]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    loader.unfilled.difference_update(names)
    made = torch.ones(shape, dtype=dtype or parameters[0].dtype_in(loader.dtype), device=loader.device)
    loader.loaded_bytes += made.nbytes
    return made if made.dim() == 1 else made.normal_(0, 0.02)


def read_quantized(
    format_: QuantFormat | None, loader: Loader, *names: str
) -> list[tuple[QuantizedMatrix, ...]] | None:
    """Random weights of this format. Replaces `Loader.quantized`. Embedding and output head are dense."""
    if format_ is None or names[0] in ("embedding.weight", "head.weight"):
        return None
    shapes = [loader.parameters[name].local_shape for name in names]
    matrices = tuple(random_matrix(format_, shape[0], shape[1], loader.device) for shape in shapes)
    loader.unfilled.difference_update(names)
    loader.loaded_bytes += sum(matrix.num_bytes for matrix in matrices)
    return [matrices]


def random_matrix(format_: QuantFormat, num_rows: int, num_columns: int, device: torch.device) -> QuantizedMatrix:
    """Made on the device, piece by piece."""

    def numbers(num: int, width: int, value: float, is_there: bool = True) -> Tensor | None:
        return torch.full((num, -(-num_columns // width)), value, device=device) if is_there else None

    def piece(num: int) -> QuantizedRows:
        if format_.code == "e4m3fn":
            codes = torch.randn(num, num_columns, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
            return QuantizedRows(codes, torch.full((num, 1), 0.02, device=device))
        codes = torch.randint(0, 1 << format_.bits, (num, num_columns), dtype=torch.uint8, device=device)
        # Codes have a standard deviation of 0.29 * 2**bits; weights, of 0.02.
        step, middle = 2.0**-4 / (1 << format_.bits), (1 << format_.bits) // 2
        is_integer = format_.number == "int8"
        scale, least = (1.0, -1.0) if is_integer else (step, -middle * step)
        scales = numbers(num, format_.group, scale)
        assert scales is not None
        return QuantizedRows(
            codes,
            scales,
            numbers(num, format_.group, least, format_.has_mins),
            numbers(num, SUPER_GROUP, step, is_integer),
            numbers(num, SUPER_GROUP, middle * step, is_integer and format_.has_mins),
        )

    starts = range(0, num_rows, PIECE_ROWS)
    sizes = [min(PIECE_ROWS, num_rows - start) for start in starts]
    return QuantizedMatrix((num_rows, num_columns), format_, lambda: map(piece, sizes))
