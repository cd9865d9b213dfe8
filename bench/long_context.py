"""Measures attention over long contexts against the limits of the machine in the same repeat: decoding against reading
the keys and values once, a chunk of a prompt against its products at the rate of torch's bf16 matrix product.

A cell runs one layer's attention in this process, over as many caches as exceed the processor's own caches, as the
layers of a model would. Blocks are in random order. Storing keys and values and preparing a step are not included.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from compare import in_own_process
from figure import floor_s, long_context, table_of
from limits import MIN_READ_BYTES
from result import ROOT, heading, keep, machine, option_parser, title
from torch import Tensor

sys.path.insert(0, str(ROOT / "server"))

from penstock_server.device.attention import choose_attention
from penstock_server.device.attention.fp8 import FP8_DTYPES
from penstock_server.device.attention.interface import Attention, AttentionShape, StepBatch

CPU, DTYPE, BLOCK_TOKENS = torch.device("cpu"), torch.bfloat16, 16
LAYERS = {"Llama 3 8B": (32, 8, 128), "SmolLM2 135M": (9, 3, 64)}  # heads, KV heads, elements of a head
KV_DTYPES = {"bf16": None, "fp8": FP8_DTYPES["fp8_e4m3fn"]}
CHUNK_TOKENS = 512  # new tokens of a step, divided over its sequences
WINDOW_S = 1.0  # measured time of each cell


@functools.cache
def attention_of(layer: str, kv: str) -> Attention:
    heads, kv_heads, dim = LAYERS[layer]
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, BLOCK_TOKENS)
    return choose_attention(shape, CPU, DTYPE, KV_DTYPES[kv])


@dataclass(frozen=True, slots=True)
class Setup:
    """Sequences of one length over the caches of one kind of layer."""

    layer: str
    kv: str
    context_tokens: int
    num_sequences: int

    def name(self, new_tokens: int) -> str:
        kind = "decode" if new_tokens == 1 else f"chunk of {new_tokens * self.num_sequences}"
        length = f"{self.context_tokens // 1024}k tokens" if self.context_tokens >= 1024 else f"{self.context_tokens}"
        return f"{self.layer}, KV in {self.kv}, {length} × {self.num_sequences}, {kind}"

    def cell(self, new_tokens: int) -> dict[str, Any]:
        """What a step reads and computes: `new_tokens` at the end of each sequence."""
        heads, kv_heads, dim = LAYERS[self.layer]
        kv_dtype = KV_DTYPES[self.kv] or DTYPE
        attended = new_tokens * self.context_tokens - new_tokens * (new_tokens - 1) // 2
        return {
            "attention": attention_of(self.layer, self.kv).name,
            "kv_bytes": self.num_sequences * self.context_tokens * kv_heads * 2 * dim * kv_dtype.itemsize,
            "flop": self.num_sequences * attended * heads * dim * 4,
        }

    def batch(self, tables: Tensor, new_tokens: int) -> StepBatch:
        none = torch.empty(0, dtype=torch.int64)
        starts = torch.arange(self.num_sequences + 1, dtype=torch.int32) * new_tokens
        lens = torch.full((self.num_sequences,), self.context_tokens, dtype=torch.int32)
        return StepBatch(none, none, none, starts, lens, tables, none, new_tokens, self.context_tokens)


def steps_of(setup: Setup) -> tuple[int, int]:
    """New tokens of each sequence: when decoding, and in a chunk."""
    return 1, CHUNK_TOKENS // setup.num_sequences


def measure(setup: Setup, min_bytes: int = MIN_READ_BYTES) -> dict[str, float]:
    """Seconds of one layer's attention by step: the median over caches of at least `min_bytes` in turn."""
    attention = attention_of(setup.layer, setup.kv)
    heads, kv_heads, dim = LAYERS[setup.layer]
    num_blocks = setup.context_tokens // BLOCK_TOKENS * setup.num_sequences
    tables = torch.randperm(num_blocks).view(setup.num_sequences, -1).int()
    keys, values = torch.randn(2, setup.context_tokens, kv_heads, dim).to(DTYPE)
    first = attention.allocate(num_blocks)
    for blocks in tables.long():
        slots = blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        attention.write_kv(first, keys, values, slots.flatten())
    num_caches = -(-min_bytes // setup.cell(1)["kv_bytes"])
    caches = [first, *(attention.allocate(num_blocks).copy_(first) for _ in range(num_caches - 1))]
    seconds = {}
    for new_tokens in steps_of(setup):
        queries = torch.randn(new_tokens * setup.num_sequences, heads, dim).to(DTYPE)
        metadata = attention.prepare(setup.batch(tables, new_tokens))
        times: list[float] = []
        for cache in itertools.cycle(caches):
            start = time.perf_counter()
            attention.attend(queries, cache, metadata)
            times.append(time.perf_counter() - start)
            if sum(times) > WINDOW_S:
                break
        seconds[setup.name(new_tokens)] = statistics.median(times[1:] or times)  # the first one is a warm-up
    return seconds


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768], metavar="TOKENS")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    if wrong := [tokens for tokens in options.contexts if tokens < CHUNK_TOKENS or tokens % BLOCK_TOKENS]:
        parser.error(f"--contexts has {wrong}, must be multiples of {BLOCK_TOKENS} of at least {CHUNK_TOKENS}")
    if wrong := [num for num in options.sequences if not 1 <= num <= CHUNK_TOKENS]:
        parser.error(f"--sequences has {wrong}, must be from 1 to {CHUNK_TOKENS}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the process of limits.py is stopped

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(1)
    chosen = [Setup(*parts) for parts in itertools.product(LAYERS, KV_DTYPES, options.contexts, options.sequences)]
    cells = {setup.name(new): setup.cell(new) for setup in chosen for new in steps_of(setup)}
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "torch": torch.__version__,
        "cells": cells,
        "repeats": [],
    }
    with torch.inference_mode():
        for repeat in range(options.repeats):
            print(f"repeat {repeat + 1}", flush=True)
            limits = in_own_process("limits.py")
            seconds: dict[str, float] = {}
            for setup in chosen:
                found = measure(setup)
                seconds |= found
                for name, taken in found.items():
                    share = floor_s(cells[name], limits) / taken
                    print(f"  {name}: {taken * 1e3:.2f} ms, {share:.3f} of the limit", flush=True)
            record["repeats"].append({"limits": limits, "seconds": seconds})
    keep(record, "long-context", title(record) + table_of(long_context(record)), options.out)


if __name__ == "__main__":
    main()
