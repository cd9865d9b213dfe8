"""The kernels of experts against their definition in torch, on a GPU or in Triton's interpreter.

The interpreter truncates where it should round to bfloat16, so there the kernels run in float32 and float16 only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from penstock_server.errors import ConfigError
from penstock_server.layers.experts.routing import Router, choose_experts
from penstock_server.layers.experts.spec import MoeSpec, RoutingSpec
from tested_device import DEVICE, triton_skip_reason
from torch import Tensor

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.activation import ACTIVATIONS
from penstock_server.device.triton import grouped as triton_grouped
from penstock_server.device.triton.grouped import Assignment, Gate, GroupedLinear, Tile, weighted_sum
from penstock_server.layers.experts.triton_experts import _gate, assign

pytestmark = [
    pytest.mark.usefixtures("on_tested_device"),
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]
ROWS = 19

ROUTINGS = {
    "mixtral": RoutingSpec(8, 2, norm_power=1.0),
    "qwen": RoutingSpec(60, 4),
    "dbrx": RoutingSpec(16, 4, norm_power=2.0),
    "gpt-oss": RoutingSpec(32, 4, scoring="softmax-chosen"),
    "all": RoutingSpec(5, 5, scoring="softmax-chosen", scale=1.5),
    "deepseek-v2": RoutingSpec(160, 6, scale=16.0, num_groups=8, top_groups=3),
    "deepseek-v3": RoutingSpec(
        96,
        8,
        scoring="sigmoid",
        norm_power=1.0,
        norm_epsilon=1e-20,
        scale=2.5,
        has_correction=True,
        num_groups=6,
        top_groups=3,
        group_score="best-two",
    ),
    "sigmoid": RoutingSpec(40, 3, scoring="sigmoid", norm_power=3.0, norm_epsilon=0.1),
    "phimoe": RoutingSpec(16, 2, scoring="sparsemixer", jitter=0.1),
    "many": RoutingSpec(48, 40),
}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE, dtype)


def assigned(
    logits: Tensor, spec: RoutingSpec, mine: range | None = None, gate: Tensor | None = None, x: Tensor | None = None
) -> tuple[Assignment, Tensor | None]:
    """The assignment, and the correction that it used."""
    correction = random(7, spec.num_experts) * 0.1 if spec.has_correction else None
    linear: Any = None
    mine = mine or range(spec.num_experts)
    counts = torch.zeros(len(mine), dtype=torch.int32, device=DEVICE)
    x = torch.zeros(len(logits), 1, device=DEVICE) if x is None else x
    return assign(logits, Router(linear, correction, spec), mine, counts, x, gate), correction


def pairs_of(assignment: Assignment) -> list[list[int]]:
    """Pairs of each expert on this rank, sorted."""
    return [
        sorted(pairs[:count])
        for pairs, count in zip(assignment.pairs.tolist(), assignment.counts.tolist(), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_get_the_experts_and_weights_of_the_definition(name: str, dtype: torch.dtype) -> None:
    spec = ROUTINGS[name]
    logits = random(1, ROWS, spec.num_experts)
    if dtype == torch.float16:
        # No two logits of a row are equal, so the best experts have one order.
        logits = torch.stack([torch.randperm(spec.num_experts) / 16 for _ in range(ROWS)]).to(DEVICE, dtype)
    found, correction = assigned(logits, spec)
    weights, experts = choose_experts(logits.float(), correction, spec)
    assert torch.equal(found.experts.long(), experts)
    torch.testing.assert_close(found.weights, weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mine", [range(8), range(3, 6), range(7, 8)], ids=str)
def test_every_pair_is_listed_once_under_its_expert(mine: range) -> None:
    found, _ = assigned(random(2, ROWS, 8), ROUTINGS["mixtral"], mine)
    chosen = found.experts.flatten().tolist()
    expected = [[pair for pair, expert in enumerate(chosen) if expert == each] for each in mine]
    assert pairs_of(found) == expected


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "phimoe", "gpt-oss"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.0])
def test_a_row_gets_different_experts_whatever_its_logits_are(name: str, value: float) -> None:
    spec = ROUTINGS[name]
    logits = torch.full((2, spec.num_experts), value, device=DEVICE)
    logits[1, ::2] = 1.0
    found, _ = assigned(logits, spec)
    for row in found.experts.tolist():
        assert len(set(row)) == spec.top_k
        assert all(0 <= expert < spec.num_experts for expert in row)
    assert int(found.counts.sum()) == 2 * spec.top_k


def test_the_gate_of_the_shared_expert_is_the_last_weight() -> None:
    x, gate = random(3, ROWS, 1500) / 30, random(4, 1500)
    found, _ = assigned(random(1, ROWS, 8), ROUTINGS["mixtral"], gate=gate, x=x)
    torch.testing.assert_close(found.weights[:, 2], (x @ gate).sigmoid(), atol=1e-5, rtol=1e-4)


GATES = {
    "": None,
    **{name: ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_new", "tanh", "sigmoid", "linear")},
}


@pytest.mark.parametrize("tile", [Tile(64, 16, 128, 4, 1), Tile(16, 16, 32, 4, 1)], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_products_are_those_of_each_pairs_expert(name: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tile, "of", lambda *_: tile)
    mine, columns, depth = range(2, 7), 40, 100
    weight, bias, x = random(1, len(mine), columns, depth) / 10, random(2, len(mine), columns), random(3, 50, depth)
    assignment, _ = assigned(random(4, 50, 8), ROUTINGS["mixtral"], mine)
    layer = GroupedLinear(weight, bias, Gate(name))
    output = torch.full((100, layer.out_features), 7.0, device=DEVICE)
    layer(x, assignment, output)
    expected = torch.full_like(output, 7.0)
    for index, pairs in enumerate(pairs_of(assignment)):
        result = x[[pair // 2 for pair in pairs]] @ weight[index].T + bias[index]
        if (activation := GATES[name]) is not None:
            gate, up = result.chunk(2, dim=1)
            result = activation(gate) * up
        expected[pairs] = result
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-5)


def test_a_row_is_the_same_in_every_batch_and_with_every_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and inputs are integers, since the interpreter's own sums depend on the place in a tile."""
    spec, weight, x = RoutingSpec(3, 2), random(1, 3, 24, 70).round(), random(3, 90, 70).round()
    logits = random(4, 90, 3)

    def run(rows: slice) -> Tensor:
        assignment, _ = assigned(logits[rows], spec)
        output = x.new_zeros((assignment.num_pairs, 12))
        GroupedLinear(weight, None, Gate("relu"))(x[rows], assignment, output)
        return weighted_sum(output, assignment, None, range(3))

    together = run(slice(0, 90))
    for first, last in ((0, 1), (5, 6), (30, 60)):
        assert torch.equal(run(slice(first, last)), together[first:last])
    monkeypatch.setattr(triton_grouped, "_MAX_PARTS", 1)
    assert torch.equal(run(slice(0, 90)), together)


