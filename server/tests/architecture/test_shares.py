"""What the ranks replicate: vectors, small matrices before a split, and KV heads if there are fewer than ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import CASES
from penstock_server.models.registry import read_spec
from shares import num_copied_elements, tables
from test_parity import Made, make, one_thread  # noqa: F401 - fixtures

# Norms and biases of whole results, learned positions, routers, projections around the embedding, and the latents,
# which all heads share.
WHOLE = (
    r"(.*norm.*|(encoder\.)?positions\.weight|project_(in|out)\.weight|.*\.(router|alpha_[pn]).*|"
    r".*\.(q_a|kv_a|shared_gate)\..*)"
)
KV = r".*\.attention\.(k|v)(_norm)?\.(weight|bias)"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_only_expected_parameters_are_replicated(make: Callable[[str], Made], name: str, size: int) -> None:  # noqa: F811
    folder = make(name).folder
    num_kv_heads = fewest_kv_heads(folder)
    for parameter in num_copied_elements(folder, size, exact=True):
        is_kv_head = num_kv_heads < size and re.fullmatch(KV, parameter)
        assert is_kv_head or re.fullmatch(WHOLE, parameter), parameter


def fewest_kv_heads(folder: Path) -> int:
    spec, _ = read_spec(folder)
    return min(getattr(layer.attention, "num_kv_heads", layer.attention.num_heads) for layer in spec.layers)


def test_ranks_hold_whole_experts_if_there_are_enough(make: Callable[[str], Made]) -> None:  # noqa: F811
    name = "layers.0.mlp.experts.down.weight"
    shapes = [table[name].local_shape for table in tables(make("mixtral").folder, 4, exact=True)]
    assert [shape[0] for shape in shapes] == [1, 1, 1, 1]
    shapes = [table[name].local_shape for table in tables(make("mixtral-two-experts").folder, 4, exact=True)]
    assert [shape[::2] for shape in shapes] == [(2, 80)] * 4
    assert sum(shape[1] for shape in shapes) == 48, "both experts, a part of the outputs of each"
