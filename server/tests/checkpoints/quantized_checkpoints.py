"""Writes tiny models as quantized checkpoints: GPTQ and AWQ as their papers' tools lay them out, the others with the
libraries that define their formats."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

Tensors = dict[str, Tensor]
FILE = "model.safetensors"
HEADS = ("lm_head", "embed_out")
FEWEST_ROWS = 8  # matrices with fewer are not quantized
# A linear layer's name and weight → its tensors in the checkpoint, and the weight that they stand for.
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def save_quantized(
    model: transformers.PreTrainedModel, folder: Path, options: dict[str, Any], quantize: Quantize
) -> tuple[Path, Path]:
    """Saves the model with the linear weights of its layers and experts quantized, but for matrices of a few rows.
    Returns the folder of the quantized checkpoint, and that of one with the weights that it stands for."""
    stored_folder, dense_folder = folder / "stored", folder / "dense"
    for each in (stored_folder, dense_folder):
        model.save_pretrained(each)
    config = json.loads((stored_folder / "config.json").read_text())
    (stored_folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features >= FEWEST_ROWS
    }
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


def scale_of(width: Tensor, most: float) -> Tensor:
    """The scale of numbers in an interval of this width; of zeros alone, as AutoGPTQ writes it."""
    return torch.where(width > 0, width, 2) / most


def grouped(weight: Tensor, groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups], and the weight that they stand for."""
    most, num_groups = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(weight.shape[0], num_groups), torch.empty(weight.shape[0], num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if symmetric:
            scales[:, group], zeros[:, group] = scale_of(part.abs().amax(1) * 2, most), (most + 1) // 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = scale_of(high - low, most)
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


def gemv(group: int, *, fast: bool) -> Quantize:
    """AWQ's layouts `gemv` and `gemv_fast`, one number at a time."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        (out_features, in_features), num_groups = weight.shape, weight.shape[1] // group
        codes, scales, zeros, exact = grouped(weight, torch.arange(in_features) // group, 4, symmetric=False)
        padding = (0, -num_groups % (8 * max(1, 128 // group)))
        scales, zeros = pad(scales, padding).half(), pad(zeros, padding)
        packed = {"scales": scales}
        if fast:
            mins = (-scales.float() * zeros).half()
            exact = codes * scales[:, :num_groups].float().repeat_interleave(group, 1)
            exact += mins[:, :num_groups].float().repeat_interleave(group, 1)
            words = [[0] * in_features for _ in range(out_features // 4)]
            for row, row_codes in enumerate(codes.int().tolist()):
                for column, code in enumerate(row_codes):
                    # A column's lowest bits change: 4 and 3 become 1 and 0, 2 and 1 become 4 and 3, and 0 becomes 2.
                    place = (column >> 3 & 3) | (column & 1) << 2 | (column >> 1 & 3) << 3
                    number = row % 4 * 64 + (column & 32) + place
                    words[row // 4][column // 64 * 64 + number // 4] |= code << number % 4 * 4
            packed = {
                "qweight": torch.tensor(words, dtype=torch.int32).to(torch.int16),
                "scales": scales.T,
                "scaled_zeros": mins.T,
            }
        else:
            for key, numbers in (("qweight", codes), ("qzeros", zeros)):
                packed[key] = torch.tensor([pack(row, 4) for row in numbers.int().tolist()], dtype=torch.int32)
        return {f"{name}.{key}": tensor for key, tensor in packed.items()}, exact

    return quantize


def marlin(group: int, names: tuple[str, str]) -> Quantize:
    """Marlin's layout, from where its threads find the weights that the instruction mma.m16n8k16 takes. It has whole
    tiles of 64 outputs; other layers stay dense."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        (out_features, in_features), size = weight.shape, weight.shape[1] if group < 0 else group
        if out_features % 64:
            return {f"{name}.weight": weight}, weight
        codes, scales, _, exact = grouped(weight, torch.arange(in_features) // size, 4, symmetric=True)
        rows = codes.int().tolist()
        words = []
        for first in range(0, in_features, 16):
            stream = []
            for thread in range(out_features // 64 * 32):
                for tile in range(4):
                    row, column = thread % 4 * 2, thread // 32 * 64 + tile * 16 + thread % 32 // 4
                    low = [(row + far, column + right) for right in (0, 8) for far in (0, 8)]
                    places = low + [(feature + 1, output) for feature, output in low]
                    stream += [rows[output][first + feature] for feature, output in places]
            words.append(pack(stream, 4))
        # The scales in the order in which threads store results: of 64 outputs, or of 32 if there is one group.
        if size < in_features:
            order = [place // 64 * 64 + place % 64 // 8 + place % 8 * 8 for place in range(out_features)]
        else:
            order = [
                place & ~31 | (place >> 3 & 3) << 1 | (place >> 1 & 3) << 3 | place & 1 for place in range(out_features)
            ]
        tensors = torch.tensor(words, dtype=torch.int32), scales.T.half()[:, order]
        return {f"{name}.{key}": tensor for key, tensor in zip(names, tensors, strict=True)}, exact

    return quantize


def lacking(package: str) -> Quantize:
    """On a machine without the package: the test that wants a layer is skipped."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        pytest.skip(f"needs {package}")

    return quantize


def compressed(
    bits: int,
    strategy: str,
    group: int | None,
    *,
    symmetric: bool,
    kind: str = "int",
    has_static_inputs: bool = False,
    in_order: bool = True,
) -> tuple[dict[str, Any], Quantize]:
    """`quantization_config`, and how the library `compressed-tensors` writes a layer. has_static_inputs: inputs have
    8 bits, and one scale, which is stored. in_order: else groups are of features in activation order, which the library
    no longer writes: it writes the features group by group, and here they move to their places."""
    if importlib.util.find_spec("compressed_tensors") is None:
        return {}, lacking("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=group, symmetric=symmetric)
    inputs = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False) if has_static_inputs else None
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    layout = (
        "float-quantized" if kind == "float" else "int-quantized" if bits == 8 and group is None else "pack-quantized"
    )
    options = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    if not in_order:
        options["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        places = torch.arange(weight.shape[1])
        if not in_order:
            places = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(places)))
            weight = weight[:, places.argsort()]
        rows = weight.unflatten(1, (-1, group)) if group else weight[:, None]
        if strategy == "tensor":
            rows = weight.reshape(1, 1, -1)
        scales, zeros = calculate_qparams(rows.amin(-1), rows.amax(-1), arguments)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        if has_static_inputs:
            state["input_scale"] = torch.tensor([0.02])
        compressor = BaseCompressor.get_value_from_registry(layout)
        tensors = compressor.compress(dict(state), scheme)
        exact = compressor.decompress(dict(tensors), scheme)["weight"][:, places]
        if not in_order:
            assert group is not None
            codes = unpack_from_int32(tensors["weight_packed"], bits, weight.shape)[:, places]
            tensors |= {
                "weight_packed": pack_to_int32(codes.contiguous(), bits),
                "weight_g_idx": (places // group).int(),
            }
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, exact.float()

    return options, quantize


FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def fp4(weight: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers [out, in / 2] uint8 nearest to the weight over its scales [out, in], and what they stand for."""
    levels = torch.tensor(FP4)
    codes = ((weight / spread).abs()[..., None] - levels).abs().argmin(-1)
    exact = levels[codes] * weight.sign() * spread
    codes = (codes + 8 * (weight < 0)).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, exact


def nvfp4(names: tuple[str, str], *, divides: bool, inputs: str = "") -> Quantize:
    """names: of the numbers and of the scale of the whole weight. inputs: the name of a scale of inputs."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        factor = 448 * 6 / weight.abs().max().clamp(min=1e-6)
        scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 * factor).to(torch.float8_e4m3fn)
        whole = factor if divides else 1 / factor
        each = scales.float() / whole if divides else scales.float() * whole
        packed, exact = fp4(weight, each.clamp(min=1e-12).repeat_interleave(16, 1))
        tensors = {names[0]: packed, "weight_scale": scales, names[1]: whole.reshape(1) if divides else whole}
        if inputs:
            tensors[inputs] = torch.tensor([0.01])
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, exact

    return quantize


def compressed_fp4(kind: str, *, inputs: int | None = None) -> tuple[dict[str, Any], Quantize]:
    """`quantization_config` of compressed-tensors, and its layers. kind: nvfp4 or mxfp4. inputs: their bits."""
    group = 16 if kind == "nvfp4" else 32
    values = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group, "symmetric": True}
    if kind == "nvfp4":
        values["strategy"] = "tensor_group"
    activations = None if inputs is None else {**values, "num_bits": inputs, "dynamic": "local"}
    layout = f"{kind}-pack-quantized"
    group_0 = {"targets": ["Linear"], "weights": values, "input_activations": activations, "format": layout}
    options = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head"],
    }
    if kind == "nvfp4":
        inputs_name = "" if inputs is None else "input_global_scale"
        return options, nvfp4(("weight_packed", "weight_global_scale"), divides=True, inputs=inputs_name)

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        exponents = (weight.unflatten(1, (-1, 32)).abs().amax(2).clamp(min=1e-9) / 6).log2().ceil()
        packed, exact = fp4(weight, (2.0**exponents).repeat_interleave(32, 1))
        scales = (exponents + 127).to(torch.uint8)
        return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scales}, exact

    return options, quantize


def modelopt_w4a16(group: int) -> Quantize:
    """Signed numbers of 4 bits, two outputs in a byte."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        scales = weight.unflatten(1, (-1, group)).abs().amax(2).clamp(min=1e-6) / 7
        codes = (weight / scales.repeat_interleave(group, 1)).round().clamp(-8, 7)
        nibbles = codes.to(torch.int8).view(torch.uint8) & 15
        tensors = {f"{name}.weight": nibbles[::2] | nibbles[1::2] << 4, f"{name}.weight_scale": scales}
        return tensors, codes * scales.repeat_interleave(group, 1)

    return quantize


def rescaled(quantize: Quantize) -> Quantize:
    """With `pre_quant_scale`, which multiplies the inputs of the quantized weight."""

    def quantize_rescaled(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(7)) + 0.5
        tensors, exact = quantize(name, weight / scale)
        return {**tensors, f"{name}.pre_quant_scale": scale}, exact * scale

    return quantize_rescaled


def renamed(quantize: Quantize, **names: str) -> Quantize:
    """With other names of a layer's tensors."""

    def quantize_renamed(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, exact = quantize(name, weight)
        parts = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items()}
        return {f"{name}.{names.get(key, key)}": tensor for key, tensor in parts.items()}, exact

    return quantize_renamed


def bits_and_bytes(kind: str, *, nested: bool = False) -> Quantize:
    if importlib.util.find_spec("bitsandbytes") is None:
        return lacking("bitsandbytes")
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


def quark(dtype: str, scheme: str) -> tuple[dict[str, Any], Quantize]:
    """`quantization_config` and layers as Quark exports them, in the layouts that vLLM reads."""
    weight: dict[str, Any] = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": True}
    if dtype == "fp4":
        weight |= {"group_size": 32, "scale_format": "e8m0"}
    values = {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}, "output_tensors": None, "bias": None}
    options = {
        "quant_method": "quark",
        "global_quant_config": values,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*.mlp.gate"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }

    def quantize(name: str, rows: Tensor) -> tuple[Tensors, Tensor]:
        if dtype == "fp4":
            scale = 2.0 ** (rows.unflatten(1, (-1, 32)).abs().amax(2).clamp(min=1e-9) / 6).log2().ceil()
            spread = scale.repeat_interleave(32, 1)
            places = (rows / spread).abs()[..., None] - torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            codes = places.abs().argmin(-1)
            exact = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes] * rows.sign() * spread
            codes = (codes + 8 * (rows < 0)).to(torch.uint8)
            packed, stored = codes[:, ::2] | codes[:, 1::2] << 4, (scale.log2() + 127).to(torch.uint8)
            return {f"{name}.weight": packed, f"{name}.weight_scale": stored}, exact
        most = 448 if dtype == "fp8_e4m3" else 127
        scale = scale_of(rows.abs().amax(1) if scheme == "per_channel" else rows.abs().max(), most)
        spread = scale[:, None] if scale.dim() else scale
        codes = (rows / spread).to(torch.float8_e4m3fn) if most == 448 else (rows / spread).round().to(torch.int8)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
        if most == 127:
            tensors["weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, codes.float() * spread

    return options, quantize


def float8(kind: str, block: int = 32) -> Quantize:
    """kind: "tensor", "row" or "block"."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "block":
            tiles = weight.unfold(0, block, block).unfold(1, block, block)
            scale = scale_of(tiles.abs().amax((-1, -2)), 448)
            spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            stored = {"weight_scale_inv": scale}
        elif kind == "row":
            spread = scale_of(weight.abs().amax(1, keepdim=True), 448)
            stored = {"weight_scale": spread, "input_scale_ub": torch.tensor([1200.0])}
        else:
            spread = scale_of(weight.abs().max(), 448)
            stored = {"weight_scale": spread, "input_scale": torch.tensor(0.1)}
        codes = (weight / spread).to(torch.float8_e4m3fn)
        tensors = {f"{name}.{key}": tensor for key, tensor in {"weight": codes, **stored}.items()}
        return tensors, codes.float() * spread

    return quantize


def hqq(bits: float, group: int, *, axis: int = 1) -> Quantize:
    """As the package `hqq` writes a layer; its zero points are not rounded."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        rows = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        low, high = rows.amin(axis, keepdim=True), rows.amax(axis, keepdim=True)
        scale = scale_of(high - low, round(2**bits - 1)).half()
        zero = (-low / scale).half()
        codes = (rows / scale + zero).round().clamp(0, round(2**bits - 1))
        width, count = {1: (1, 8), 1.58: (2, 4), 2: (2, 4), 3: (3, 10), 4: (4, 2)}.get(bits, (8, 1))
        parts = pad(codes, (0, 0, 0, -len(codes) % count)).int().chunk(count)
        packed = sum(part << (count - 1 - index) * width for index, part in enumerate(parts))
        assert isinstance(packed, Tensor)
        tensors = {
            "W_q": packed if bits == 3 else packed.to(torch.uint8),
            "scale": scale,
            "zero": zero,
            "nbits": torch.tensor(bits, dtype=torch.int32 if bits != 1.58 else torch.float32),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32),
            "shape": torch.tensor(weight.shape),
            "packing": torch.tensor([*b"4bit_u8"], dtype=torch.uint8),
            "view_as_float": torch.tensor(0, dtype=torch.uint8),
            "quant_scale": torch.tensor(0, dtype=torch.uint8),
        }
        exact = (codes - zero.float()) * scale.float()
        return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, exact.reshape(weight.shape)

    return quantize
