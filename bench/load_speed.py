"""Measures weight loading: time and peak memory, relative to a plain read of the same bytes.

Uses the embedded model and synthetic checkpoints (Llama's shape, random bf16, sharded, deleted afterwards): one of 4
GB, and one of a quarter of that which is mostly head and embedding. Each repeat: a plain sequential read, a load in a
separate process with and without the NaN check, and the real binary from start to "ready" by phase. "cold" drops the
files from the page cache first. Each measurement first touches as much free memory as a load takes, because the host of
a virtual machine backs unused pages ten times slower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compare import embedded_folder, in_own_process
from result import ROOT, heading, keep, machine, option_parser, title
from table import markdown

sys.path.insert(0, str(ROOT / "integration-tests"))

from binary import logged, start

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 2048, 8192, 16, 4, 49152
SHARD_BYTES = 1_000_000_000
READ_BYTES = 16 << 20
TOUCHED = 1.3  # relative to the files' bytes


def make_checkpoint(folder: Path, total_bytes: int, tokenizer: Path, vocabulary: int = VOCABULARY) -> None:
    """A Llama checkpoint of about the given size."""
    import torch
    from safetensors.torch import save_file

    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    layer_bytes = 2 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    num_layers = max(1, (total_bytes - 4 * vocabulary * HIDDEN) // layer_bytes)
    wanted = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocabulary, HIDDEN))
    wanted |= {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in shapes.items()}
    wanted["model.norm.weight"] = (HIDDEN,)
    shards: list[dict[str, Any]] = [{}]
    weight_map = {}
    for name, shape in wanted.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD_BYTES:
            save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors")
            shards[-1] = {}
            shards.append({})
        shards[-1][name] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        weight_map[name] = f"model-{len(shards):05}.safetensors"
    save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").symlink_to(tokenizer)


def weight_files(folder: Path) -> list[Path]:
    return sorted(path.resolve() for suffix in ("safetensors", "gguf") for path in folder.glob(f"*.{suffix}"))


def drop_pages(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch_memory(num_bytes: int) -> None:
    """Makes the host back this much free memory, and frees it again."""
    with mmap.mmap(-1, num_bytes) as memory:
        for start in range(0, num_bytes, READ_BYTES):
            memory[start : start + READ_BYTES] = bytes(len(memory[start : start + READ_BYTES]))


def read_s(paths: list[Path]) -> float:
    """Seconds of a plain sequential read."""
    start = time.perf_counter()
    buffer = bytearray(READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def load_here(folder: str, is_checked: bool) -> dict[str, Any]:
    """Loads in this process: seconds, and the growth of resident memory."""
    import torch
    from penstock_server.device.native.build import find_build
    from penstock_server.engine.device import choose_dtype
    from penstock_server.models import load_model
    from penstock_server.models.interface import LoadOptions
    from penstock_server.parallel import RankGroup
    from penstock_server.weights import safetensors_file
    from penstock_server.weights.gguf import checkpoint as gguf_checkpoint

    if not is_checked:
        for module in (gguf_checkpoint, safetensors_file):
            module.check_finite = lambda *arguments: None  # type: ignore[assignment]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cpu")
    dtype = choose_dtype("", device)
    if (build := find_build(device, dtype)) is not None:
        build.kernels()
    torch.ones(1 << 20).sum()  # start threads and load libraries before the clock starts
    before = status_bytes("VmRSS")
    start = time.perf_counter()
    model = load_model(LoadOptions(Path(folder), dtype, device, 16), RankGroup())
    seconds = time.perf_counter() - start
    peak, after = status_bytes("VmHWM"), status_bytes("VmRSS")
    return {
        "seconds": seconds,
        "weight_bytes": model.weight_bytes,
        "rss_bytes": {"before": before, "peak": peak, "after": after},
    }


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def start_server(model: list[str]) -> dict[str, Any]:
    """Seconds to ready as the server reports them, in total and by phase."""
    began = time.perf_counter()
    server = start(*model, env={"LOG_LEVEL": "debug"})
    wall_s = time.perf_counter() - began
    server.stop()
    return {"ready_s": logged(server, "ready")[""], "wall_s": wall_s, "phases": logged(server, "phase ")}


def measure(folder: Path, model: list[str], is_cold: bool) -> dict[str, Any]:
    paths = weight_files(folder)
    num_bytes = sum(path.stat().st_size for path in paths)

    def prepared() -> None:
        touch_memory(int(num_bytes * TOUCHED))
        if is_cold:
            drop_pages(paths)

    def load(flag: str) -> Any:
        prepared()
        return in_own_process("load_speed.py", flag, str(folder))

    prepared()
    raw_s = read_s(paths)
    result = {"raw_read_s": raw_s, "load": load("--load"), "load_unchecked": load("--load-unchecked")}
    prepared()
    return {**result, "server": start_server(model)}


def report(record: dict[str, Any]) -> str:
    rows = []
    for name, of_model in record["models"].items():
        for state, repeats in of_model["repeats"].items():
            raw = statistics.median(repeat["raw_read_s"] for repeat in repeats)
            load = statistics.median(repeat["load"]["seconds"] for repeat in repeats)
            unchecked = statistics.median(repeat["load_unchecked"]["seconds"] for repeat in repeats)
            ready = statistics.median(repeat["server"]["ready_s"] for repeat in repeats)
            loads = [repeat["load"] for repeat in repeats]
            peak = max((one["rss_bytes"]["peak"] - one["rss_bytes"]["before"]) / one["weight_bytes"] for one in loads)
            weights = statistics.median(repeat["server"]["phases"]["load: load model"] for repeat in repeats)
            row = [name, state, f"{raw:.2f}", f"{load:.2f}", f"{load / raw:.2f}", f"{load / unchecked - 1:+.1%}"]
            rows.append([*row, f"{ready:.2f}", f"{ready / raw:.2f}", f"{weights:.2f}", f"{peak:.2f}"])
    header = ["model", "pages", "raw read s", "load s", "÷ raw", "NaN check", "ready s", "÷ raw", "of it load model s"]
    header.append("peak ÷ weights")
    return f"{title(record)}Load average {record['machine']['load_average']:.1f}\n\n{markdown(header, rows)}"


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--states", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--load-unchecked", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load or options.load_unchecked:
        print(json.dumps(load_here(options.load or options.load_unchecked, bool(options.load))))
        return
    embedded = embedded_folder()
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "models": {},
    }
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as scratch:
        models: dict[str, tuple[Path, list[str]]] = {"embedded": (embedded, [])}
        large = (f"synthetic {options.gigabytes:g} GB", options.gigabytes, VOCABULARY)
        head = ("large head", options.gigabytes / 4, 2 * VOCABULARY)
        for name, gigabytes, vocabulary in (large, head):
            folder = Path(scratch) / name.replace(" ", "-")
            folder.mkdir()
            make_checkpoint(folder, int(gigabytes * 1e9), embedded / "tokenizer.json", vocabulary)
            models[name] = (folder, ["--model-id", str(folder)])
        for name, (folder, flags) in models.items():
            repeats: dict[str, list[Any]] = {state: [] for state in options.states}
            for repeat, (state, results) in itertools.product(range(options.repeats), repeats.items()):
                print(f"{name}, {state}, repeat {repeat + 1}", flush=True)
                results.append(measure(folder, flags, state == "cold"))
            size = sum(path.stat().st_size for path in weight_files(folder))
            record["models"][name] = {"file_bytes": size, "repeats": repeats}
    keep(record, "load", report(record), options.out)


if __name__ == "__main__":
    main()
