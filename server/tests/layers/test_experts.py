"""Mixtures of experts against those of transformers, from checkpoints that it saved, on one rank and on several."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import CASES, HIDDEN, Case, expected, make_model, save
from native_builds import native_ops
from penstock_server.device.attention import ModelAttention
from penstock_server.device.ops import Ops
from penstock_server.device.reference.ops import TorchOps
from penstock_server.device.triton import device as triton_device
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.experts import MixtureOfExperts, MoeSpec, RoutingSpec
from penstock_server.layers.experts.routing import choose_experts
from penstock_server.layers.interpreter import Interpreter
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import Program
from penstock_server.layers.shard import Shard
from penstock_server.layers.step import StepContext
from penstock_server.parallel import RankGroup
from penstock_server.weights.loader import Loader
from penstock_server.weights.location import Location
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from rank_threads import run_ranks
from test_attention import make_batch
from tested_device import triton_skip_reason
from torch import Tensor

CPU = torch.device("cpu")
STEP = StepContext(make_batch([(0, 1)]), {})


@dataclass(frozen=True)
class Names:
    case: Case
    ignored: tuple[str, ...] = (".*",)  # the rest of the model

    def locate(self, parameter: str) -> Location:
        found = self.case.names[parameter.removeprefix("mlp.")]
        return Location(found) if isinstance(found, str) else found


@functools.lru_cache(maxsize=4)
def saved(name: str, dtype: torch.dtype, folder: Path) -> Path:
    return save(CASES[name], make_model(CASES[name], dtype), folder / f"{name}-{dtype}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def load(
    path: Path, case: Case, group: RankGroup, dtype: torch.dtype, exact: bool = True, ops: Ops | None = None
) -> tuple[Callable[[Tensor], Tensor], int]:
    """The layer over rows of one step, and the bytes that it read."""
    layout = WeightLayout(Shard.of(HIDDEN, 64, group, exact))
    table = MixtureOfExperts.parameters(case.spec, "mlp", layout)
    loader = Loader(SafetensorsCheckpoint((path,)), table, Names(case), dtype, CPU)
    context = BuildContext(loader, ops or TorchOps(), layout, ModelAttention(CPU, dtype), 64, block_tokens=16)
    layer, program = MixtureOfExperts.load(case.spec, "mlp", context), Program(HIDDEN)
    loader.finish()
    layer.append_to(program, "residual", "output")
    interpreter = Interpreter(program, context.ops)
    return lambda x: interpreter.run(x, [x], STEP), loader.loaded_bytes


def inputs(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_experts_are_those_of_transformers(name: str, folder: Path) -> None:
    case = CASES[name]
    layer, _ = load(saved(name, torch.float32, folder), case, RankGroup(), torch.float32)
    x = inputs(33, torch.float32)
    want = expected(case, make_model(case), x)
    assert want.std() > 0.05
    torch.testing.assert_close(layer(x), want, atol=1e-5 * float(want.std().clamp(min=1)), rtol=1e-5)
    for row in (0, 7, 32):
        torch.testing.assert_close(layer(x[row : row + 1])[0], want[row], atol=1e-4, rtol=1e-5)
    assert layer(x[:0]).shape == (0, HIDDEN)


@pytest.mark.skipif(triton_skip_reason() is not None, reason=str(triton_skip_reason()))
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if size == 1 or name in ("qwen2-moe", "deepseek-v3") else pytest.mark.slow)
        for name in CASES
        for size in (1, 3)
    ],
)
def test_grouped_kernels_compute_the_experts_of_transformers(
    name: str, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock_server.device.triton.ops import TritonOps

    launch, one_at_a_time = triton_device.launch, threading.Lock()

    def launch_alone(*arguments: Any, **options: Any) -> None:
        with one_at_a_time:  # the interpreter runs in one thread, ranks here in several
            launch(*arguments, **options)

    monkeypatch.setattr(triton_device, "launch", launch_alone)
    case, path = CASES[name], saved(name, torch.float32, folder)
    x = inputs(33, torch.float32)
    with torch.inference_mode():
        want = expected(case, make_model(case), x)

    def of_rank(group: RankGroup) -> Tensor:
        layer, _ = load(path, case, group, torch.float32, ops=TritonOps(CPU, torch.float32))
        return torch.cat([layer(x), layer(x[5:6]), layer(x[:0])])

    for got in run_ranks(size, of_rank):
        torch.testing.assert_close(got[:33], want, atol=1e-5 * float(want.std().clamp(min=1)), rtol=1e-5)
        torch.testing.assert_close(got[33], want[5], atol=1e-4, rtol=1e-5)
        assert len(got) == 34


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_experts_are_those_of_transformers_in_bfloat16(name: str, folder: Path) -> None:
    case = CASES[name]
    layer, _ = load(saved(name, torch.bfloat16, folder), case, RankGroup(), torch.bfloat16)
    x = inputs(33, torch.bfloat16)
    want = expected(case, make_model(case, torch.bfloat16), x)
    got = layer(x)
    assert got.dtype == torch.bfloat16
    assert_close_but_for_ties(got, want)


def assert_close_but_for_ties(got: Tensor, want: Tensor) -> None:
    """In bfloat16, rounding sends a row to another expert if two have almost equal logits: at most a tenth of the
    rows."""
    error = (got.float() - want.float()).abs().amax(dim=-1) / want.float().std()
    assert (error > 4e-2).sum() <= 0.1 * len(error), error.sort().values


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_several_ranks_give_what_one_gives(name: str, size: int, exact: bool, folder: Path) -> None:
    case, path = CASES[name], saved(name, torch.float32, folder)
    x = inputs(19, torch.float32)
    with torch.inference_mode():
        alone, all_bytes = load(path, case, RankGroup(), torch.float32)
        want = alone(x)

    def of_rank(group: RankGroup) -> tuple[Tensor, int]:
        layer, num_bytes = load(path, case, group, torch.float32, exact)
        return layer(x), num_bytes

    ranks = run_ranks(size, of_rank)
    for got, _ in ranks:
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    check_bytes(case, [num_bytes for _, num_bytes in ranks], all_bytes)


def check_bytes(case: Case, ranks: list[int], alone: int) -> None:
    """Every rank reads the router, and its shard of everything else: whole experts, or a part of each."""
    routing, shared, size = case.spec.routing, case.spec.shared_intermediate_size, len(ranks)
    router = 4 * routing.num_experts * (HIDDEN + routing.has_bias + routing.has_correction)
    copied = router + 4 * HIDDEN * case.spec.shared_is_gated
    shared_bytes = 4 * 3 * shared * HIDDEN
    most = -(-routing.num_experts // size) / routing.num_experts if routing.num_experts >= size else 0.4
    # Parts are whole tiles of 8 columns or more if there are enough; output biases may be replicated.
    slack = 4 * (3 * 32 * HIDDEN if shared else 0) + 4 * routing.num_experts * HIDDEN * case.spec.has_bias
    assert max(ranks) <= copied + (alone - copied - shared_bytes) * most + shared_bytes / size + slack
    if not case.spec.has_bias:
        assert sum(ranks) == alone + (size - 1) * copied


@pytest.mark.native
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_native_operators_compute_the_same_bits_as_one(name: str, size: int, folder: Path) -> None:
    case, path = CASES[name], saved(name, torch.bfloat16, folder)
    x = inputs(19, torch.bfloat16)

    def run(group: RankGroup) -> Tensor:
        return load(path, case, group, torch.bfloat16, ops=native_ops(1))[0](x)

    with torch.inference_mode():
        want = run(RankGroup())
    for got in run_ranks(size, run):
        assert torch.equal(got, want)


@pytest.mark.native
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_other_rows(name: str, folder: Path) -> None:
    case = CASES[name]
    ops = native_ops()
    layer, _ = load(saved(name, torch.bfloat16, folder), case, RankGroup(), torch.bfloat16, ops=ops)
    x = inputs(67, torch.bfloat16)
    together = layer(x)
    assert_close_but_for_ties(together, expected(case, make_model(case, torch.bfloat16), x))
    for start, stop in [(0, 1), (1, 2), (5, 12), (30, 67)]:
        assert torch.equal(layer(x[start:stop]), together[start:stop])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoutingSpec(4, 5), "cannot go to 5 of 4 experts; from 1 to 4 are possible"),
        (lambda: RoutingSpec(8, 2, num_groups=3), "8 experts cannot be in 3 equal groups"),
        (lambda: RoutingSpec(8, 5, num_groups=4, top_groups=2), "5 experts cannot be chosen from 2 of 4 groups of 2"),
        (lambda: RoutingSpec(8, 2, scoring="random"), "routing 'random' is not supported; supported: softmax, "),
        (lambda: MoeSpec(RoutingSpec(8, 2), 4, activation="wave"), "activation of experts 'wave' is not supported"),
        (lambda: MoeSpec(RoutingSpec(8, 2), 0), "experts must be at least 1 wide, not 0"),
    ],
)
def test_invalid_specs_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_too_many_ranks_are_refused() -> None:
    group = RankGroup(0, 9)
    with pytest.raises(ConfigError, match="intermediate size of experts 8 cannot be split over 9 ranks"):
        MixtureOfExperts.parameters(MoeSpec(RoutingSpec(2, 1), 8), "mlp", WeightLayout(Shard.of(HIDDEN, 64, group)))


def test_correction_changes_the_choice_but_not_the_weights() -> None:
    spec = RoutingSpec(4, 2, scoring="sigmoid", has_correction=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, experts = choose_experts(logits, torch.tensor([0.0, -1.0, 0.0, 0.9]), spec)
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits[0, [3, 0]].sigmoid()[None])


ROUTINGS = {
    "softmax": RoutingSpec(30, 4, is_wide=True),
    "normalized": RoutingSpec(30, 4, norm_power=1.0, norm_epsilon=0.1, scale=2.5, is_wide=True),
    "chosen": RoutingSpec(30, 4, scoring="softmax-chosen", norm_power=2.0, is_wide=True),
    "groups": RoutingSpec(32, 4, num_groups=8, top_groups=3, is_wide=True),
    "corrected": RoutingSpec(30, 4, has_correction=True, norm_power=1.0, is_wide=True),
    "sigmoid": RoutingSpec(30, 1, scoring="sigmoid", is_wide=True),
    "deepseek-v3": RoutingSpec(
        32,
        4,
        scoring="sigmoid",
        norm_power=1.0,
        norm_epsilon=1e-20,
        scale=2.5,
        has_correction=True,
        num_groups=4,
        top_groups=2,
        group_score="best-two",
        is_wide=True,
    ),
    "power": RoutingSpec(30, 3, scoring="sigmoid", norm_power=3.0, norm_epsilon=0.1, is_wide=True),
    "sparsemixer": RoutingSpec(30, 3, scoring="sparsemixer", jitter=0.2, is_wide=True),
}


@pytest.mark.native
@pytest.mark.parametrize("name", ROUTINGS)
def test_native_routing_is_that_of_torch(name: str) -> None:
    spec, generator = ROUTINGS[name], torch.Generator().manual_seed(1)
    logits = torch.randn(99, spec.num_experts, generator=generator)
    correction = torch.rand(spec.num_experts, generator=generator) if spec.has_correction else None
    weights, experts = native_ops().routing(spec, correction)(logits)
    want_weights, want_experts = choose_experts(logits, correction, spec)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.native
def test_native_routing_refuses_what_does_not_fit() -> None:
    spec, ops = RoutingSpec(8, 2, is_wide=True), native_ops()
    with pytest.raises(ValueError, match="there are 7 corrections for 8 experts"):
        ops.routing(spec, torch.zeros(7))
    with pytest.raises(ValueError, match=r"logits has shape \[1, 7\], must be \[1, 8\]"):
        ops.routing(spec, None)(torch.zeros(1, 7))
    with pytest.raises(TypeError, match=r"must be torch\.float32"):
        ops.routing(spec, None)(torch.zeros(1, 8, dtype=torch.bfloat16))


@torch.inference_mode()
def test_wide_routing_does_not_depend_on_the_place_in_the_batch() -> None:
    """To the bit of float32, where torch's own float32 operators do depend on it."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(30, 512, generator=generator).bfloat16() / 16
    x = torch.randn(257, 512, generator=generator).bfloat16()
    linear, spec = TorchOps().pack_wide(weight), RoutingSpec(30, 4, scoring="sigmoid", is_wide=True)
    together = choose_experts(linear(x), None, spec)
    for row in range(257):
        alone = choose_experts(linear(x[row : row + 1]), None, spec)
        assert torch.equal(alone[0][0], together[0][row])
        assert torch.equal(alone[1][0], together[1][row])


def test_sparsemixer_gives_a_distant_best_expert_the_whole_weight() -> None:
    spec = RoutingSpec(4, 2, scoring="sparsemixer", jitter=0.01)
    weights, experts = choose_experts(torch.tensor([[1.0, 4.0, 3.0, 2.99]]), None, spec)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, torch.tensor([3.0, 2.99]).softmax(0)[0]]]))


def test_storage_does_not_change_the_result(folder: Path) -> None:
    """The same experts compute the same result, whether stored apart or stacked."""
    x = inputs(5, torch.float32)
    with torch.inference_mode():
        apart, stacked = (
            load(saved(name, torch.float32, folder), CASES[name], RankGroup(), torch.float32)[0](x)
            for name in ("mixtral", "mixtral-stacked")
        )
    assert torch.equal(apart, stacked)
    assert replace(CASES["mixtral"].spec, storage="stacked") == CASES["mixtral-stacked"].spec
