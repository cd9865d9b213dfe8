"""Predicts steps on GPUs that are not there: what each kernel must read, write and compute, and how long that takes at
least by a device's published limits.

The counts are those of the real model and engine on a fake GPU (torch's FakeTensorMode): every launch is seen with its
tensors' shapes, and only the lengths of contexts, which are data, come from the load. A byte counts once for each
launch that needs it. The second-level cache may serve some, so a prediction is a bound on the device's memory traffic
only where a tensor exceeds that cache, as weights and KV caches do.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from penstock_server.engine import Engine
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Plan
from prediction import DEVICES, Cost, decode_name, prompt_name, report
from random_model import SIZES, Size, read_quantized, write_model
from result import ROOT, heading, keep, machine, option_parser
from sequences import MAX_STEP_TOKENS, Sequences
from torch import Tensor

# The fake GPU of the tests: one definition of what a launch is.
sys.path.insert(0, str(ROOT / "server" / "tests" / "fakes"))
from fake_cuda import Launches, Recorder, fake_cuda

MODELS = ("llama-8b", "llama-8b-deterministic", "qwen3-30b-a3b", "deepseek-v2-lite")
NARROW = 0.5  # time of an operation in 8 bits relative to bfloat16: tensor cores do twice as many

Span = tuple[int, int]  # a sequence's computed and new tokens
Arguments = Mapping[str, Any]


class Costs(Launches):
    """What a fake GPU's launches cost."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kernel: dict[str, Cost] = {}
        self.spans: Sequence[Span] = ()  # spans of the step that is launched; empty: it is not counted

    def add(self, name: str, arguments: Iterable[Any], result: Tensor | None = None) -> None:
        super().add(name, arguments, result)
        if not self.spans:
            return
        if isinstance(arguments, Mapping):
            count = KERNELS.get(name, lambda given, spans: (bytes_of(given.values()), 0.0))
            num_bytes, flops = count(arguments, self.spans)
        else:
            assert result is not None
            num_bytes, flops = operator_cost(name, tuple(arguments), result)
        self.by_kernel.setdefault(name, Cost()).add(num_bytes, flops)


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):  # the parts of a quantized weight
            found += tensors_of(value)
    return found


def bytes_of(values: Iterable[Any]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(values))


def operator_cost(name: str, arguments: tuple[Any, ...], result: Tensor) -> tuple[float, float]:
    """Bytes and floating-point operations of an operator of torch."""
    if name in ("aten.embedding", "aten.index", "aten.gather", "aten.index_select"):
        return 2 * bytes_of([result]), 0.0  # not the table
    flops = 0.0
    if name == "aten._scaled_mm":
        flops = NARROW * 2.0 * result.numel() * tensors_of(arguments)[0].shape[-1]
    if name in ("aten.mm", "aten.bmm", "aten.addmm", "aten.linear"):
        flops = 2.0 * result.numel() * tensors_of(arguments)[name == "aten.addmm"].shape[-1]
    return bytes_of(arguments) + bytes_of([result]), flops


def attended(span: Span, given: Arguments) -> tuple[float, float]:
    """Positions that a sequence's new tokens read together, and the sum of what each attends to."""
    computed, new = span
    window, chunk = given["WINDOW"], given["CHUNK"]

    def first(position: int) -> int:
        return max(position + 1 - window if window else 0, position - position % chunk if chunk else 0, 0)

    pairs = sum(position + 1 - first(position) for position in range(computed, computed + new))
    return computed + new - first(computed), pairs


def attention_cost(given: Arguments, spans: Sequence[Span]) -> tuple[float, float]:
    counts = [attended(span, given) for span in spans]
    kv_heads = given["HEADS"] // given["GROUP"]
    row_bytes = kv_heads * given["STORED_DIM"] * given["cache"].element_size()
    num_bytes = sum(read for read, _ in counts) * row_bytes + bytes_of([given["queries"], given["rotary"]])
    num_bytes += partial_bytes(given, spans) + bytes_of([given["output"]])
    per_pair = 2.0 * given["HEADS"] * (given["HEAD_DIM"] + given["VALUE_DIM"])
    return num_bytes, per_pair * sum(pairs for _, pairs in counts)


def partial_bytes(given: Arguments, spans: Sequence[Span]) -> float:
    """Bytes written by the splits of sequences with one new token."""
    num_splits = given["num_splits"] if given["num_splits"] > 1 else 0
    return sum(new == 1 for _, new in spans) * num_splits * given["HEADS"] * 4.0 * (given["VALUE_DIM"] + 2)


def grouped_cost(given: Arguments, spans: Sequence[Span]) -> tuple[float, float]:
    """Bytes and FLOP of the experts expected to have a row, if each pair of row and expert is drawn independently."""
    pairs, experts = given["output"].shape[0], given["EXPERTS"]
    chosen = experts * (1 - (1 - 1 / experts) ** pairs)
    num_bytes = bytes_of([given["x"], given["output"]]) + chosen / experts * bytes_of([given["weight"]])
    depth = given["FORM"].depth if "FORM" in given else given["DEPTH"]
    return num_bytes, 2.0 * pairs * given["COLUMNS"] * depth


def product_cost(given: Arguments, spans: Sequence[Span]) -> tuple[float, float]:
    """Bytes and FLOP of a deterministic product, or of one with quantized weights."""
    written = given["partials"] if given.get("num_partials", given["partials"] is not None) else given["y"]
    flops = 2.0 * given["num_rows"]
    if "FORM" in given:
        flops *= given["FORM"].outputs * given["FORM"].depth
    else:
        flops *= given["MATRICES"] * given["COLUMNS"] * given["DEPTH"]
    return bytes_of([given["x"], given["weight"], given["bias"], written]), flops


