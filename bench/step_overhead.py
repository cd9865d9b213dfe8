"""Time of a decode step outside the model: plan message → engine → result message, with a model that computes nothing.

Everything runs in one thread, and its processor time is measured, so that other load on the machine matters little.
Each part runs for many steps at a time, because reading that clock takes longer than a part of one step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from penstock_server.engine import Engine
from penstock_server.models.interface import ModelTraits
from penstock_server.pb import worker_pb2 as pb
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.message import plan_of, result_message
from result import heading, keep, machine, option_parser
from table import markdown

BLOCK_TOKENS, MAX_TOKENS, VOCAB = 16, 1024, 1024
WARM_STEPS = 50
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "greedy, 5 alternatives": {"top_n": 5}}
PARTS = ("decode", "engine", "encode")


class NullModel:
    """A CausalModel whose logits are always the same."""

    traits = ModelTraits(
        architecture="null",
        attention_name="null",
        vocab_size=VOCAB,
        num_layers=1,
        hidden_size=1,
        default_position_tokens=MAX_TOKENS,
        max_source_tokens=0,
        decoder_prefix=(),
        window_tokens=0,
        is_recordable=False,
        is_row_independent=True,
    )
    max_position_tokens = MAX_TOKENS
    weight_bytes = 1
    kv_bytes_per_block = 1
    pooler = adapters = images = states = None

    def __init__(self, max_rows: int) -> None:
        self.caches = [torch.zeros(0)]
        self._logits = torch.randn(max_rows, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()

    def allocate_cache(self, num_blocks: int) -> None:
        self.caches = [torch.zeros(num_blocks)]

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        pass

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.empty(len(batch.sample_rows), 1)

    def logits(self, outputs: torch.Tensor, adapters: object = None) -> torch.Tensor:
        return self._logits[: len(outputs)]


def plan_message(step: int, num_sequences: int, new: list[pb.NewSequence]) -> bytes:
    """Step 0 starts the sequences. Every sequence advances by a token; one sequence in BLOCK_TOKENS gets a block."""
    sequence_ids = np.arange(num_sequences)
    gets_block = ((step + sequence_ids) % BLOCK_TOKENS == 0) | bool(new)
    advances = pb.Advances(
        sequence_ids=sequence_ids.astype("<u8").tobytes(),
        num_tokens=np.ones(num_sequences, "<u4").tobytes(),
        sample=np.ones(num_sequences, np.uint8).tobytes(),
        num_new_blocks=gets_block.astype("<u4").tobytes(),
        new_block_ids=(1 + sequence_ids[gets_block]).astype("<u4").tobytes(),
    )
    return pb.Plan(step=step + 1, new_sequences=new, advances=advances).SerializeToString()


def measure(num_sequences: int, num_steps: int, sampling: dict[str, Any]) -> dict[str, float]:
    """Seconds of a decode step, by part."""
    torch.set_num_threads(1)
    model = NullModel(num_sequences)
    config = LoadConfig(Path("nowhere"), BLOCK_TOKENS, dtype="bfloat16", num_threads=1)
    engine, _ = Engine.load(config, load_model=lambda options, group: model)
    num_blocks = num_sequences * MAX_TOKENS // BLOCK_TOKENS
    engine.warm_up(WarmUpConfig(num_sequences, num_sequences, MAX_TOKENS, num_blocks=num_blocks, proven=True))
    neutral = pb.Sampling(temperature=1, top_p=1, typical_p=1, repetition_penalty=1, **sampling)
    new = [
        pb.NewSequence(sequence_id=place, token_ids=[7], num_prompt_tokens=1, sampling=neutral)
        for place in range(num_sequences)
    ]
    messages = [plan_message(step, num_sequences, [] if step else new) for step in range(num_steps + WARM_STEPS)]

    def run(messages: list[bytes]) -> list[float]:
        times = [time.thread_time()]
        plans = [plan_of(pb.Plan.FromString(message)) for message in messages]
        times.append(time.thread_time())
        results = [engine.step(plan) for plan in plans]
        times.append(time.thread_time())
        answers = [result_message(result).SerializeToString() for result in results]
        times.append(time.thread_time())
        assert min(map(len, answers)) > 4 * num_sequences
        return [(end - start) / len(messages) for start, end in itertools.pairwise(times)]

    run(messages[:WARM_STEPS])
    seconds = run(messages[WARM_STEPS:])
    engine.close()
    return dict(zip(PARTS, seconds, strict=True))


def report(record: dict[str, Any]) -> str:
    """Medians of the repeats; of the total also the least and the greatest."""
    rows = []
    for mode, repeats in record["modes"].items():
        totals = [1e6 * sum(repeat.values()) for repeat in repeats]
        parts = [1e6 * statistics.median(repeat[part] for repeat in repeats) for part in PARTS]
        rows.append([mode, *(f"{part:.0f}" for part in [*parts, statistics.median(totals)])])
        rows[-1].append(f"{min(totals):.0f}–{max(totals):.0f}")
    header = ["sampling", "plan decoded µs", "engine µs", "result encoded µs", "total µs", "total of the repeats µs"]
    return (
        f"{record['started']}, {record['machine']['vendor']}, one thread, {record['sequences']} sequences, "
        f"`{record['command']}`, {record['revision']}\n\n" + markdown(header, rows)
    )


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    modes: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(options.repeats):
        for mode, sampling in MODES.items():
            modes[mode].append(measure(options.sequences, options.steps, sampling))
    record = {**heading(), "machine": machine(), "sequences": options.sequences, "modes": modes}
    keep(record, "step-overhead", report(record), options.out)


if __name__ == "__main__":
    main()
