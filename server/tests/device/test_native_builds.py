"""Every build of the native kernels that this machine runs: against torch, and the same bits alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_builds import CPU, all_builds, build
from penstock_server.device.activation import ACTIVATIONS, SoftCap, Xielu
from penstock_server.device.attention.interface import AttentionMask, AttentionShape, StepBatch
from penstock_server.device.native import build as native_build
from penstock_server.device.native.attention import NativeAttention
from penstock_server.device.native.build import NativeBuild, find_build
from penstock_server.device.native.ops import NativeOps
from penstock_server.device.ops import NormVariant
from penstock_server.device.reference.attention import ReferenceAttention
from penstock_server.device.reference.ops import TorchOps
from penstock_server.errors import ConfigError
from torch import Tensor

pytestmark = pytest.mark.native

BUILDS = all_builds()
AMX = ("amx_tile", "amx_bf16", "amx_int8")
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}

FUNCTIONS = ACTIVATIONS | {"soft cap": SoftCap(3.0), "xielu": Xielu(torch.tensor([0.8]), torch.tensor([1.3]))}


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(request.param)


def random(ops: NativeOps, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(ops.build.dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """expected: in float32, before it is rounded."""
    limit = 4 * EPSILON[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=limit, atol=limit)


def test_a_build_is_what_it_is_called(ops: NativeOps) -> None:
    module, isa = ops.build.module, ops.build.isa
    assert (module.ISA, f"torch.{module.DTYPE}") == (
        "avx512-bf16" if isa.may_use_amx else isa.name,
        str(ops.build.dtype),
    )
    assert ops.build.kernels().uses_amx == isa.may_use_amx


@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (17, 3), (100, 31), (960, 576)])
def test_linear_layers_equal_torch_for_every_number_of_rows(
    ops: NativeOps, out_features: int, in_features: int
) -> None:
    weight = random(ops, 2 * out_features, in_features, scale=in_features**-0.5)
    bias, x = random(ops, 2 * out_features), random(ops, 33, in_features)
    plain, gated = ops.pack_linear(weight, bias), ops.pack_gate_up(weight, bias)
    product = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert_near(plain(x), product)
    gate, up = plain(x).float().chunk(2, dim=-1)
    assert_near(gated(x), torch.nn.functional.silu(gate).to(x.dtype).float() * up)
    for layer in (plain, gated):
        together = layer(x)
        for rows in (slice(0, 1), slice(7, 8), slice(5, 14), slice(32, 33)):
            assert torch.equal(layer(x[rows]), together[rows])


def test_a_tied_head_looks_up_its_rows(ops: NativeOps) -> None:
    weight, ids = random(ops, 50, 33), torch.tensor([49, 0, 17])
    assert torch.equal(ops.pack_tied(weight)[1](ids), weight[ids])


@pytest.mark.parametrize("variant", [NormVariant(1e-5), NormVariant(1e-6, is_wide=True), NormVariant(1e-5, "layer")])
@pytest.mark.parametrize("dim", [1, 100, 576])
def test_norms_equal_torch(ops: NativeOps, variant: NormVariant, dim: int) -> None:
    weight, bias = random(ops, dim), random(ops, dim) if variant.kind == "layer" else None
    norm, reference = (each.pack_norm(weight, bias, variant) for each in (ops, TorchOps()))
    x = random(ops, 9, dim)
    assert_near(norm(x), reference(x).float())
    assert torch.equal(norm(x[4:5]), norm(x)[4:5])
    residual, same = x.clone(), x.clone()
    assert_near(norm(x, residual), reference(x, same).float())
    assert torch.equal(residual, same)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 20])
def test_rotary_embedding_equals_torch(ops: NativeOps, interleaved: bool, rotary_dim: int) -> None:
    angles = torch.arange(40)[:, None] * torch.linspace(0.1, 1, rotary_dim // 2)
    positions, (queries, keys) = torch.arange(39, 30, -1), (random(ops, 9, heads, 64) for heads in (4, 2))
    expected = queries.float(), keys.float()
    ops.rotate(queries, keys, angles.cos(), angles.sin(), positions, interleaved=interleaved)
    TorchOps().rotate(*expected, angles.cos(), angles.sin(), positions, interleaved=interleaved)
    for actual, wanted in zip((queries, keys), expected, strict=True):
        assert_near(actual, wanted)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_activations_equal_torch_and_depend_on_the_element_only(ops: NativeOps, function: object) -> None:
    assert callable(function)
    x = random(ops, 7, 2 * 333, scale=3.0)
    native = ops.elementwise(function)
    assert_near(native(x), function(x.float()))
    assert torch.equal(native(x[3:4, 100:133]), native(x)[3:4, 100:133])
    assert torch.equal(ops.gated(function)(x), native(x[:, :333]) * x[:, 333:])


def test_the_greatest_logit_is_chosen_and_its_logprob_is_that_of_torch(ops: NativeOps) -> None:
    logits = random(ops, 6, 5003, scale=4.0)
    logits[1, [7, 9]] = 50.0
    logits[2, 4999] = float("nan")
    masks = np.full((1, -(-5003 // 32)), 0, dtype=np.int32)
    masks[0, 3] = 0b1010
    ids, logprobs = ops.argmax_logprob(logits, np.array([5]), masks)
    expected = logits.float()
    expected[5, [id_ for id_ in range(5003) if id_ not in (97, 99)]] = float("-inf")
    for row in (0, 1, 3, 4, 5):
        assert ids[row] == expected[row].argmax()
        torch.testing.assert_close(logprobs[row], expected[row].log_softmax(0)[ids[row]], rtol=1e-5, atol=1e-5)
    assert ids[2] == -1
    assert ids[1] == 7
    alone = ops.argmax_logprob(logits[3:4])
    assert (alone[0][0], alone[1][0]) == (ids[3], logprobs[3])


def one_sequence(positions: range, sample_rows: list[int]) -> StepBatch:
    """Tokens at these positions, in blocks 0, 1, ..."""
    at = torch.tensor(positions)
    return StepBatch(
        token_ids=at,
        positions=at,
        slots=at,
        query_starts=torch.tensor([0, len(positions)], dtype=torch.int32),
        context_lens=torch.tensor([positions.stop], dtype=torch.int32),
        block_tables=torch.arange(40, dtype=torch.int32)[None],
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        max_query_tokens=len(positions),
        max_context_tokens=positions.stop,
    )


@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(window=70)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_attention_equals_the_reference_in_chunks_and_at_once(
    ops: NativeOps, mask: AttentionMask, head_dim: int
) -> None:
    shape = AttentionShape(4, 2, head_dim, head_dim**-0.5, 16, mask=mask)
    attention, reference = NativeAttention(shape, ops.build), ReferenceAttention(shape, CPU, torch.float32, None)
    queries, keys, values = (random(ops, 300, heads, head_dim) for heads in (4, 2, 2))
    found = []
    for chunks in ([range(300)], [range(33), range(33, 34), range(34, 299), range(299, 300)]):
        cache = attention.allocate(40)
        outputs = []
        for chunk in chunks:
            batch, rows = one_sequence(chunk, []), slice(chunk.start, chunk.stop)
            attention.write_kv(cache, keys[rows], values[rows], batch.slots)
            outputs.append(attention.attend(queries[rows], cache, attention.prepare(batch)))
        found.append(torch.cat(outputs))
    assert torch.equal(*found)
    batch, cache = one_sequence(range(300), []), reference.allocate(40)
    reference.write_kv(cache, keys.float(), values.float(), batch.slots)
    assert_near(found[0], reference.attend(queries.float(), cache, reference.prepare(batch)))


def test_an_instruction_set_that_is_not_here_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock_kernels

    slowest = penstock_kernels.runnable("bfloat16")[-1]
    monkeypatch.setattr(penstock_kernels, "runnable", lambda dtype: [slowest])
    native_build.find_build.cache_clear()
    try:
        with pytest.raises(ConfigError, match=rf"--cpu-isa other cannot be used: .* run here are {slowest.name}$"):
            find_build(CPU, torch.bfloat16, "other")
        chosen = find_build(CPU, torch.bfloat16)
        assert chosen is not None
        assert chosen.isa == slowest
    finally:
        native_build.find_build.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "hidden", "expected"),
    [
        ("GenuineIntel", (), ["amx", "avx512-vnni", "avx512-bf16", "avx512", "avx2", "portable"]),
        ("GenuineIntel", AMX, ["avx512-vnni", "avx512-bf16", "avx512", "avx2", "portable"]),
        ("GenuineIntel", (*AMX, "avx512_fp16"), ["avx512-bf16", "avx512-vnni", "avx512", "avx2", "portable"]),
        ("AuthenticAMD", AMX, ["avx512-bf16", "avx512-vnni", "avx512", "avx2", "portable"]),
        ("GenuineIntel", (*AMX, "avx512_bf16"), ["avx512-vnni", "avx512", "avx2", "portable"]),
    ],
)
def test_fma_comes_before_bf16_instructions_that_are_slower(
    vendor: str, hidden: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock_kernels import isa

    avx512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
    flags = frozenset({*avx512, "avx512_vnni", "avx512_bf16", "avx512_fp16", *AMX} - {*hidden})
    monkeypatch.setattr(isa, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(isa, "cpu_flags", lambda: flags)
    assert [each.name for each in isa.fastest_first()] == expected


def test_the_fastest_build_is_chosen_and_others_by_their_name() -> None:
    here = [each.isa.name for each in BUILDS if each.dtype == torch.bfloat16]
    assert build().isa.name == here[0]
    for name in here:
        chosen = find_build(CPU, torch.bfloat16, name)
        assert isinstance(chosen, NativeBuild)
        assert chosen.isa.name == name


def test_no_kernels_are_for_a_gpu() -> None:
    assert find_build(torch.device("cuda"), torch.bfloat16) is None
