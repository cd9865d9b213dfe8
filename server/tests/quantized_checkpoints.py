"""Writes tiny models as quantized checkpoints: GPTQ and AWQ as their papers' tools lay them out, the others with the
libraries that define their formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
FILE = "model.safetensors"
HEADS = ("lm_head", "embed_out")
# A linear layer's name and weight → its tensors in the checkpoint, and the weight that they stand for.
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def save_quantized(
    model: transformers.PreTrainedModel, folder: Path, options: dict[str, Any], quantize: Quantize
) -> tuple[Path, Path]:
    """Saves the model with the linear weights of its layers and experts quantized. Returns the folder of the quantized
    checkpoint, and that of a checkpoint with the weights that it stands for."""
    stored_folder, dense_folder = folder / "stored", folder / "dense"
    for each in (stored_folder, dense_folder):
        model.save_pretrained(each)
    config = json.loads((stored_folder / "config.json").read_text())
    (stored_folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    stored, exact = {}, {}
    for name, tensor in load_file(stored_folder / FILE).items():
        layer = name.removesuffix(".weight")
        if (layer in linears and layer not in HEADS) or ".experts." in name:
            tensors, exact[name] = quantize(layer, tensor.float())
            stored |= {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        else:
            stored[name] = exact[name] = tensor
    save_file(stored, stored_folder / FILE)
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, dense_folder / FILE)
    return stored_folder, dense_folder


def pack(values: list[int], bits: int) -> list[int]:
    """Numbers as one stream of bits, from the lowest on, in words of 32 bits."""
    stream = sum(value << (index * bits) for index, value in enumerate(values))
    words = [(stream >> (32 * index)) & 0xFFFFFFFF for index in range(len(values) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def grouped(weight: Tensor, groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups], and the weight that they stand for."""
    most, num_groups = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(weight.shape[0], num_groups), torch.empty(weight.shape[0], num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if symmetric:
            scales[:, group], zeros[:, group] = part.abs().amax(1) * 2 / most, (most + 1) // 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, most)
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return codes, scales, zeros, (codes - zeros[:, groups]) * scales[:, groups]


def gptq(bits: int, group: int, *, symmetric: bool, in_order: bool = True, version: int = 1) -> Quantize:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        size = weight.shape[1] if group < 0 else group
        groups = torch.arange(weight.shape[1]) // size
        if not in_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(len(groups)))]
        codes, scales, zeros, exact = grouped(weight, groups, bits, symmetric)
        stored_zeros = (zeros - (1 if version == 1 else 0)).int().T.tolist()
        return {
            f"{name}.qweight": torch.tensor([pack(row, bits) for row in codes.int().tolist()], dtype=torch.int32).T,
            f"{name}.qzeros": torch.tensor([pack(row, bits) for row in stored_zeros], dtype=torch.int32),
            f"{name}.scales": scales.T.half(),
            f"{name}.g_idx": groups.int(),
        }, exact

    return quantize


def awq(group: int) -> Quantize:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(rows: Tensor) -> Tensor:
        packed = []
        for row in rows.int().tolist():
            eights = [row[first : first + 8] for first in range(0, len(row), 8)]
            packed.append(pack([eight[place] for eight in eights for place in order], 4))
        return torch.tensor(packed, dtype=torch.int32)

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros, exact = grouped(weight, torch.arange(weight.shape[1]) // group, 4, symmetric=False)
        return {
            f"{name}.qweight": words(codes.T),
            f"{name}.qzeros": words(zeros.T),
            f"{name}.scales": scales.T.half(),
        }, exact

    return quantize


def compressed(
    bits: int, strategy: str, group: int | None, *, symmetric: bool, kind: str = "int"
) -> tuple[dict[str, Any], Quantize]:
    """`quantization_config`, and how the library `compressed-tensors` writes a layer."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    layout = (
        "float-quantized" if kind == "float" else "int-quantized" if bits == 8 and group is None else "pack-quantized"
    )
    options = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        rows = weight.unflatten(1, (-1, group)) if group else weight[:, None]
        if strategy == "tensor":
            rows = weight.reshape(1, 1, -1)
        scales, zeros = calculate_qparams(rows.amin(-1), rows.amax(-1), arguments)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        compressor = BaseCompressor.get_value_from_registry(layout)
        tensors = compressor.compress(dict(state), scheme)
        exact = compressor.decompress(dict(tensors), scheme)["weight"]
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, exact.float()

    return options, quantize


def bits_and_bytes(kind: str, *, nested: bool = False) -> Quantize:
    import bitsandbytes.functional

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "int8":
            codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
            tensors = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, codes * absmax[:, None] / 127
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        tensors = {f"{name}.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        return {f"{name}.weight": packed, **tensors}, bitsandbytes.functional.dequantize_4bit(packed, state).float()

    return quantize


def float8(kind: str, block: int = 32) -> Quantize:
    """kind: "tensor", "row" or "block"."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "block":
            tiles = weight.unfold(0, block, block).unfold(1, block, block)
            scale = tiles.abs().amax((-1, -2)) / 448
            spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            stored = {"weight_scale_inv": scale}
        elif kind == "row":
            spread = weight.abs().amax(1, keepdim=True) / 448
            stored = {"weight_scale": spread, "input_scale_ub": torch.tensor([1200.0])}
        else:
            spread = weight.abs().max() / 448
            stored = {"weight_scale": spread, "input_scale": torch.tensor(0.1)}
        codes = (weight / spread).to(torch.float8_e4m3fn)
        tensors = {f"{name}.{key}": tensor for key, tensor in {"weight": codes, **stored}.items()}
        return tensors, codes.float() * spread

    return quantize
