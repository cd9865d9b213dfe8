"""The operators of `--deterministic`: a row has the same bits alone and in any batch; and where the flag is refused.

On a GPU, or in Triton's interpreter, whose `tl.dot` is wrong for bfloat16: there in float32 and float16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_server.device import choose_ops, flash
from penstock_server.device.attention import choose_attention, preferred_block_tokens
from penstock_server.device.attention.interface import AttentionShape
from penstock_server.device.native import build as native_build
from penstock_server.device.native.build import find_build
from penstock_server.device.triton import device as triton_device
from penstock_server.errors import ConfigError
from penstock_server.inspection.check import check
from tested_device import DEVICE, one_order_of_sums, triton_skip_reason
from torch import Tensor

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton import invariant as triton_invariant
from penstock_server.device.triton.invariant import InvariantOps, Product, Tile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Tile(rows=16, columns=16, depth=16, num_warps=4, num_stages=1)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}
DTYPES = [dtype for dtype in TOLERANCE if DEVICE.type == "cuda" or dtype != torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def with_one_order() -> Iterator[None]:
    with one_order_of_sums():
        yield


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE, dtype)


def applied(product: Product, x: Tensor) -> Tensor:
    matrices, columns, _ = product.weight.shape
    y = torch.empty(x.shape[0], matrices, columns, dtype=x.dtype, device=DEVICE)
    product.apply(x, y)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 5, 7), (3, 64, 16), (20, 40, 100), (33, 17, 64)])
@pytest.mark.parametrize("matrices", [1, 3])
def test_products_equal_torch(
    matrices: int, rows: int, columns: int, depth: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, x = random(1, matrices, columns, depth, dtype=dtype), random(2, rows, matrices, depth, dtype=dtype)
    bias = random(3, matrices, columns, dtype=dtype) if has_bias else None
    expected = torch.einsum("rmd,mcd->rmc", x.float(), weight.float())
    expected = (expected if bias is None else expected + bias.float()).to(dtype)
    for product in (Product.of(weight, bias), Product(weight, bias, SMALL, 32)):
        torch.testing.assert_close(applied(product, x), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiles_of_a_gpu_equal_torch(dtype: torch.dtype) -> None:
    weight, bias, x = random(1, 300, 2500, dtype=dtype), random(2, 300, dtype=dtype), random(3, 130, 2500, dtype=dtype)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).to(dtype)
    found = InvariantOps(DEVICE, dtype).pack_linear(weight, bias)(x)
    torch.testing.assert_close(found, expected, atol=10 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_wide_layers_are_not_rounded_to_the_models_dtype() -> None:
    weight, x = random(1, 9, 40, dtype=torch.float16), random(2, 5, 40, dtype=torch.float16)
    found = InvariantOps(DEVICE, torch.float16).pack_wide(weight)(x)
    torch.testing.assert_close(found, x.float() @ weight.float().T, atol=1e-5, rtol=1e-5)


@cache
def whole_batch(name: str) -> tuple[Product, Tensor, Tensor]:
    """A product, rows, and their results in one batch of tiles and a part of one."""
    matrices, dtype = {"one": (1, torch.float32), "heads": (3, torch.float32), "half": (1, torch.float16)}[name]
    weight, bias = random(1, matrices, 40, 100, dtype=dtype), random(2, matrices, 40, dtype=dtype)
    product, x = Product(weight, bias, SMALL, 32), random(3, 37, matrices, 100, dtype=dtype)
    return product, x, applied(product, x)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["one", "heads", "half"]),
    rows=st.lists(st.integers(0, 36), min_size=1, max_size=40),
    few_programs=st.sampled_from([0, 1 << 30]),
)
def test_a_row_has_the_same_bits_in_every_batch(name: str, rows: list[int], few_programs: int) -> None:
    """At any place of any batch, one row may come twice; with a program for each split, or one for all."""
    product, x, whole = whole_batch(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_invariant, "_FEW_PROGRAMS", few_programs)
        assert torch.equal(applied(product, x[rows]), whole[rows])


@pytest.mark.parametrize("num_rows", [1, 2, 17, 130])
def test_many_splits_give_the_bits_of_one_program(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = InvariantOps(DEVICE, torch.float32).pack_linear(random(1, 70, 3000), random(2, 70))
    x = random(3, num_rows, 3000)
    split = linear(x)
    monkeypatch.setattr(triton_invariant, "_MAX_PARTIAL_BYTES", 0)
    assert torch.equal(linear(x), split)


def test_a_row_of_any_stride_has_the_same_bits() -> None:
    linear = InvariantOps(DEVICE, torch.float32).pack_linear(random(1, 20, 48), None)
    wide = random(2, 5, 96)
    whole = linear(wide[:, :48])
    assert torch.equal(linear(wide[2:3, :48]), whole[2:3])
    assert linear(wide[:0, :48]).shape == (0, 20)


def test_heads_are_read_and_written_in_place() -> None:
    weight, fused = random(1, 4, 24, 12), random(2, 7, 4 * 12 + 5)
    x, wide = fused[:, 5:].unflatten(1, (4, 12)), torch.zeros(7, 4, 30, device=DEVICE)
    apply = InvariantOps(DEVICE, torch.float32).pack_heads(weight)
    apply(x, wide[..., :24])
    torch.testing.assert_close(wide[..., :24], torch.einsum("rhi,hoi->rho", x, weight), atol=1e-4, rtol=1e-4)
    assert not wide[..., 24:].any()


SHAPE = AttentionShape(4, 2, 16, 0.3, 256)


def test_flash_attention_is_ruled_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flash, "unavailable_reason", lambda *_: None)
    with caplog.at_level(logging.INFO):
        assert choose_attention(SHAPE, CUDA, torch.bfloat16, deterministic=True).name == "triton"
    expected = "not flash: it cuts a context into a number of splits that depends on the batch (--deterministic)"
    assert expected in caplog.text
    assert preferred_block_tokens(CUDA, torch.bfloat16) == 256
    assert preferred_block_tokens(CUDA, torch.bfloat16, deterministic=True) == 64
    with pytest.raises(ConfigError, match=r"--attention flash cannot be used.*\(--deterministic\)"):
        choose_attention(SHAPE, CUDA, torch.bfloat16, name="flash", deterministic=True)


def test_what_cannot_be_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no attention is deterministic for .*heads have 300 elements"):
        choose_attention(replace(SHAPE, head_dim=300), CUDA, torch.bfloat16, deterministic=True)
    monkeypatch.setattr(native_build, "find_build", lambda *_: None)
    with pytest.raises(ConfigError, match=r"--deterministic needs the native operators .* not available for float32"):
        choose_ops(CPU, torch.float32, deterministic=True)
    monkeypatch.setattr(triton_device, "unavailable_reason", lambda device: "there is no C compiler")
    with pytest.raises(ConfigError, match=r"--deterministic needs Triton kernels, .*: there is no C compiler"):
        choose_ops(CUDA, torch.bfloat16, deterministic=True)


def test_a_gpu_gets_its_operators_and_a_cpu_says_that_it_always_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_ops(CUDA, torch.bfloat16, deterministic=True), InvariantOps)
        assert not isinstance(choose_ops(CUDA, torch.bfloat16), InvariantOps)
        if find_build(CPU, torch.bfloat16) is not None:
            choose_ops(CPU, torch.bfloat16, deterministic=True)
            assert "deterministic: always so with the native operators on a CPU" in caplog.text
    assert "one order of sums for any batch" in caplog.text


def test_check_says_whether_the_flag_can_be_used(embedded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(embedded_folder)
    if find_build(CPU, torch.bfloat16) is not None:
        files = check(folder, None, 1, "bfloat16", 0.9, deterministic=True).files
        assert not files.problems
        assert any("same bits in every batch" in note for note in files.notes)
    monkeypatch.setattr(native_build, "find_build", lambda *_: None)
    assert not check(folder, None, 1, "bfloat16", 0.9).files.problems
    (problem,) = check(folder, None, 1, "bfloat16", 0.9, deterministic=True).files.problems
    assert "--deterministic needs the native operators" in problem
