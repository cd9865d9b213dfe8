"""The method of a checkpoint's quantization, from `quantization_config` in its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    marlin,
    modelopt,
    mxfp4,
    quark,
    torchao,
)
from penstock_server.weights.quantization.awq import Awq
from penstock_server.weights.quantization.bitsandbytes import BitsAndBytes
from penstock_server.weights.quantization.compressed_tensors import CompressedTensors
from penstock_server.weights.quantization.exclusion import check_exclusions
from penstock_server.weights.quantization.fp8 import Fp8
from penstock_server.weights.quantization.gptq import Gptq
from penstock_server.weights.quantization.hqq import Hqq
from penstock_server.weights.quantization.marlin import Marlin, is_marlin
from penstock_server.weights.quantization.modelopt import ModelOpt
from penstock_server.weights.quantization.mxfp4 import Mxfp4
from penstock_server.weights.quantization.quark import Quark
from penstock_server.weights.quantization.stored import INSTEAD, Headers, Method, Read, ReadMetadata, StoredWeight
from penstock_server.weights.quantization.torchao import Torchao

# By `quant_method`.
_METHODS: Mapping[str, Callable[[Mapping[str, Any], Read, ReadMetadata], Method]] = MappingProxyType(
    {
        "auto-round": lambda options, *_: auto_round.read(options),
        "awq": lambda options, *_: Marlin.read(options, "awq") if is_marlin(options) else Awq.read(options),
        "bitsandbytes": lambda _options, read, _: BitsAndBytes(read),
        "compressed-tensors": lambda options, read, _: CompressedTensors.read(options, read),
        "fbgemm_fp8": lambda options, *_: Fp8.read(options, "fbgemm_fp8"),
        "fp8": lambda options, *_: Fp8.read(options, "fp8"),
        "gptq": lambda options, *_: Marlin.read(options, "gptq") if is_marlin(options) else Gptq.read(options),
        "hqq": lambda _options, read, _: Hqq(read),
        "modelopt": lambda options, *_: ModelOpt.read(options),
        "mxfp4": lambda *_: Mxfp4(),
        "quark": lambda options, *_: Quark.read(options),
        "torchao": lambda _options, read, read_metadata: Torchao(read, read_metadata),
    }
)
# Other names of methods, with `-` for `_`.
_ALIASES = {
    "autoawq": "awq",
    "awq-marlin": "awq",
    "bits-and-bytes": "bitsandbytes",
    "bitsandbytes-4bit": "bitsandbytes",
    "bitsandbytes-8bit": "bitsandbytes",
    "bnb": "bitsandbytes",
    "fbgemm-fp8": "fbgemm_fp8",
    "finegrained-fp8": "fp8",
    "float8": "fp8",
    "gptq-marlin": "gptq",
    "gptqmodel": "gptq",
    "inc": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt-fp4": "modelopt",
    "modelopt-fp8": "modelopt",
    "modelopt-mixed": "modelopt",
    "modelopt-mxfp8": "modelopt",
    "ptpc-fp8": "fp8",
    "sparseml": "compressed-tensors",
}
KINDS = (
    *gptq.KINDS,
    *awq.KINDS,
    *marlin.KINDS,
    *auto_round.KINDS,
    *compressed_tensors.KINDS,
    *bitsandbytes.KINDS,
    *fp8.KINDS,
    *mxfp4.KINDS,
    *modelopt.KINDS,
    *quark.KINDS,
    *torchao.KINDS,
    *hqq.KINDS,
)


def quantization_method(options: object) -> str | None:
    """The name of the method in a `quantization_config`; None if there is none. Raises ConfigError if it is not an
    object."""
    if not options:
        return None
    if not isinstance(options, dict):
        raise ConfigError(f"quantization_config is {options!r}, must be an object")
    # `method` is GPTQModel's other name. An enum of Python may have been written with its class.
    name = str(options.get("quant_method") or options.get("method") or _implied(options))
    plain = name.lower().removeprefix("quantizationmethod.").replace("_", "-")
    return _ALIASES.get(plain, plain if plain in _METHODS else name)


def _implied(options: Mapping[str, Any]) -> str:
    """The method of options that do not name it."""
    if options.get("load_in_4bit") or options.get("load_in_8bit"):
        return "bitsandbytes"
    return "modelopt" if "quant_algo" in options or options.get("quant_library") == "modelopt" else "unknown"


def has_four_bit_inputs(options: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with these options is made for inputs of 4 bits too."""
    groups = options.get("config_groups")
    inputs = [group.get("input_activations") for group in groups.values()] if isinstance(groups, dict) else []
    bits = {each.get("num_bits") for each in inputs if isinstance(each, dict)} | {options.get("act_bits")}
    layers = options.get("quantized_layers")
    algorithms = [options, *(layers.values() if isinstance(layers, dict) else [])]
    return 4 in bits or any(each.get("quant_algo") in ("NVFP4", "NVFP4_AWQ", "MXFP4") for each in algorithms)


def quantized_weights(
    options: object, headers: Headers, read: Read, read_metadata: ReadMetadata = dict
) -> tuple[str, dict[str, StoredWeight]]:
    """The method's name, and as `Method.find` the quantized weights among these tensors. options: the value of
    `quantization_config`. Raises ConfigError for a method or an option that is not supported, and as `Method.find`."""
    method = method_of(options, read, read_metadata)
    found = method.find(headers)
    assert isinstance(options, dict)
    check_exclusions(options, found)
    return method.name, found


def method_of(options: object, read: Read, read_metadata: ReadMetadata = dict) -> Method:
    """options: the value of `quantization_config`. Raises ConfigError for a method or an option that is not
    supported."""
    name = quantization_method(options)
    assert name is not None
    assert isinstance(options, dict)
    if name not in _METHODS:
        raise ConfigError(
            f"the checkpoint is quantized with {name!r}, which is not supported; supported are "
            f"{', '.join(_METHODS)} and GGUF files; {INSTEAD}"
        )
    return _METHODS[name](options, read, read_metadata)
