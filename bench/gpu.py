"""Measures one GPU: the engine's steps on models of real sizes with random weights, next to the device's own limits.

Plans come from this program, two steps in flight, as the router sends them; no router runs, so the times are the
worker's. `--model tiny --device cpu` runs every part in seconds, as a test of this program. The result is written
after every model and repeat; with `--resume`, models that the file holds are not measured again.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from figure import percentile
from penstock_server.engine import Engine
from penstock_server.engine.drafting import ngram
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Plan
from penstock_server.weights.loader import Loader
from prediction import decode_name, floor_s, prompt_name
from random_model import SIZES, read_quantized, read_random, write_model
from result import SUFFIX, heading, machine, new_path, option_parser, read, write
from sequences import MAX_STEP_TOKENS, Sequences
from table import markdown

WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 5, 50, 20
CHUNK_TOKENS = 2048  # tokens of a long prompt that join a step of running streams
NUM_DRAFTS = (0, 1, 3, 7)  # draft tokens of one stream in a step
LIMIT_BYTES = 4 << 30
LIMIT_SIZE = 8192  # rows of the square matrices whose product is timed


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def measure_streams(sequences: Sequences, num: int, context: int) -> dict[str, Any]:
    """Seconds per decode step of `num` streams, and where the host's and the device's time of a step goes."""
    new = sequences.new(num, context, WARM_STEPS + TIMED_STEPS + PROFILED_STEPS + 2)
    sequences.run(sequences.prefill(new))
    sequences.run(sequences.decode(new, WARM_STEPS))
    steps_s = gaps(sequences.run(sequences.decode(new, TIMED_STEPS + 1)))
    phases_s = sequences.phases_s(TIMED_STEPS)
    profiled = profile(lambda: sequences.run(sequences.decode(new, PROFILED_STEPS)))
    result = {"step_s": steps_s, "phases_s": phases_s, "profile": profiled}
    sequences.forget()
    return result


def measure_drafts(sequences: Sequences, num_drafts: int, context: int) -> dict[str, Any]:
    """Seconds per decode step of one stream that verifies drafts, few of them right, and the part of the step in which
    the device waits for the host to make drafts."""
    num_steps = WARM_STEPS + TIMED_STEPS + 1
    new = sequences.new(1, context, (1 + num_drafts) * num_steps)
    sequences.run(sequences.prefill(new))
    sequences.run(sequences.decode(new, WARM_STEPS, num_drafts))
    steps_s = gaps(sequences.run(sequences.decode(new, TIMED_STEPS + 1, num_drafts)))
    result = {"step_s": steps_s, "waiting_s": sequences.phases_s(TIMED_STEPS)["draft_s"]}
    sequences.forget()
    return result


def profile(run: Callable[[], object]) -> dict[str, Any]:
    """The device's time by kernel and its idle share, from torch's profiler, which slows the host down a little."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    started = time.perf_counter()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        run()
        wall_s = time.perf_counter() - begin
    kernels = {event.key: event.self_device_time_total / 1e6 for event in profiler.key_averages()}
    counts = {event.key: event.count for event in profiler.key_averages()}
    busy_s = sum(kernels.values())
    top = sorted(kernels, key=lambda key: -kernels[key])[:20]
    return {
        "wall_s": wall_s,
        "busy_s": busy_s,
        "idle_share": 1 - busy_s / wall_s,
        "kernels": {key: {"seconds": kernels[key], "count": counts[key]} for key in top},
        "profiler_s": time.perf_counter() - started - wall_s,
    }


def measure_ttft(sequences: Sequences, prompt_tokens: int) -> float:
    """Seconds from the first launch to the first token of one prompt."""
    new = sequences.new(1, prompt_tokens, 1)
    started = time.perf_counter()
    ended = sequences.run(sequences.prefill(new))[-1]
    sequences.forget()
    return ended - started


