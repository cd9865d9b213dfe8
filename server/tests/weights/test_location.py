"""Parameters that share a tensor in the checkpoint: each part is read exactly, in every published layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.location import Location, Strip, fused
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from safetensors.torch import save_file
from torch import Tensor


@given(
    blocks=st.integers(1, 4),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    transposed=st.booleans(),
    bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
)
@settings(max_examples=60, deadline=None)
def test_a_part_of_a_fused_parameter_holds_only_its_own_rows(
    blocks: int, widths: list[int], transposed: bool, bounds: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    parts = {f"p{i}": torch.randn(blocks, width, 3) for i, width in enumerate(widths)}
    tensor = torch.cat(list(parts.values()), dim=1).flatten(0, 1)
    rows = {name: part.shape[0] * part.shape[1] for name, part in parts.items()}
    locations = fused("x", "t", rows, blocks, transposed=transposed)
    checkpoint = saved(tmp_path_factory, t=tensor.t().contiguous() if transposed else tensor)
    for name, part in parts.items():
        parameter = part.flatten(0, 1)
        shape = tuple(parameter.shape)
        first, stop = (min(bound, shape[0]) for bound in bounds)
        location = locations[f"x.{name}"]
        assert location.tensor_shape(shape) == checkpoint.shape("t")
        assert torch.equal(read(location, checkpoint, shape, Part(0, range(first, stop))), parameter[first:stop])
        assert torch.equal(read(location, checkpoint, shape, None), parameter)


def test_alternating_rows_are_separated(tmp_path_factory: pytest.TempPathFactory) -> None:
    tensor = torch.randn(4, 10, 3)  # the layout of gpt-oss's gate and up
    checkpoint = saved(tmp_path_factory, t=tensor)
    up = Location("t", strip=Strip(1, 1, 2), dim=1)
    assert up.tensor_shape((4, 5, 3)) == (4, 10, 3)
    assert torch.equal(read(up, checkpoint, (4, 5, 3), Part(1, range(1, 4))), tensor[:, 3:8:2])
    assert read(up, checkpoint, (4, 5, 3), Part(1, range(2, 2))).shape == (4, 0, 3)


def test_a_parameter_may_consist_of_a_tensor_per_expert(tmp_path_factory: pytest.TempPathFactory) -> None:
    tensors = {f"experts.{i}.w": torch.randn(6, 4) for i in range(5)}
    checkpoint = saved(tmp_path_factory, **tensors)
    location = Location("experts.{e}.w")
    whole = torch.stack(list(tensors.values()))
    assert location.names((5, 6, 4)) == list(tensors)
    assert torch.equal(read(location, checkpoint, (5, 6, 4), None), whole)
    assert torch.equal(read(location, checkpoint, (5, 6, 4), Part(0, range(1, 3))), whole[1:3])
    assert torch.equal(read(location, checkpoint, (5, 6, 4), Part(1, range(2, 5))), whole[:, 2:5])
    transposed = Location("experts.{e}.w", transposed=True)
    assert torch.equal(read(transposed, checkpoint, (5, 4, 6), Part(2, range(2, 5))), whole.transpose(1, 2)[:, :, 2:5])


def saved(tmp_path_factory: pytest.TempPathFactory, **tensors: Tensor) -> SafetensorsCheckpoint:
    path = tmp_path_factory.mktemp("fused") / "model.safetensors"
    save_file(tensors, path)
    return SafetensorsCheckpoint((path,))


def read(location: Location, checkpoint: SafetensorsCheckpoint, shape: tuple[int, ...], part: Part | None) -> Tensor:
    out = torch.full(shape if part is None else part.shape_of(shape), float("nan"))
    location.read(checkpoint, shape, part, out)
    return out
