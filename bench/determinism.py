"""Measures the cost of batch invariance: the matrix products of a step by Penstock's kernels, by oneDNN with packed
weights, and by plain torch, alternating; then activations from tables and by torch. Also counts the rows whose bits in
a batch differ from the same row alone.

The matrices have the embedded model's shapes and random values. Up to MAX_SAMPLED rows all go through the output head,
as in a decode; of more rows only one does, as in a prefill. Quote the ratios.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import peers
import torch
from result import ROOT, heading, keep, machine, option_parser, title
from table import markdown
from torch import Tensor

sys.path.insert(0, str(ROOT / "server"))

from penstock_server.device.activation import ACTIVATIONS
from penstock_server.device.native.build import find_build
from penstock_server.device.native.ops import NativeOps
from penstock_server.device.ops import PackedLinear
from penstock_server.device.reference.ops import PlainLinear, TorchOps

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
MAX_SAMPLED = 32
ACTIVATED = ("gelu", "gelu_new", "quick_gelu", "relu")
# Row widths: a model's, and one that no vector width divides.
ACTIVATED_WIDTHS = (3072, 1000)
Pack = Callable[[Tensor], PackedLinear]


def native_ops() -> NativeOps:
    build = find_build(torch.device("cpu"), torch.bfloat16)
    assert build is not None, "needs penstock_kernels"
    return NativeOps(build)


def implementations() -> dict[str, Pack]:
    native, onednn = native_ops(), TorchOps()
    return {
        "penstock": lambda weight: native.pack_linear(weight, None),
        "oneDNN, packed": lambda weight: onednn.pack_linear(weight, None),
        "torch": lambda weight: PlainLinear(weight, None, *weight.shape),
    }


def matrix_sizes() -> tuple[int, list[tuple[int, int]], tuple[int, int]]:
    """The number of layers, the fused matrices [out, in] of a layer, and the output head."""
    from gguf import GGUFReader

    shapes = {tensor.name: tuple(int(size) for size in tensor.shape[::-1]) for tensor in _tensors(GGUFReader)}
    num_layers = sum(name.endswith("attn_q.weight") for name in shapes)

    def fused(*names: str) -> tuple[int, int]:
        parts = [shapes[f"blk.0.{name}.weight"] for name in names]
        return sum(rows for rows, _ in parts), parts[0][1]

    layer = [fused("attn_q", "attn_k", "attn_v"), fused("attn_output"), fused("ffn_gate", "ffn_up"), fused("ffn_down")]
    rows, columns = shapes["token_embd.weight"]
    return num_layers, layer, (rows, columns)


def _tensors(reader: Any) -> Any:
    return reader(peers.embedded_gguf()).tensors


def random(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.05).bfloat16()


def changed_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Number of the first (at most 64) rows whose bits in the whole batch differ from the same row alone."""
    together = function(x)
    return sum(not torch.equal(function(x[row : row + 1])[0], together[row]) for row in range(min(64, len(x))))


def pass_s(linears: list[PackedLinear], head: PackedLinear, inputs: Mapping[int, Tensor]) -> float:
    start = time.perf_counter()
    for linear in linears:
        linear(inputs[linear.in_features])
    x = inputs[head.in_features]
    head(x if len(x) <= MAX_SAMPLED else x[:1])
    return time.perf_counter() - start


def measure_activations(num_repeats: int) -> list[dict[str, Any]]:
    """For each function and size: microseconds by table and by torch, alternating, and rows that differ."""
    native, results = native_ops(), []
    for name in ACTIVATED:
        functions = {"table": native.elementwise(ACTIVATIONS[name]), "torch": ACTIVATIONS[name]}
        for num_rows in (1, 8, 32, 64, 512):
            for width in ACTIVATED_WIDTHS:
                x = random(num_rows, width) * 60
                result: dict[str, Any] = {"function": name, "rows": num_rows, "width": width}
                for which, function in functions.items():
                    result[which] = {"us": [], "changed": changed_rows(function, x)}
                for _ in range(3 * num_repeats):
                    for which, function in functions.items():
                        start = time.perf_counter()
                        function(x)
                        result[which]["us"].append(round((time.perf_counter() - start) * 1e6, 1))
                results.append(result)
    return results


def activations_table(results: list[dict[str, Any]]) -> str:
    header = [
        "function",
        "rows",
        "width",
        "table, us",
        "torch, us",
        "torch / table",
        "table: other bits",
        "torch: other bits",
    ]
    rows = []
    for result in results:
        ours, theirs = (statistics.median(result[which]["us"]) for which in ("table", "torch"))
        bits = [f"{result[which]['changed']} of {min(64, result['rows'])}" for which in ("table", "torch")]
        sizes = [str(result["rows"]), str(result["width"])]
        rows.append([result["function"], *sizes, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}", *bits])
    return markdown(header, rows)


def report(record: dict[str, Any]) -> str:
    names = list(record["implementations"])
    header = ["rows", *(f"{name}, ms" for name in names), *(f"{name} / penstock" for name in names[1:])]
    header += [f"{name}: other bits" for name in names]
    rows = []
    for num_rows, results in record["rows"].items():
        times = {name: results[name]["seconds"] for name in names}
        ratios = [
            statistics.median(theirs / ours for theirs, ours in zip(times[name], times["penstock"], strict=True))
            for name in names[1:]
        ]
        bits = [f"{results[name]['changed']} of {results[name]['compared']}" for name in names]
        medians = [f"{statistics.median(times[name]) * 1e3:.2f}" for name in names]
        rows.append([num_rows, *medians, *(f"{ratio:.2f}" for ratio in ratios), *bits])
    return (
        f"{title(record)}The matrix products of a step of the embedded model, medians. A ratio above 1 means that "
        "Penstock is faster. Other bits: rows whose result in a batch differs from their result alone.\n\n"
        f"{markdown(header, rows)}\n"
        f"Activations, medians:\n\n{activations_table(record['activations'])}"
    )


def main() -> None:
    parser = option_parser(__doc__, num_repeats=9)
    options = parser.parse_args()

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(1)
    num_layers, layer, head_size = matrix_sizes()
    packs = implementations()
    linears: dict[str, list[PackedLinear]] = {name: [] for name in packs}
    for size in [size for _ in range(num_layers) for size in layer] + [head_size]:
        weight = random(*size)
        for name, pack in packs.items():
            linears[name].append(pack(weight))
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "torch": torch.__version__,
        "implementations": {name: type(found[0]).__name__ for name, found in linears.items()},
        "matrices": {"layers": num_layers, "layer": layer, "head": head_size},
        "rows": {},
    }
    widths = {columns for _, columns in [*layer, head_size]}
    with torch.inference_mode():
        for num_rows in NUM_ROWS:
            inputs = {width: random(num_rows, width) for width in widths}
            results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in packs}
            for name, found in linears.items():
                different = found[: len(layer)] + found[-1:]
                results[name]["changed"] = sum(changed_rows(linear, inputs[linear.in_features]) for linear in different)
                results[name]["compared"] = len(different) * min(64, num_rows)
                pass_s(found[:-1], found[-1], inputs)
            for _ in range(options.repeats):
                for name, found in linears.items():
                    results[name]["seconds"].append(pass_s(found[:-1], found[-1], inputs))
            record["rows"][str(num_rows)] = results
            print(f"  {num_rows} rows", flush=True)
        record["activations"] = measure_activations(options.repeats)
    keep(record, "determinism", report(record), options.out)


if __name__ == "__main__":
    main()
