"""Measures structured output: decode steps of the embedded model with a grammar on every stream, relative to none.

Runs a worker engine in this process, without a server. Each mode is a batch of streams, and the modes alternate step by
step, so that a busy machine slows all of them alike. Quote the ratios.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

from compare import in_own_process
from result import ROOT, heading, keep, option_parser

sys.path.insert(0, str(ROOT / "server"))

from penstock_server.engine import Engine
from penstock_server.prepare import prepare
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Advances, Grammar, NewSequence, Plan, Sampling

BLOCK_TOKENS, PROMPT_TOKENS = 16, 64
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z]{1,20}\\.(com|org)$"},
            "role": {"enum": ["admin", "editor", "viewer"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
        },
        "required": ["name", "age", "email", "role", "tags"],
        "additionalProperties": False,
    },
}
SCHEMA_GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
REGEX_GRAMMAR = Grammar("regex", "([A-Z][a-z]{1,12} [0-9]{1,4}(, |\\. )){500}")
MODES = {
    "greedy": {},
    "greedy, schema": {"grammar": SCHEMA_GRAMMAR},
    "greedy, regex": {"grammar": REGEX_GRAMMAR},
    "drawn": {"do_sample": True, "temperature": 0.8},
    "drawn, schema": {"do_sample": True, "temperature": 0.8, "grammar": SCHEMA_GRAMMAR},
}
Step = dict[str, float]
BASELINES = {"greedy, schema": "greedy", "greedy, regex": "greedy", "drawn, schema": "drawn"}


def sequence(mode: str, stream: int, blocks: range) -> NewSequence:
    prompt = [(stream * 101 + place * 7) % 40_000 + 20 for place in range(PROMPT_TOKENS)]
    sequence_id = list(MODES).index(mode) << 16 | stream
    sampling = Sampling(seed=stream, **MODES[mode])
    return NewSequence(sequence_id, prompt, PROMPT_TOKENS, block_ids=blocks, sampling=sampling)


def everyone(sequences: list[NewSequence], num_tokens: int) -> Advances:
    """All sequences advance by `num_tokens` and sample."""
    ids = [sequence.sequence_id for sequence in sequences]
    return Advances.of(ids, [num_tokens] * len(ids), [True] * len(ids))


def decode_steps(engine: Engine, num_streams: int, num_tokens: int, blocks_each: int) -> dict[str, list[Step]]:
    """The decode steps of every mode; the modes alternate step by step."""
    engine.reset()
    blocks = itertools.count(0, blocks_each)
    streams: dict[str, list[NewSequence]] = {mode: [] for mode in MODES}
    for mode, stream in itertools.product(MODES, range(num_streams)):
        first = next(blocks)
        streams[mode].append(sequence(mode, stream, range(first, first + blocks_each)))
    steps: dict[str, list[Step]] = {mode: [] for mode in MODES}
    numbers = itertools.count(1)
    for new in streams.values():
        engine.step(Plan(next(numbers), (), new, everyone(new, PROMPT_TOKENS)))
    for turn in range(1, num_tokens):
        order = list(MODES)[:: 1 if turn % 2 == 0 else -1]
        for mode in order:
            plan = Plan(next(numbers), advances=everyone(streams[mode], 1))
            started, started_cpu = time.perf_counter(), time.process_time()
            result = engine.step(plan)
            wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
            if result.failures:
                raise SystemExit(f"error: {result.failures[0].reason}")
            timing = result.timing
            parts = {"prepare_s": timing.prepare_s, "forward_s": timing.forward_s, "sample_s": timing.sample_s}
            steps[mode].append({"wall_s": wall_s, "cpu_s": cpu_s, **parts})
    return steps


def median_ms(steps: list[Step], part: str) -> float:
    return 1e3 * statistics.median(step[part] for step in steps)


def ratio_of_turns(repeat: dict[str, list[Step]], mode: str, part: str = "wall_s") -> float:
    """Median ratio of a mode's step time to its baseline's, over steps that ran in the same turn."""
    pairs = zip(repeat[mode], repeat[BASELINES[mode]], strict=True)
    return statistics.median(mine[part] / other[part] for mine, other in pairs)


def report(repeats: list[dict[str, list[Step]]]) -> str:
    """One line per mode: medians over all steps, and the ratio to the baseline."""
    lines = [
        "mode                 step ms      CPU ms  forward ms   sample ms   to the same without a grammar (each repeat)"
    ]
    for mode in MODES:
        steps = [step for repeat in repeats for step in repeat[mode]]
        line = f"{mode:<16}" + "".join(
            f"{median_ms(steps, part):12.3f}" for part in ("wall_s", "cpu_s", "forward_s", "sample_s")
        )
        if mode in BASELINES:
            ratios = [ratio_of_turns(repeat, mode) for repeat in repeats]
            cpu_ratio = statistics.median(ratio_of_turns(repeat, mode, "cpu_s") for repeat in repeats)
            line += f"   {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})"
            line += f", CPU {cpu_ratio:.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    limits = in_own_process("limits.py")
    engine, description = Engine.load(LoadConfig(Path(prepare(None).folder), BLOCK_TOKENS))
    blocks_each = -(-(PROMPT_TOKENS + options.tokens + 1) // BLOCK_TOKENS)
    num_blocks = len(MODES) * options.streams * blocks_each
    engine.warm_up(WarmUpConfig(options.streams * PROMPT_TOKENS, options.streams, 1024, num_blocks=num_blocks))
    compile_s = {}
    for name, grammar in (("first, with its process's start", REGEX_GRAMMAR), ("schema", SCHEMA_GRAMMAR)):
        before = time.perf_counter()
        engine.compile_grammar(grammar)
        compile_s[name] = time.perf_counter() - before
    decode_steps(engine, options.streams, 4, blocks_each)
    repeats: list[dict[str, list[Step]]] = []
    for repeat in range(options.repeats):
        repeats.append(decode_steps(engine, options.streams, options.tokens, blocks_each))
        print(f"repeat {repeat + 1} of {options.repeats}", flush=True)
    engine.close()
    record = {
        **heading(),
        "limits": limits,
        "load_s": {phase.name: phase.seconds for phase in description.phases},
        "compile_s": compile_s,
        "streams": options.streams,
        "repeats": repeats,
    }
    text = f"{options.streams} streams; compiled in " + ", ".join(f"{s:.3f} s ({n})" for n, s in compile_s.items())
    keep(record, "grammar", f"```\n{text}\n{report(repeats)}\n```\n", options.out)


if __name__ == "__main__":
    main()