def measure_batch(sequences: Sequences, num: int, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
    new = sequences.new(num, prompt_tokens, output_tokens)
    started = time.perf_counter()
    prefilled = sequences.run(sequences.prefill(new))[-1]
    ended = sequences.run(sequences.decode(new, output_tokens - 1))[-1]
    sequences.forget()
    return {"seconds": ended - started, "prefill_s": prefilled - started, "output_tokens": num * output_tokens}


def measure_beside(sequences: Sequences, num: int, prompt_tokens: int) -> dict[str, list[float]]:
    """Gaps between the tokens of streams without and with chunks of a long prompt in every step."""
    chunk_tokens = min(CHUNK_TOKENS, prompt_tokens // 4)
    num_chunks = -(-prompt_tokens // chunk_tokens)
    new = sequences.new(num, 256, WARM_STEPS + TIMED_STEPS + num_chunks + 2)
    sequences.run(sequences.prefill(new))
    sequences.run(sequences.decode(new, WARM_STEPS))
    without = gaps(sequences.run(sequences.decode(new, TIMED_STEPS)))
    (prompt,) = sequences.new(1, prompt_tokens, 1)

    def mixed() -> Iterator[Plan]:
        left = prompt_tokens
        while left:
            chunk = min(chunk_tokens, left)
            starts = left == prompt_tokens
            left -= chunk
            decodes = [(sequence.sequence_id, 1, True) for sequence in new]
            yield sequences.plan([*decodes, (prompt.sequence_id, chunk, left == 0)], [prompt] if starts else ())

    during = gaps(sequences.run(mixed()))
    sequences.forget()
    return {"without": without, "with": during}


def device_limits(device: torch.device, num_bytes: int, size: int) -> dict[str, float]:
    """Bytes per second of a read and write, and operations per second of a bf16 matrix product."""
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    copy_s = best_seconds(device, lambda: target.copy_(source))
    product_s = best_seconds(device, lambda: a @ b)
    return {"bytes_per_s": 2 * source.nbytes / copy_s, "bf16_flop_per_s": 2 * size**3 / product_s}


def best_seconds(device: torch.device, run: Callable[[], object], num: int = 10) -> float:
    times = []
    for _ in range(num + 2):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def transformers_eager(folder: Path, device: torch.device, num_tokens: int) -> float:
    """Tokens per second of one stream by transformers' own generation, after a prompt of 128 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
        prompt = torch.arange(128)[None] % 500
    for num in (4, num_tokens):
        synchronize(device)
        started = time.perf_counter()
        model.generate(prompt, max_new_tokens=num, min_new_tokens=num, do_sample=False, pad_token_id=0)
        synchronize(device)
    return num_tokens / (time.perf_counter() - started)


def predicted(name: str) -> dict[str, Any]:
    """What `predict.py` counts, in a process of its own, because it replaces parts of the engine. Empty if it fails,
    which the log then shows: a measurement is worth more than its prediction."""
    with tempfile.TemporaryDirectory() as out:
        program = [sys.executable, str(Path(__file__).with_name("predict.py"))]
        subprocess.run([*program, "--model", name, "--out", out], stdout=subprocess.DEVNULL, check=False)
        found = [read(path) for path in Path(out).glob(f"*{SUFFIX}")]
    return found[0]["models"][name] if found else {}


def measure(name: str, device: torch.device, options: Any, save: Callable[[dict[str, Any]], None]) -> None:
    """Measures one model, and saves what there is after every repeat."""
    size = SIZES[name]
    record: dict[str, Any] = {"predicted": predicted(name), "repeats": [], "is_complete": False}
    folder = write_model(size.config, Path(tempfile.mkdtemp()))
    Loader.read = read_random  # type: ignore[method-assign]
    Loader.quantized = lambda loader, *names: read_quantized(size.format, loader, *names)  # type: ignore[method-assign]
    # N-grams find nothing in random text; these drafts skip the search.
    ngram.continuation = lambda history, most, least_match=0: history[:most]
    started = time.perf_counter()
    config = LoadConfig(folder, dtype="bfloat16", device=str(device), deterministic=size.deterministic)
    engine, description = Engine.load(config)
    limits = WarmUpConfig(MAX_STEP_TOKENS, size.max_sequences, size.config["max_position_embeddings"])
    capacity = engine.warm_up(limits)
    record |= {
        "attention": description.attention,
        "weight_bytes": description.weight_bytes,
        "num_blocks": capacity.num_blocks,
        "block_tokens": description.block_tokens,
        "warm_up": [(phase.name, phase.seconds) for phase in capacity.phases],
        "ready_s": time.perf_counter() - started,
    }
    sequences = Sequences(engine, description.block_tokens, capacity.num_blocks)
    for repeat in range(options.repeats):
        result: dict[str, Any] = {"streams": {}, "drafts": {}, "ttft_s": {}, "batches": {}}
        for num in size.streams:
            result["streams"][str(num)] = measure_streams(sequences, num, size.context_tokens)
        for num_drafts in NUM_DRAFTS:
            if num_drafts < size.max_sequences:
                result["drafts"][str(num_drafts)] = measure_drafts(sequences, num_drafts, size.context_tokens)
        for prompt in size.prompts:
            result["ttft_s"][str(prompt)] = measure_ttft(sequences, prompt)
        for batch in size.batches:
            result["batches"]["{} × {:,} / {:,}".format(*batch)] = measure_batch(sequences, *batch)
        if size.long_prompt:
            num = min(64, size.max_sequences - 1)
            result["beside_long_prompt"] = measure_beside(sequences, num, size.long_prompt)
        record["repeats"].append(result)
        save(record)
        print(f"  {name}: repeat {repeat + 1} of {options.repeats}", flush=True)
    engine.close()
    del engine, sequences
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if options.peers and size.format is None and not size.deterministic:
        record["transformers_tokens_per_s"] = transformers_eager(folder, device, 64 if device.type == "cuda" else 4)
    record["is_complete"] = True
    save(record)


def report(record: dict[str, Any]) -> str:
    rate, flops = record["limits"]["bytes_per_s"], record["limits"]["bf16_flop_per_s"]
    rows = []
    for name, result in record["models"].items():
        repeats = result["repeats"]

        def share(load: str, seconds: float, counts: dict[str, Any] = result["predicted"]) -> str:
            """The predicted floor, by the limits of this run, to what was measured."""
            return f"{floor_s(counts[load], rate, flops) / seconds:.2f}" if load in counts else ""

        for num in repeats[0]["streams"]:
            steps = [repeat["streams"][num] for repeat in repeats]
            step_s = statistics.median(statistics.median(step["step_s"]) for step in steps)
            idle = steps[-1]["profile"].get("idle_share")
            load = decode_name(int(num))
            idle_text = "" if idle is None else f"{idle:.1%}"
            rows.append([name, load, f"{int(num) / step_s:,.0f} tokens/s", share(load, step_s), idle_text])
        for num_drafts in repeats[0].get("drafts", ()):  # older results have none
            found = [repeat["drafts"][num_drafts] for repeat in repeats]
            step_s = statistics.median(statistics.median(one["step_s"]) for one in found)
            waiting_s = statistics.median(one["waiting_s"] for one in found)
            text = f"{step_s * 1e3:,.2f} ms, waiting {waiting_s * 1e3:,.2f} ms"
            rows.append([name, f"step of 1 stream with {num_drafts} drafts", text, "", ""])
        for prompt in repeats[0]["ttft_s"]:
            ttft_s = statistics.median(repeat["ttft_s"][prompt] for repeat in repeats)
            load = prompt_name(int(prompt))
            rows.append([name, f"first token, {load}", f"{ttft_s * 1e3:,.1f} ms", share(load, ttft_s), ""])
        for batch in repeats[0]["batches"]:
            found = [repeat["batches"][batch] for repeat in repeats]
            tokens = statistics.median(one["output_tokens"] / one["seconds"] for one in found)
            rows.append([name, f"batch of {batch}", f"{tokens:,.0f} output tokens/s", "", ""])
        if "beside_long_prompt" in repeats[0]:
            for which in ("without", "with"):
                times = [percentile(repeat["beside_long_prompt"][which], 0.99) * 1e3 for repeat in repeats]
                rows.append([name, f"p99 gap {which} a long prompt", f"{statistics.median(times):.1f} ms", "", ""])
        if "transformers_tokens_per_s" in result:
            rate_text = f"{result['transformers_tokens_per_s']:,.1f} tokens/s"
            rows.append([name, "transformers, eager, 1 stream", rate_text, "", ""])
    heading_text = (
        f"{record['started']}, {record['device']}, torch {record['torch']}, `{record['command']}`, "
        f"{record['revision']}\n\nMeasured limits: {rate / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s in bf16.\n\n"
    )
    return heading_text + markdown(["model", "load", "median", "predicted floor to it", "idle"], rows)


def begin(options: Any, device: torch.device) -> tuple[dict[str, Any], Path]:
    """The record and its file: the run to resume, or a new one."""
    if options.resume and options.resume.exists():
        return read(options.resume), options.resume
    is_gpu = device.type == "cuda"
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "limits": device_limits(device, LIMIT_BYTES if is_gpu else 1 << 24, LIMIT_SIZE if is_gpu else 256),
        "models": {},
    }
    return record, options.resume or new_path(record, "gpu", options.out)


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["llama-8b"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave transformers out")
    parser.add_argument("--resume", type=Path, help="raw result to add to; a new one gets this name")
    options = parser.parse_args()
    device = torch.device(options.device)
    record, path = begin(options, device)
    for name in options.model:
        if record["models"].get(name, {}).get("is_complete"):
            continue

        def save(found: dict[str, Any], name: str = name) -> None:
            record["models"][name] = found
            write(record, report(record), path)

        measure(name, device, options, save)
    print(f"\n{report(record)}\nraw: {path}")


if __name__ == "__main__":
    main()
