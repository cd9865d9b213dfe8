"""The method of a checkpoint's quantization, from `quantization_config` in its config.json."""

from __future__ import annotations

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.awq import Awq
from penstock_server.weights.quantization.bitsandbytes import BitsAndBytes
from penstock_server.weights.quantization.compressed_tensors import CompressedTensors
from penstock_server.weights.quantization.fp8 import Fp8
from penstock_server.weights.quantization.gptq import Gptq
from penstock_server.weights.quantization.mxfp4 import Mxfp4
from penstock_server.weights.quantization.stored import Method, Read

SUPPORTED = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4")


def quantization_method(options: object) -> str | None:
    """The name of the method in a `quantization_config`; None if there is none. Raises ConfigError if it is not an
    object."""
    if not options:
        return None
    if not isinstance(options, dict):
        raise ConfigError(f"quantization_config is {options!r}, must be an object")
    is_bitsandbytes = options.get("load_in_4bit") or options.get("load_in_8bit")
    return str(options.get("quant_method", "bitsandbytes" if is_bitsandbytes else "unknown"))


def method_of(options: object, read: Read) -> Method:
    """options: the value of `quantization_config`. Raises ConfigError for a method or an option that is not
    supported."""
    name = quantization_method(options)
    assert isinstance(options, dict)
    if name not in SUPPORTED:
        raise ConfigError(
            f"the checkpoint is quantized with {name!r}, which is not supported; supported are {', '.join(SUPPORTED)}, "
            "GGUF files, and weights in float32, float16 and bfloat16"
        )
    if name == "gptq":
        return Gptq.read(options)
    if name == "awq":
        return Awq.read(options)
    if name == "compressed-tensors":
        return CompressedTensors.read(options)
    if name == "bitsandbytes":
        return BitsAndBytes(read)
    if name == "mxfp4":
        return Mxfp4()
    return Fp8.read(options)
