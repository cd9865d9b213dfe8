"""Measures one GPU: the engine's steps on models of real sizes with random weights, next to the device's own limits.

Plans come from this program, two steps in flight, as the router sends them; no router runs, so the times are the
worker's. `--model tiny --device cpu` runs every part in seconds, as a test of this program. `--predict` prints what a
decode step must read and compute, and needs no device.
"""

from __future__ import annotations

import itertools
import json
import statistics
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from figure import percentile
from penstock_server.config import LoadConfig, WarmUpConfig
from penstock_server.engine import Engine
from penstock_server.kernels.quantized import SUPER_GROUP, QuantFormat, QuantizedMatrix, QuantizedRows
from penstock_server.plan import Advances, NewSequence, Plan, Sampling
from penstock_server.weights.loader import Loader
from result import heading, keep, machine, option_parser
from table import markdown
from torch import Tensor

WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 5, 50, 20
CHUNK_TOKENS = 2048  # of a long prompt beside running streams
MAX_STEP_TOKENS = 8192
PIECE_ROWS = 4096  # of a quantized matrix
LIMIT_BYTES = 4 << 30
LIMIT_SIZE = 8192  # of the square matrices whose product is timed


@dataclass(frozen=True, slots=True)
class Size:
    """A model's config.json, and the loads that it is measured with."""

    config: dict[str, Any]
    streams: Sequence[int]  # with contexts of 1,024 tokens
    prompts: Sequence[int]  # whose time to the first token is measured
    batches: Sequence[tuple[int, int, int]]  # sequences, prompt tokens, output tokens
    long_prompt: int  # beside 64 streams
    max_sequences: int = 256
    format: QuantFormat | None = None  # of the layers' weights


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
TINY = Size(
    {
        **LLAMA,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    streams=(1, 4),
    prompts=(16, 100),
    batches=((4, 16, 4),),
    long_prompt=200,
    max_sequences=4,
)
SIZES = {
    "llama-8b": Size(
        {
            **LLAMA,
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
        },
        streams=(1, 8, 64, 256),
        prompts=(512, 4096, 32768),
        batches=((256, 1024, 1024), (32, 4096, 128)),
        long_prompt=32768,
    ),
    "qwen3-30b-a3b": Size(
        {
            **LLAMA,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rms_norm_eps": 1e-6,
        },
        streams=(1, 64),
        prompts=(512, 4096),
        batches=(),
        long_prompt=0,
    ),
    "tiny": TINY,
}
FORMATS = {
    "w4": QuantFormat(4, 128, offset=8, number="float16"),  # GPTQ
    "w8": QuantFormat(8, 32, offset=128, number="float16"),  # Q8_0
    "q4k": QuantFormat(4, 32, has_mins=True, number="int8"),  # Q4_K
    "q6k": QuantFormat(6, 16, offset=32, number="int8"),  # Q6_K
}
SIZES |= {
    f"{name}-{format_name}": replace(
        SIZES[name], format=format_, prompts=SIZES[name].prompts[:2], batches=(), long_prompt=0
    )
    for name in ("llama-8b", "tiny")
    for format_name, format_ in FORMATS.items()
}


def write_model(config: dict[str, Any], folder: Path) -> Path:
    """A model folder whose weight file has a header, and holes instead of data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in _published(model.state_dict()).items():
        header[name] = {"dtype": "BF16", "shape": list(tensor), "data_offsets": [end, end := end + 2 * tensor.numel()]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def _published(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes of the tensors as publishers store them: transformers 5 stacks a layer's experts."""
    shapes = {}
    for name, tensor in state.items():
        prefix, is_stacked, rest = name.partition(".experts.")
        if not is_stacked:
            shapes[name] = tensor.shape
            continue
        num_experts, rows, columns = tensor.shape
        for expert in range(num_experts):
            parts = ("gate_proj", "up_proj") if rest == "gate_up_proj" else ("down_proj",)
            for part in parts:
                shapes[f"{prefix}.experts.{expert}.{part}.weight"] = torch.Size((rows // len(parts), columns))
    return shapes


def read_random(loader: Loader, *names: str, dtype: torch.dtype | None = None) -> Tensor:
    """In place of `Loader.read`: random weights, made on the device."""
    parameters = [loader.parameters[name] for name in names]
    shapes = [parameter.local_shape for parameter in parameters]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    loader.unfilled.difference_update(names)
    made = torch.ones(shape, dtype=dtype or parameters[0].dtype_in(loader.dtype), device=loader.device)
    loader.loaded_bytes += made.nbytes
    return made if made.dim() == 1 else made.normal_(0, 0.02)


def read_quantized(
    format_: QuantFormat | None, loader: Loader, *names: str
) -> list[tuple[QuantizedMatrix, ...]] | None:
    """In place of `Loader.quantized`: random weights of this format. Embedding and output head are dense."""
    if format_ is None or names[0] in ("embedding.weight", "head.weight"):
        return None
    shapes = [loader.parameters[name].local_shape for name in names]
    matrices = tuple(random_matrix(format_, shape[0], shape[1], loader.device) for shape in shapes)
    loader.unfilled.difference_update(names)
    loader.loaded_bytes += sum(matrix.num_bytes for matrix in matrices)
    return [matrices]


def random_matrix(format_: QuantFormat, num_rows: int, num_columns: int, device: torch.device) -> QuantizedMatrix:
    """Made on the device, piece by piece."""

    def numbers(num: int, width: int, value: float, is_there: bool = True) -> Tensor | None:
        return torch.full((num, -(-num_columns // width)), value, device=device) if is_there else None

    def piece(num: int) -> QuantizedRows:
        codes = torch.randint(0, 1 << format_.bits, (num, num_columns), dtype=torch.uint8, device=device)
        # Codes have a standard deviation of 0.29 * 2**bits; weights, of 0.02.
        step, middle = 2.0**-4 / (1 << format_.bits), (1 << format_.bits) // 2
        is_integer = format_.number == "int8"
        scale, least = (1.0, -1.0) if is_integer else (step, -middle * step)
        scales = numbers(num, format_.group, scale)
        assert scales is not None
        return QuantizedRows(
            codes,
            scales,
            numbers(num, format_.group, least, format_.has_mins),
            numbers(num, SUPER_GROUP, step, is_integer),
            numbers(num, SUPER_GROUP, middle * step, is_integer and format_.has_mins),
        )

    starts = range(0, num_rows, PIECE_ROWS)
    sizes = [min(PIECE_ROWS, num_rows - start) for start in starts]
    return QuantizedMatrix((num_rows, num_columns), format_, lambda: map(piece, sizes))


@dataclass
class Sequences:
    """Sequences of one length, and the plans that advance them."""

    engine: Engine
    block_tokens: int
    num_blocks: int
    step: int = 0
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    first_block: int = 0

    def new(self, num: int, prompt_tokens: int, output_tokens: int) -> list[NewSequence]:
        """Sequences with all the blocks that they will need. Some may share blocks, because only time is measured."""
        per_sequence = -(-(prompt_tokens + output_tokens) // self.block_tokens)
        made = []
        for sequence_id in itertools.islice(self.ids, num):
            blocks = [(self.first_block + index) % self.num_blocks for index in range(per_sequence)]
            self.first_block = (self.first_block + per_sequence) % self.num_blocks
            tokens = [(sequence_id * 31 + place * 7) % 500 for place in range(prompt_tokens)]
            made.append(NewSequence(sequence_id, tokens, prompt_tokens, block_ids=blocks, sampling=Sampling()))
        return made

    def plan(self, advances: list[tuple[int, int, bool]], new: Sequence[NewSequence] = ()) -> Plan:
        self.step += 1
        columns = tuple(zip(*advances, strict=True))
        return Plan(self.step, (), new, Advances.of(*columns) if columns else Advances.of((), (), ()))

    def prefill(self, new: Sequence[NewSequence], most: int = MAX_STEP_TOKENS) -> Iterator[Plan]:
        """Chunks of at most `most` tokens, several prompts in one step where they fit."""
        started: list[NewSequence] = []
        advances: list[tuple[int, int, bool]] = []
        room = most
        for sequence in new:
            started.append(sequence)
            left = sequence.num_prompt_tokens
            while left:
                num = min(left, room)
                left -= num
                room -= num
                advances.append((sequence.sequence_id, num, left == 0))
                if room == 0:
                    yield self.plan(advances, started)
                    started, advances, room = [], [], most
        if advances:
            yield self.plan(advances, started)

    def decode(self, sequences: Sequence[NewSequence], num_steps: int) -> Iterator[Plan]:
        advances = [(sequence.sequence_id, 1, True) for sequence in sequences]
        return (self.plan(advances) for _ in range(num_steps))

    def run(self, plans: Iterator[Plan]) -> list[float]:
        """Runs plans, two in flight. Returns the time at which each result was there."""
        times = []
        in_flight: deque[Any] = deque()
        for plan in plans:
            in_flight.append(self.engine.launch(plan))
            if len(in_flight) > 1:
                self.engine.collect(in_flight.popleft())
                times.append(time.perf_counter())
        for pending in in_flight:
            self.engine.collect(pending)
            times.append(time.perf_counter())
        return times

    def forget(self) -> None:
        self.engine.reset()
        self.step = 0


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def measure_streams(sequences: Sequences, num: int, context: int) -> dict[str, Any]:
    """Seconds per decode step of `num` streams, and where a step's time goes."""
    new = sequences.new(num, context, WARM_STEPS + TIMED_STEPS + PROFILED_STEPS + 2)
    sequences.run(sequences.prefill(new))
    sequences.run(sequences.decode(new, WARM_STEPS))
    steps_s = gaps(sequences.run(sequences.decode(new, TIMED_STEPS + 1)))
    result = {"step_s": steps_s, "profile": profile(lambda: sequences.run(sequences.decode(new, PROFILED_STEPS)))}
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


def prediction(size: Size) -> dict[str, float]:
    """What a decode step reads, by the sizes of a model without experts, and its parameters."""
    config = size.config
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    in_layers, head = layers * (attention + 3 * hidden * config["intermediate_size"]), hidden * config["vocab_size"]
    layer_bytes = 2 * in_layers
    if size.format is not None:
        layer_bytes = QuantizedMatrix((in_layers // hidden, hidden), size.format, lambda: iter(())).num_bytes
    return {
        "weight_bytes": layer_bytes + 2 * head,
        "kv_bytes_per_token": 4 * layers * kv_heads * head_dim,
        "parameters": in_layers + head,
    }


def measure(name: str, device: torch.device, options: Any) -> dict[str, Any]:
    size = SIZES[name]
    folder = write_model(size.config, Path(tempfile.mkdtemp()))
    Loader.read = read_random  # type: ignore[method-assign]
    Loader.quantized = lambda loader, *names: read_quantized(size.format, loader, *names)  # type: ignore[method-assign]
    started = time.perf_counter()
    engine, description = Engine.load(LoadConfig(folder, dtype="bfloat16", device=str(device)))
    limits = WarmUpConfig(MAX_STEP_TOKENS, size.max_sequences, size.config["max_position_embeddings"])
    capacity = engine.warm_up(limits)
    record: dict[str, Any] = {
        "attention": description.attention,
        "weight_bytes": description.weight_bytes,
        "parameters": prediction(size)["parameters"] if size.format else description.weight_bytes // 2,
        "num_blocks": capacity.num_blocks,
        "block_tokens": description.block_tokens,
        "warm_up": [(phase.name, phase.seconds) for phase in capacity.phases],
        "ready_s": time.perf_counter() - started,
        "repeats": [],
    }
    sequences = Sequences(engine, description.block_tokens, capacity.num_blocks)
    context = min(1024, size.config["max_position_embeddings"] // 4)
    for repeat in range(options.repeats):
        result: dict[str, Any] = {"streams": {}, "ttft_s": {}, "batches": {}}
        for num in size.streams:
            result["streams"][num] = measure_streams(sequences, num, context)
        for prompt in size.prompts:
            result["ttft_s"][prompt] = measure_ttft(sequences, prompt)
        for batch in size.batches if repeat == 0 or not options.quick else ():
            result["batches"]["{} × {:,} / {:,}".format(*batch)] = measure_batch(sequences, *batch)
        if size.long_prompt:
            num = min(64, size.max_sequences - 1)
            result["beside_long_prompt"] = measure_beside(sequences, num, size.long_prompt)
        record["repeats"].append(result)
        print(f"  {name}: repeat {repeat + 1} of {options.repeats}", flush=True)
    engine.close()
    del engine, sequences
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if options.peers and size.format is None:
        record["transformers_tokens_per_s"] = transformers_eager(folder, device, 64 if device.type == "cuda" else 4)
    return record


def report(record: dict[str, Any]) -> str:
    rate, flops = record["limits"]["bytes_per_s"], record["limits"]["bf16_flop_per_s"]
    rows = []
    for name, result in record["models"].items():
        floor_s = result["weight_bytes"] / rate
        repeats = result["repeats"]
        for num in repeats[0]["streams"]:
            steps = [statistics.median(repeat["streams"][num]["step_s"]) for repeat in repeats]
            step_s = statistics.median(steps)
            idle = repeats[-1]["streams"][num]["profile"].get("idle_share")
            limit = f"{floor_s / step_s:.2f} of reading the weights"
            idle_text = "" if idle is None else f"{idle:.1%}"
            rows.append([name, f"decode, {num} streams", f"{num / step_s:,.0f} tokens/s", limit, idle_text])
        for prompt in repeats[0]["ttft_s"]:
            ttft_s = statistics.median(repeat["ttft_s"][prompt] for repeat in repeats)
            limit = f"{2 * result['parameters'] * prompt / flops / ttft_s:.2f} of the matrix products"
            rows.append([name, f"first token, prompt of {prompt}", f"{ttft_s * 1e3:,.1f} ms", limit, ""])
        for batch in repeats[0]["batches"]:
            found = [repeat["batches"][batch] for repeat in repeats if batch in repeat["batches"]]
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
    return heading_text + markdown(["model", "load", "median", "share of the limit", "idle"], rows)


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["llama-8b"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave transformers out")
    parser.add_argument("--quick", action="store_true", help="measure the batches once")
    parser.add_argument("--predict", action="store_true", help="print what a decode step reads, and stop")
    options = parser.parse_args()
    if options.predict:
        sizes = {name: prediction(SIZES[name]) for name in options.model}
        rows = [[name, *(f"{value:,.0f}" for value in size.values())] for name, size in sizes.items()]
        print(markdown(["model", "bytes of weights", "KV bytes per token", "parameters"], rows))
        return
    device = torch.device(options.device)
    is_gpu = device.type == "cuda"
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "limits": device_limits(device, LIMIT_BYTES if is_gpu else 1 << 24, LIMIT_SIZE if is_gpu else 256),
        "models": {},
    }
    for name in options.model:
        record["models"][name] = measure(name, device, options)
    keep(record, "gpu", report(record), options.out)


if __name__ == "__main__":
    main()
