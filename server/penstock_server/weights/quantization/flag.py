"""What --quantize asks for, held against what the checkpoint is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from penstock_server.device.quantized import QuantFormat
from penstock_server.errors import ConfigError
from penstock_server.weights.folder import find_weights
from penstock_server.weights.format import quantization_config
from penstock_server.weights.gguf.header import read_header
from penstock_server.weights.quantization.auto_round import packing_of
from penstock_server.weights.quantization.bitsandbytes import FP4, NF4, STATE, table_of
from penstock_server.weights.quantization.method import quantization_method
from penstock_server.weights.quantization.stored import INSTEAD
from penstock_server.weights.safetensors_header import read_header as read_safetensors_header

# By value of the flag: the methods of checkpoints that it stands for. TGI's kernels for 8-bit floats and GPTQ's Marlin
# serve checkpoints of several methods.
_METHODS = {
    "awq": ("awq", "auto-round"),
    "bitsandbytes": ("bitsandbytes",),
    "bitsandbytes-fp4": ("bitsandbytes",),
    "bitsandbytes-nf4": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "eetq": (),
    "fp8": ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "auto-round"),
    "gptq": ("gptq", "auto-round"),
    "marlin": ("gptq", "awq", "auto-round"),
}
# By value of the flag: the packings of AutoRound, as `packing_of` names them.
_PACKINGS = {
    "awq": ("awq",),
    "fp8": ("float",),
    "gptq": ("gptq", "gptq_v2"),
    "marlin": ("gptq", "gptq_v2", "awq"),
}
# Formats of weights that are quantized at load. Without a table, groups are whole rows.
_INTEGERS = QuantFormat(8, 32, offset=128)
AT_LOAD = {
    "eetq": _INTEGERS,
    "bitsandbytes": _INTEGERS,
    "bitsandbytes-nf4": QuantFormat(4, 64, table=table_of(NF4)[0]),
    "bitsandbytes-fp4": QuantFormat(4, 64, table=table_of(FP4)[0]),
    "fp8": QuantFormat(8, 32, code="e4m3fn", has_narrow_inputs=True),
}
_GGUF_FLOATS = (0, 1, 30)  # F32, F16, BF16


def format_at_load(flag: str, folder: Path, *, dequantize: bool = False) -> QuantFormat | None:
    """The format in AT_LOAD to which the weights of an unquantized checkpoint are to be quantized; None: they stay as
    they are. Raises ConfigError if the flag contradicts the checkpoint or --dequantize, or is not supported."""
    if not flag:
        return None
    if flag not in _METHODS:
        raise ConfigError(f"--quantize {flag} is not supported; supported are {', '.join(_METHODS)}; {INSTEAD}")
    method = _method_of(folder)
    if method is None and flag in AT_LOAD:
        if dequantize:
            raise ConfigError(
                f"--quantize {flag} quantizes this unquantized checkpoint at load, and --dequantize asks for weights "
                "that are not quantized; remove one of them"
            )
        return AT_LOAD[flag]
    if method is None:
        raise ConfigError(
            f"--quantize {flag} needs a checkpoint that is quantized, and this one is not; {', '.join(AT_LOAD)} "
            "quantize one at load"
        )
    found = method if method not in _METHODS[flag] else _contradiction(flag, method, folder)
    if found:
        raise ConfigError(f"--quantize is {flag}, but the checkpoint is quantized as {found}; remove the flag")
    return None


def _method_of(folder: Path) -> str | None:
    """The checkpoint's method; None if it is not quantized."""
    files = find_weights(folder)
    if files.kind != "gguf":
        return quantization_method(quantization_config(folder))
    types = {info.type_number for info in read_header(files.paths[0], with_vocabulary=False).tensors.values()}
    return "gguf" if types - set(_GGUF_FLOATS) else None


def _contradiction(flag: str, method: str, folder: Path) -> str:
    """What the checkpoint is, if the flag names another format of the same method; else empty."""
    if method == "bitsandbytes" and flag != "bitsandbytes":
        names = {name for path in find_weights(folder).paths for name in read_safetensors_header(path)}
        kind = _bitsandbytes_kind(names)
        return "" if flag == f"bitsandbytes-{kind}" else f"bitsandbytes {kind}"
    options = quantization_config(folder)
    if not isinstance(options, dict):
        return ""
    if method == "compressed-tensors" and flag == "fp8":
        found = " and ".join(_formats_but_float8(options))
        return f"compressed-tensors with {found}" if found else ""
    if method == "modelopt":
        algorithm = str(options.get("quant_algo") or "FP8")
        return "" if algorithm.upper().startswith(("FP8", "MXFP8")) else f"modelopt {algorithm}"
    if method == "auto-round":
        packing = packing_of(options)
        return "" if packing in _PACKINGS[flag] else f"auto-round packed as {packing}"
    return ""


def _bitsandbytes_kind(tensors: Collection[str]) -> str:
    return next((kind for kind in ("nf4", "fp4") if any(name.endswith(STATE + kind) for name in tensors)), "int8")


def _formats_but_float8(options: Mapping[str, Any]) -> list[str]:
    """The formats of weights that are no 8-bit floats, by `config_groups` of compressed-tensors."""
    groups = options.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    found = [(each.get("type"), each.get("num_bits", 8)) for each in weights if isinstance(each, dict)]
    others = {(kind, bits) for kind, bits in found if (kind, bits) != ("float", 8)}
    return [f"{'floats' if kind == 'float' else 'integers'} of {bits} bits" for kind, bits in sorted(others, key=str)]