@pytest.mark.parametrize("shared", ["none", "plain", "gated", "columns"])
@pytest.mark.parametrize("experts", [range(8), range(3, 6)], ids=str)
def test_sums_are_weighted_and_end_the_assignment(experts: range, shared: str) -> None:
    gate, x = random(5, 20), random(6, ROWS, 20)
    assignment, _ = assigned(random(1, ROWS, 8), ROUTINGS["mixtral"], experts, gate if shared == "gated" else None, x)
    results, added = random(2, 2 * ROWS, 30), random(3, ROWS, 90)
    added = added[:, 30:60] if shared == "columns" else added[:, :30].contiguous()
    # Memory of results that no rank-local expert computed.
    mine = (assignment.experts >= experts.start) & (assignment.experts < experts.stop)
    results[~mine.flatten()] = float("nan")
    counted = replace(assignment)
    found = weighted_sum(results, assignment, None if shared == "none" else added, experts)
    expected = (results.view(ROWS, 2, 30) * assignment.weights[:, :2, None]).nan_to_num(0.0).sum(1)
    if shared != "none":
        expected += added * (assignment.weights[:, 2:] if shared == "gated" else 1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not counted.counts.any()


def test_experts_with_an_activation_that_has_no_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts with the activation 'mish' are not supported on GPUs"):
        _gate(MoeSpec(RoutingSpec(4, 2), 32, "mish"))
