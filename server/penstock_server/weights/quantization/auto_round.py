"""Checkpoints of Intel's AutoRound, packed as those of other methods (https://arxiv.org/abs/2309.05516).

`auto_round:auto_gptq` is GPTQ, `auto_round` and `auto_round:gptqmodel` its second version, whose zero points are stored
as they are, `auto_round:auto_awq` is AWQ's `gemm`. Floating-point weights are as in `fp8` and `fp4`. `extra_config` has
the options of layers that differ: by name, or by a regular expression that is found in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.awq import Awq
from penstock_server.weights.quantization.fp4 import EXPONENTS, fp4_weight
from penstock_server.weights.quantization.fp8 import MX_BLOCK, Block, find_scaled
from penstock_server.weights.quantization.gptq import Gptq, GptqOptions
from penstock_server.weights.quantization.stored import INSTEAD, Headers, Kind, Method, StoredWeight, pattern

NAME = "auto-round"
KINDS = (
    Kind(
        "AutoRound packed as GPTQ, AWQ, FP8, MXFP8, MXFP4 or NVFP4, layers that differ (`extra_config`)", (2, 3, 4, 8)
    ),
)
EXTRA = "extra_config"
_SPECIAL = frozenset(r"*+?^$()[]{}|\\")  # what makes a key a regular expression
_DENSE_BITS = 16


def packing_of(options: Mapping[str, Any]) -> str:
    """gptq, gptq_v2, awq or float. Raises ConfigError for a packing that is not supported."""
    # Before `packing_format`, the kernels were named, in the same way.
    stated = options.get("packing_format") or options.get("backend") or "auto"
    parts = str(stated).lower().replace("autoround", "auto_round").split(":")
    kind = str(options.get("data_type") or "int")
    if kind != "int":
        return _float_packing(kind)
    kinds = parts[1:] if parts[0] == "auto_round" else parts
    if parts == ["auto"] or (kinds and kinds[0] in ("auto_gptq", "gptq")):
        return "gptq"
    if kinds and kinds[0] in ("auto_awq", "awq"):
        return "awq"
    if not kinds or kinds[0] in ("gptqmodel", "exllamav2", "tritonv2"):
        return "gptq_v2"
    raise ConfigError(
        f"AutoRound weights in the packing {stated!r} are not supported; supported are auto_round, "
        f"auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq; {INSTEAD}"
    )


def _float_packing(kind: str) -> str:
    if not kind.startswith(("fp", "mx_fp", "nv_fp")):
        raise ConfigError(
            f"quantization_config.data_type is {kind!r}, which is not supported; supported are int, fp, fp8, mx_fp and "
            f"nv_fp; {INSTEAD}"
        )
    return "float"


def read(options: Mapping[str, Any]) -> Method:
    """The method of this checkpoint. Raises ConfigError for an option that is not supported."""
    extra = options.get(EXTRA) or {}
    if not isinstance(extra, dict) or not all(isinstance(own, dict) for own in extra.values()):
        raise ConfigError(f"quantization_config.{EXTRA} is {extra!r}, must be an object of objects")
    packing = packing_of(options)
    if packing == "float":
        return FloatRound()
    if packing == "awq":
        base = Awq.read({**options, "version": "gemm"})
        groups = [(names, None if own is None else Awq.read(own).group) for names, own in _rules(extra, options)]
        return Awq(base.group, base.layout, NAME, tuple(groups), EXTRA)
    rules = tuple((names, None if own is None else GptqOptions.read(own)) for names, own in _rules(extra, options))
    dynamic = Gptq.read({"dynamic": options.get("dynamic"), **_of_one(options)}).dynamic
    # Versions of AutoRound that name the same packing disagree; of symmetric weights, both are read.
    offsets = (1, 0) if packing == "gptq" else (0, 1)
    return Gptq(GptqOptions.read(options), (*rules, *dynamic), offsets, NAME, EXTRA)


def _of_one(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("bits", "group_size", "sym") if key in options}


def _rules(
    extra: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Iterator[tuple[re.Pattern[str], dict[str, Any] | None]]:
    """The entries of `extra_config`, names before regular expressions, with all options of the layers; None: they are
    not quantized. Raises ConfigError for layers with another type of weights."""
    for key, own in sorted(extra.items(), key=lambda item: bool(_SPECIAL & set(item[0]))):
        names = pattern(f".*(?:{key})") if _SPECIAL & set(key) else re.compile(rf"{re.escape(key)}\Z")
        bits = own.get("bits", options.get("bits"))
        is_dense = isinstance(bits, int) and bits >= _DENSE_BITS
        if not is_dense and str(own.get("data_type") or "int") != "int":
            raise ConfigError(
                f"quantization_config.{EXTRA}[{key!r}].data_type is {own['data_type']!r}, but others are integers; "
                f"{INSTEAD}"
            )
        yield names, None if is_dense else {**_of_one(options), **_of_one(own)}


@dataclass(frozen=True, slots=True)
class FloatRound:
    """Floating-point weights, each of the type that its tensors say. Implements `Method`."""

    name: str = NAME

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        found = find_scaled(headers, lambda name: (_block(name, headers), f"{name}.input_scale" in headers))
        for tensor in headers:
            name, _, suffix = tensor.rpartition(".")
            if suffix == "weight_packed":
                found[f"{name}.weight"] = fp4_weight(name, suffix, headers)
        return found


def _block(name: str, headers: Headers) -> Block | None:
    """MXFP8 has exponents."""
    scale = headers.get(f"{name}.weight_scale")
    return MX_BLOCK if scale is not None and scale.dtype in EXPONENTS else None
