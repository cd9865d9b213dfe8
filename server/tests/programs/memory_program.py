"""One engine in a process of its own. Prints as JSON the memory that the most expensive real steps and warm-up take.

Arguments: "process" or "tensors", model folder. "process": how far it goes above what it had when it was ready, and how
far its warm-up said that it may. "tensors": the most that tensors had at a time, which is the same in every run. The
steps are those of plans, with everything that a request can ask for.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from penstock_server.engine import Engine, capacity, memory
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Grammar, NewSequence, Sampling
from plans import Advance, plan, step
from tested_isa import use_tested_isa

BLOCK_TOKENS, STEP_TOKENS, SEQUENCES, LONGEST = 16, 256, 48, 1024
LIMITS = WarmUpConfig(STEP_TOKENS, SEQUENCES, LONGEST, num_blocks=SEQUENCES * LONGEST // BLOCK_TOKENS)
EVERYTHING = Sampling(
    do_sample=True,
    seed=3,
    temperature=0.9,
    top_k=1000,
    top_p=0.99,
    typical_p=0.99,
    min_p=1e-6,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    watermark=True,
    top_n=20,
    prompt_logprobs=True,
    model_logprobs=True,
    grammar=Grammar("regex", "(?s).*"),
)


# In a batch with other rows, each of these makes the sampler process a part of the rows.
OTHERS = [Sampling(), Sampling(grammar=EVERYTHING.grammar), Sampling(top_n=20), replace(EVERYTHING, grammar=None)]


class Driver:
    """Runs plans, and fails at the first error of a sequence."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = 0

    def run(self, advances: list[Advance], new: Sequence[NewSequence] = (), freed: Sequence[int] = ()) -> None:
        self._step += 1
        outputs = step(self._engine, plan(self._step, freed, new, advances))
        assert not any(output.error for output in outputs), [output.error for output in outputs]

    def prefill(self, place: int, length: int, beside: list[Advance], freed: Sequence[int] = ()) -> None:
        """A prompt in the largest chunks that are left beside the other advances."""
        tokens = [(place * 131 + i * 7) % 40_000 + 20 for i in range(length)]
        blocks = LONGEST // BLOCK_TOKENS
        block_ids = list(range(place * blocks, (place + 1) * blocks))
        sampling = OTHERS[place] if place < len(OTHERS) else EVERYTHING
        new = [NewSequence(place, tokens, length, block_ids=block_ids, sampling=sampling)]
        chunk = STEP_TOKENS - len(beside)
        for begin in range(0, length, chunk):
            num_tokens = min(chunk, length - begin)
            advance = Advance(place, num_tokens, sample=begin + num_tokens == length)
            self.run([*beside, advance], new if begin == 0 else (), freed if begin == 0 else ())


@dataclass
class Peak:
    """The most bytes that tensors occupied at a time."""

    num_bytes: int = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Measures tensors allocated in the body; `num_bytes` is set at its end."""
    peak = Peak()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield peak
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak.num_bytes = max(itertools.accumulate(event.nbytes() for event in events))


def warm_up(engine: Engine, watch: Callable[[], AbstractContextManager[Peak]]) -> tuple[capacity.Measured, Peak]:
    """Warm up. Returns what warm-up measured, and the tensors it needed."""
    measure: Callable[..., capacity.Measured] = capacity.CapacityProbe.measure
    release: Callable[[Sequence[torch.Tensor]], None] = memory.release_pages
    found: list[tuple[capacity.Measured, Peak]] = []
    released: list[torch.Tensor] = []

    def listen(*arguments: object) -> capacity.Measured:
        with watch() as peak:
            measured = measure(*arguments)
        found.append((measured, peak))
        return measured

    def listen_to_release(tensors: Sequence[torch.Tensor]) -> None:
        released.extend(tensors)
        release(tensors)

    capacity.CapacityProbe.measure = listen  # type: ignore[method-assign, assignment]
    memory.release_pages = listen_to_release
    engine.warm_up(LIMITS)
    (measured, peak) = found[0]
    # Pages that were there when the rest was measured are not given to the pool.
    return replace(measured, step_bytes=measured.step_bytes + sum(tensor.nbytes for tensor in released)), peak


def run_worst(driver: Driver) -> None:
    # One prompt of each kind up to the longest sequence, one at a time: the last chunks have the longest contexts.
    for place in range(SEQUENCES):
        driver.prefill(place, LONGEST - 32 if place <= len(OTHERS) else 64, [])
    all_sequences = [Advance(i, 1, sample=True) for i in range(SEQUENCES)]
    for _ in range(4):
        driver.run(all_sequences)
    # The end of the longest prompt, in a batch with all other sequences' decodes.
    driver.prefill(SEQUENCES - 1, LONGEST - 1, all_sequences[:-1], freed=[SEQUENCES - 1])
    driver.run(all_sequences)


def main() -> None:
    kind, folder = sys.argv[1:]
    use_tested_isa()
    watch = watched if kind == "tensors" else partial(nullcontext, Peak())
    engine, _ = Engine.load(LoadConfig(Path(folder), BLOCK_TOKENS, num_threads=2))
    measured, promised = warm_up(engine, watch)
    assert EVERYTHING.grammar is not None
    engine.compile_grammar(EVERYTHING.grammar)
    if engine._backing is not None:
        engine._backing.join()
    meter = memory.MemoryMeter(engine._parts.device)
    with watch() as needed:
        run_worst(Driver(engine))
    if kind == "tensors":
        print(json.dumps({"promised": promised.num_bytes, "needed": needed.num_bytes}))
    else:
        print(json.dumps({"promised": measured.step_bytes, "needed": meter.measure().transient}))
    engine.close()


if __name__ == "__main__":
    main()
