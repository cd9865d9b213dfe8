"""One worker engine in a process of its own: prints, as JSON, how far the worst real steps go above what stays.

Arguments: model folder. The steps are those of plans, with everything that a request can ask for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock_server.config import LoadConfig, WarmUpConfig
from penstock_server.engine import Engine, memory
from penstock_server.engine.capacity import CapacityProbe
from penstock_server.engine.sampler import Sampler
from penstock_server.phase import PhaseClock
from penstock_server.plan import Advance, Grammar, NewSequence, Plan, Sampling

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


def transient_bytes(reset: memory.MemoryMeter) -> int:
    """How far the peak since `reset` was made was above now."""
    return reset.measure().transient


def main() -> None:
    config = LoadConfig(Path(sys.argv[1]), BLOCK_TOKENS, num_threads=2)
    engine, _ = Engine.load(config)
    group, device = engine._group, engine._device
    probe = CapacityProbe(engine.model, group, device, BLOCK_TOKENS)
    sampler = Sampler(engine.model.vocab_size, device, SEQUENCES, engine._watermark)
    promised = probe.measure(LIMITS, sampler, PhaseClock()).transient_bytes
    del sampler
    engine.warm_up(LIMITS)
    engine.compile_grammar(EVERYTHING.grammar)
    blocks = LONGEST // BLOCK_TOKENS
    meter = memory.MemoryMeter(device)
    step = 0
    # Prompts up to the longest sequence, each alone in its steps: the last of them end with the longest contexts.
    for place in range(SEQUENCES):
        length = LONGEST - 8 if place < 4 else 64
        tokens = [(place * 131 + i * 7) % 40_000 + 20 for i in range(length)]
        block_ids = list(range(place * blocks, (place + 1) * blocks))
        new = [NewSequence(place, tokens, length, block_ids=block_ids, sampling=EVERYTHING)]
        for begin in range(0, length, STEP_TOKENS):
            step += 1
            num_tokens = min(STEP_TOKENS, length - begin)
            advance = Advance(place, num_tokens, sample=begin + num_tokens == length)
            outputs = engine.step(Plan(step, (), new if begin == 0 else (), [advance])).outputs
            assert not any(output.error for output in outputs), outputs
    for _ in range(6):
        step += 1
        outputs = engine.step(Plan(step, advances=[Advance(i, 1, sample=True) for i in range(SEQUENCES)])).outputs
        assert not any(output.error for output in outputs), outputs
    engine.close()
    print(json.dumps({"promised": promised, "needed": transient_bytes(meter)}))


if __name__ == "__main__":
    main()
