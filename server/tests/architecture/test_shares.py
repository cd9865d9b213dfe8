"""What the ranks replicate: vectors, small matrices before a split, and KV heads if there are fewer than ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import CASES
from penstock_server.layers.mamba import MambaSpec
from penstock_server.layers.short_conv import ShortConvSpec
from penstock_server.models.registry import read_spec
from shares import num_copied_elements, tables
from tiny_model import save_case

pytestmark = pytest.mark.usefixtures("one_thread")

# Norms and biases of whole results, learned positions, routers, projections around the embedding, and the latents,
# which all heads share.
WHOLE = (
    r"(.*norm.*|(encoder\.)?positions\.weight|project_(in|out)\.weight|.*\.(router|alpha_[pn]).*|"
    r".*\.(q_a|kv_a|shared_gate|rates|down)\..*)"
)
KV = r".*\.(attention|beside)\.((k|v)(_norm)?|net\.(conv\.)?(q|k|b|c))\.(weight|bias)"


@pytest.mark.parametrize("name", CASES)
def test_only_expected_parameters_are_replicated(name: str, tmp_path: Path) -> None:
    folder = save_case(name, tmp_path)
    num_kv_heads = fewest_kv_heads(folder)
    for size in (2, 3, 4):
        for parameter in num_copied_elements(folder, size, exact=True):
            is_kv_head = num_kv_heads < size and re.fullmatch(KV, parameter)
            assert is_kv_head or re.fullmatch(WHOLE, parameter), (size, parameter)


def fewest_kv_heads(folder: Path) -> int:
    spec, _ = read_spec(folder)
    of_channels = (MambaSpec, ShortConvSpec)
    parts = [part for layer in spec.layers for part in layer.memories if not isinstance(part, of_channels)]
    return min((getattr(part, "num_kv_heads", part.num_heads) for part in parts), default=4)


def test_ranks_hold_whole_experts_if_there_are_enough(tmp_path: Path) -> None:
    name = "layers.0.mlp.experts.down.weight"
    shapes = [table[name].local_shape for table in tables(save_case("mixtral", tmp_path / "8"), 4, exact=True)]
    assert [shape[0] for shape in shapes] == [1, 1, 1, 1]
    shapes = [
        table[name].local_shape for table in tables(save_case("mixtral-two-experts", tmp_path / "2"), 4, exact=True)
    ]
    assert [shape[::2] for shape in shapes] == [(2, 80)] * 4
    assert sum(shape[1] for shape in shapes) == 48, "both experts, a part of the outputs of each"
