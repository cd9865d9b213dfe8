"""Damage to any tensor of a quantized layer, in every format: an error that names the tensor, or one that it does not
fit, and its file, or the same weight if the tensor is not needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from penstock_server.errors import ConfigError
from penstock_server.weights.loader import mismatches
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from quantized_checkpoints import Tensors
from safetensors.torch import save_file
from test_quantized_checkpoints import CASES
from torch import Tensor

LAYER = "model.layers.0.mlp.down_proj"
WEIGHT = f"{LAYER}.weight"
NO_GROUPS = f"{LAYER}: groups of"  # what a weight of another size does not have; the options may be wrong, not the file


def with_nan(tensor: Tensor) -> Tensor | None:
    if not tensor.is_floating_point():
        return None
    changed = tensor.float().flatten().clone()
    changed[-1] = float("nan")
    return changed.reshape(tensor.shape).to(tensor.dtype)


def with_other_type(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64) if tensor.is_floating_point() else tensor.float()


# Damages by name: a tensor → the one in its place; None: it cannot be damaged so.
DAMAGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "NaN": with_nan,
    "another type": with_other_type,
    "booleans": lambda tensor: tensor.float().bool(),
    "a row less": lambda tensor: tensor[:-1] if tensor.dim() else None,
    "a row more": lambda tensor: torch.cat([tensor, tensor[:1]]) if tensor.dim() else None,
    "no rows": lambda tensor: tensor[:0] if tensor.dim() else None,
    "one more dimension": lambda tensor: tensor[None],
    "no dimension": lambda tensor: tensor.flatten()[0] if tensor.dim() else None,
}


def read(path: Path, tensors: Tensors, options: object) -> list[Tensor]:
    """The weight as it is stored and as it is dequantized, from a file with these tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    checkpoint = QuantizedCheckpoint(SafetensorsCheckpoint((path,)), options)
    try:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
        if problems := mismatches(shapes, {WEIGHT: (64, 128)}, ()):
            raise ConfigError(f"{path}: {problems[0]}")  # as the loader does
        dense = torch.empty(checkpoint.shape(WEIGHT))
        checkpoint.read(WEIGHT, None, dense)
        matrices = checkpoint.quantized(WEIGHT, None) or ()
        return [dense, *(matrix.whole().dequantized(matrix.format) for matrix in matrices)]
    finally:
        checkpoint.close()


def read_or_refusal(path: Path, tensors: Tensors, options: object) -> list[Tensor] | str:
    """Like `read`, or the error's message."""
    try:
        return read(path, tensors, options)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES)
def test_every_damaged_tensor_is_refused_by_its_name_and_file_or_is_not_needed(case: str, tmp_path: Path) -> None:
    options, quantize = CASES[case]
    tensors, _ = quantize(LAYER, torch.randn(64, 128, generator=torch.Generator().manual_seed(3)))
    whole = read(tmp_path / "whole.safetensors", tensors, options)
    assert all(each.isfinite().all() for each in whole)
    for name, tensor in tensors.items():
        for damage, change in DAMAGES.items():
            changed = change(tensor)
            if changed is None:
                continue
            path = tmp_path / "damaged.safetensors"
            found = read_or_refusal(path, {**tensors, name: changed}, options)
            if isinstance(found, str):
                assert (name if damage == "NaN" else LAYER) in found, f"{damage} in {name}: {found}"
                assert str(path) in found or NO_GROUPS in found, f"{damage} in {name}: {found}"
            elif damage != "no dimension" or "scale" not in name:  # it may be one for the whole weight
                for mine, expected in zip(found, whole, strict=True):
                    assert torch.equal(mine, expected), f"accepted: {damage} in {name}"


@pytest.mark.parametrize("case", CASES)
def test_every_missing_tensor_is_named_or_is_not_needed(case: str, tmp_path: Path) -> None:
    options, quantize = CASES[case]
    tensors, _ = quantize(LAYER, torch.randn(64, 128, generator=torch.Generator().manual_seed(3)))
    whole = read(tmp_path / "whole.safetensors", tensors, options)
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        found = read_or_refusal(tmp_path / "rest.safetensors", rest, options)
        if isinstance(found, str):
            assert name in found or WEIGHT in found, f"{name}: {found}"
        else:
            for mine, expected in zip(found, whole, strict=True):
                assert torch.equal(mine, expected), name