def narrow_product_cost(given: Arguments, spans: Sequence[Span]) -> tuple[float, float]:
    """Bytes of a product of integers, and the FLOP in bfloat16 that take as long."""
    written = given["y"] if given["partials"] is None else given["partials"]
    read = [given[name] for name in ("x", "x_scales", "weight", "scales", "bias")]
    return bytes_of([*read, written]), NARROW * 2.0 * given["num_rows"] * given["OUTPUTS"] * given["DEPTH"]


def read_and_written(*names: str) -> Callable[[Arguments, Sequence[Span]], tuple[float, float]]:
    """The kernel reads and writes as much as these arguments hold. It reads only a few rows of its other arguments."""
    return lambda given, spans: (2 * bytes_of(given[name] for name in names), 0.0)


ROUTED = ("logits", "correction", "weights", "experts", "counts", "gate")  # the lists of pairs are mostly empty

KERNELS: dict[str, Callable[[Arguments, Sequence[Span]], tuple[float, float]]] = {
    "attend_kernel": attention_cost,
    "grouped_kernel": grouped_cost,
    "grouped_product_kernel": grouped_cost,
    "route_kernel": lambda given, spans: (bytes_of(given[name] for name in ROUTED), 0.0),
    "product_kernel": product_cost,
    "int8_product_kernel": narrow_product_cost,
    "reduce_kernel": lambda given, spans: (partial_bytes(given, spans), 0.0),
    "write_kernel": read_and_written("queries", "keys", "values"),
    "write_latents_kernel": read_and_written("x"),
    "rotate_kernel": read_and_written("queries", "keys"),
    "lookup_kernel": read_and_written("y"),
    "norm_kernel": lambda given, spans: (bytes_of(given.values()) + bytes_of([given["residual"]]), 0.0),
}


class Predictor:
    """One model's engine on a fake GPU; use it inside of `fake_cuda(costs)`."""

    def __init__(self, size: Size, folder: Path, costs: Costs) -> None:
        self._costs, self._context_tokens = costs, size.context_tokens
        longest = max(*size.prompts, size.context_tokens) + 1
        self.engine, description = Engine.load(
            LoadConfig(folder, dtype="bfloat16", deterministic=size.deterministic), load_model=load_fake(size)
        )
        self._block_tokens = description.block_tokens
        num_blocks = size.max_sequences * -(-(size.context_tokens + 1) // self._block_tokens)
        num_blocks = max(num_blocks, -(-longest // self._block_tokens))
        self.engine.model.traits = replace(
            self.engine.model.traits, is_recordable=False
        )  # a graph's padding would be counted
        self.engine.warm_up(WarmUpConfig(MAX_STEP_TOKENS, size.max_sequences, longest, num_blocks, proven=True))
        self._sequences = Sequences(self.engine, self._block_tokens, num_blocks)

    def decode(self, num: int) -> dict[str, Any]:
        """A decode step of sequences whose prompt was computed before."""
        computed = self._context_tokens - 1
        made = self._sequences.new(num, self._context_tokens, 1)
        new = [replace(each, num_computed_tokens=computed) for each in made]
        plan = self._sequences.plan([(each.sequence_id, 1, True) for each in new], new)
        return self._cost([plan], {each.sequence_id: computed for each in new}, num)

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """All steps of one prompt."""
        new = self._sequences.new(1, num_tokens, 1)
        return self._cost([*self._sequences.prefill(new)], {new[0].sequence_id: 0}, num_tokens)

    def _cost(self, plans: Sequence[Plan], computed: dict[int, int], num_tokens: int) -> dict[str, Any]:
        self._costs.by_kernel = {}
        for plan in plans:
            spans = []
            for sequence_id, new in zip(plan.advances.sequence_ids, plan.advances.num_tokens, strict=True):
                spans.append((computed[int(sequence_id)], int(new)))
                computed[int(sequence_id)] += int(new)
            self._costs.spans = spans
            with Recorder(self._costs):
                self.engine.launch(plan)
        self._costs.spans = ()
        self._sequences.forget()
        assert self._costs.by_kernel, "the engine refused the sequences"
        kernels = {name: asdict(cost) for name, cost in self._costs.by_kernel.items()}
        return {"tokens": num_tokens, "steps": len(plans), "kernels": kernels}


def load_fake(size: Size) -> Callable[..., Any]:
    """The loader of a model whose quantized weights, if it has any, are fake as well."""

    def load(options: Any, group: Any) -> Any:
        from penstock_server.models import load_model
        from penstock_server.weights.loader import Loader

        quantized = Loader.quantized
        if size.format is not None:
            Loader.quantized = lambda loader, *names: read_quantized(size.format, loader, *names)  # type: ignore[method-assign]
        try:
            return load_model(options, group)
        finally:
            Loader.quantized = quantized  # type: ignore[method-assign]

    return load


def predict(size: Size) -> dict[str, Any]:
    """A model's decode steps and prompts, as `gpu.py` measures them."""
    costs = Costs()
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(size.config, Path(folder))
        with fake_cuda(costs):
            predictor = Predictor(size, path, costs)
            loads = {decode_name(num): predictor.decode(num) for num in size.streams}
            loads |= {prompt_name(num): predictor.prefill(num) for num in size.prompts}
            predictor.engine.close()
    return loads


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=list(MODELS))
    options = parser.parse_args()
    record: dict[str, Any] = {**heading(), "machine": machine(), "torch": torch.__version__, "models": {}}
    record["devices"] = {name: asdict(device) for name, device in DEVICES.items()}
    for name in options.model:
        began = time.perf_counter()
        record["models"][name] = predict(SIZES[name])
        print(f"  {name}: {time.perf_counter() - began:.0f} s", flush=True)
    keep(record, "predict", report(record), options.out)


if __name__ == "__main__":
    main()
