"""What the prediction counts, against the arithmetic of the models' sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from predict import attended, predict
from prediction import DEVICES, decode_name, floor_s, prompt_name, total
from random_model import SIZES

CONTEXT, LAYERS = 1024, 32
HEAD = 4096 * 128256
# Weights of Llama-3 8B's matrices without the input embedding: queries, keys and values, their projection, the MLP.
PARAMETERS = LAYERS * 4096 * (6144 + 4096 + 3 * 14336) + HEAD


@pytest.fixture(scope="module")
def llama() -> dict[str, Any]:
    return predict(replace(SIZES["llama-8b"], streams=(1, 8), prompts=(512,)))


def test_a_decode_step_reads_every_weight_and_the_context(llama: dict[str, Any]) -> None:
    for num in (1, 8):
        kernels = llama[decode_name(num)]["kernels"]
        products, attention = kernels["aten.linear"], kernels["attend_kernel"]
        assert products["flops"] == 2 * PARAMETERS * num
        assert 1 <= products["bytes"] / (2 * PARAMETERS) < 1.01
        kv_bytes = LAYERS * num * CONTEXT * 8 * 256 * 2
        assert 1 <= attention["bytes"] / kv_bytes < 1.05
        assert attention["flops"] == LAYERS * num * CONTEXT * 32 * 4 * 128


def test_a_layer_of_a_decode_step_is_ten_launches(llama: dict[str, Any]) -> None:
    kernels = llama[decode_name(8)]["kernels"]
    of_layers = {name: cost["launches"] // LAYERS for name, cost in kernels.items() if cost["launches"] >= LAYERS}
    products = of_layers.pop("aten.linear")
    assert products + sum(of_layers.values()) == 10


def test_a_prompt_computes_every_pair_of_a_query_and_a_key(llama: dict[str, Any]) -> None:
    kernels = llama[prompt_name(512)]["kernels"]
    assert kernels["attend_kernel"]["flops"] == LAYERS * (512 * 513 // 2) * 32 * 4 * 128
    # Only the last token goes through the last MLP, the last projection and the head.
    last = 4096 * 4096 + 3 * 4096 * 14336
    assert kernels["aten.linear"]["flops"] == 2 * (512 * (PARAMETERS - HEAD - last) + HEAD + last)


def test_quantized_weights_are_counted_in_their_own_size() -> None:
    loads = predict(replace(SIZES["llama-8b-w4"], streams=(1,), prompts=(16,)))
    assert 4.6e9 < total(loads[decode_name(1)])["bytes"] < 4.9e9


@pytest.mark.parametrize(("name", "kernel"), [("fp8", "aten._scaled_mm"), ("w8a8", "int8_product_kernel")])
def test_products_in_8_bits_read_half_and_take_half_the_time(name: str, kernel: str) -> None:
    loads = predict(replace(SIZES[f"llama-8b-{name}"], streams=(1,), prompts=(16,)))
    cost = loads[decode_name(1)]["kernels"][kernel]
    assert 1 <= cost["bytes"] / (PARAMETERS - HEAD) < 1.01
    assert cost["flops"] == PARAMETERS - HEAD


def test_a_deterministic_step_launches_its_own_products() -> None:
    kernels = predict(replace(SIZES["llama-8b-deterministic"], streams=(1,), prompts=(16,)))[decode_name(1)]["kernels"]
    assert "aten.linear" not in kernels
    assert kernels["product_kernel"]["flops"] == 2 * PARAMETERS


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (5, 0), (0, 8)])
@pytest.mark.parametrize("span", [(0, 1), (0, 20), (30, 1), (13, 9)])
def test_masks_bound_what_is_attended_to(span: tuple[int, int], window: int, chunk: int) -> None:
    def visible(position: int) -> range:
        start = max(0, position + 1 - window) if window else position - position % chunk if chunk else 0
        return range(start, position + 1)

    rows = [visible(position) for position in range(span[0], sum(span))]
    read, pairs = attended(span, {"WINDOW": window, "CHUNK": chunk})
    assert (read, pairs) == (len(set().union(*rows)), sum(map(len, rows)))


def test_a_floor_is_the_longer_of_memory_and_arithmetic(llama: dict[str, Any]) -> None:
    load = llama[decode_name(1)]
    fast_memory, fast_arithmetic = floor_s(load, 1e30, 1e12), floor_s(load, 1e12, 1e30)
    assert fast_memory == pytest.approx(total(load)["flops"] / 1e12)
    assert fast_arithmetic == pytest.approx(total(load)["bytes"] / 1e12)
    device = DEVICES["H200"]
    assert floor_s(load, device.bytes_per_s, device.bf16_flop_per_s) <= total(load)["floor_s"]["H200"] * (1 + 1e-9)
