"""Compares models with states: Penstock and llama.cpp on the same GGUF files, of published shapes with random weights.

llama.cpp's own script converts the files, and its own tool quantizes them. The loads are those of compare.py, and
prompts of 2,000 and 8,000 tokens. Then a conversation of 8,000 tokens goes on: the time to the first token of its next
turn, with what the turns before have left in each server's cache, and with nothing there.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
from compare import (
    Measure,
    Server,
    embedded_folder,
    exit_on_errors,
    free_port,
    in_own_process,
    llama_server,
    loads_of,
    measure,
    measure_all,
    penstock_server,
    running,
)
from load import Load, _ask, prompt_of
from result import heading, keep, option_parser, title
from table import markdown

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "rope_parameters": ROPE | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
        "tie_word_embeddings": True,
    },
    "granite-4.0-h-micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
}
KINDS = ("bf16", "Q4_K_M")
STREAMS = (1, 8, 32)
PROMPTS = (Load("ttft 2000", 1, 3, 2000, 4), Load("ttft 8000", 1, 2, 8000, 4))
LOADS = [*loads_of(STREAMS, quick=False), *PROMPTS]
HISTORY_TOKENS, TURN_TOKENS, NUM_TURNS = 8000, 100, 3
SLOT_TOKENS = 8500  # tokens of each slot of the peer's KV cache
PENSTOCK_FLAGS = ("--max-total-tokens", "9000", "--max-input-tokens", "8900", "--max-batch-total-tokens", "20000")


def gguf_of(name: str, kind: str) -> Path:
    """A model's file, which is made once: random weights, converted and quantized by llama.cpp."""
    folder = peers.PEERS / "states"
    target = folder / f"{name}.{kind}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    if kind == "bf16":
        with tempfile.TemporaryDirectory(dir=folder) as made:
            make_model(SHAPES[name], Path(made))
            script = peers.LLAMA / "convert_hf_to_gguf.py"
            options = ["--outtype", "bf16", "--outfile", str(unfinished)]
            if name.startswith("qwen"):
                options.append("--no-mtp")  # transformers makes no layer that drafts
            subprocess.run([sys.executable, str(script), made, *options], check=True)
    else:
        quantize = str(peers.build_llama("llama-quantize"))
        subprocess.run([quantize, str(gguf_of(name, "bf16")), str(unfinished), kind], check=True)
    unfinished.rename(target)
    return target


def make_model(config: dict[str, Any], folder: Path) -> None:
    """A model folder with random weights and the embedded model's tokenizer, whose tokens are the first ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / name, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # As published: transformers writes what it has made of the numbers.
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")


def weight_bytes(path: Path) -> int:
    """Bytes that a decode step reads: all tensors, because the head of these models is their embedding."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)


def turns(server: Server, words: Sequence[str], seed: str) -> dict[str, list[float]]:
    """Seconds to the first token of turns of a conversation, and of as many conversations that are new."""
    source, port = random.Random(f"turns/{seed}"), free_port()
    found: dict[str, list[float]] = {"next": [], "new": []}

    def ttft_s(prompt: str, num_tokens: int) -> float:
        load = Load("turn", 1, 1, num_tokens, 4)
        return asyncio.run(_ask(port, server.dialect, prompt, load, time.perf_counter())).ttft_s

    with running(server, port):
        history, num_tokens = prompt_of(words, HISTORY_TOKENS, source), HISTORY_TOKENS
        ttft_s(history, num_tokens)
        for _ in range(NUM_TURNS):
            history, num_tokens = history + prompt_of(words, TURN_TOKENS, source), num_tokens + TURN_TOKENS
            found["next"].append(ttft_s(history, num_tokens))
            found["new"].append(ttft_s(prompt_of(words, num_tokens, source), num_tokens))
    return found


def servers_of(name: str, kind: str) -> Iterator[Server]:
    path = gguf_of(name, kind)
    ours = penstock_server(["--model-id", str(path), *PENSTOCK_FLAGS], dequantize=False)
    yield replace(ours, weights=kind)
    most = max(STREAMS)
    yield replace(llama_server("llama.cpp", path, most, [], slot_tokens=SLOT_TOKENS), weights=kind)


def measured(server: Server, words: Sequence[str], seed: str) -> dict[str, Any]:
    result = measure(server, LOADS, words, seed)
    conversing = server
    if server.name == "llama.cpp":
        # One slot, so that the next turn finds it, and its cache of prompts, which llama.cpp has on by default.
        model = Path(server.command(0)[2])
        conversing = llama_server("llama.cpp", model, 1, ["--cache-ram", "8192"], slot_tokens=SLOT_TOKENS)
    return result | {"turns": turns(conversing, words, seed)}


def report(record: dict[str, Any]) -> str:
    header = ["model", "weights", "server", *(load.name for load in LOADS), "next turn", "new conversation"]
    rows = []
    for key in record["repeats"][0]:
        results = [repeat[key] for repeat in record["repeats"] if "error" not in repeat[key]]
        cells = []
        for load in LOADS:
            values = [speed(result, load.name) for result in results]
            middle = statistics.median(values) if values else math.nan
            cells.append(f"{middle * 1e3:.0f} ms" if load.name.startswith("ttft") else f"{middle:.1f}")
        for turn in ("next", "new"):
            seconds = [second for result in results for second in result["turns"][turn]]
            cells.append(f"{statistics.median(seconds) * 1e3:.0f} ms" if seconds else "failed")
        rows.append([*key.split(" "), *cells])
    return title(record) + markdown(header, rows)


def speed(result: dict[str, Any], load: str) -> float:
    """Tokens per second, or the median seconds to the first token."""
    found = result["loads"][load]
    if load.startswith("ttft"):
        return statistics.median(found["ttft_s"])
    return float(found["decode_tokens_per_s" if load == "decode" else "tokens_per_s"])


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", choices=("penstock", "llama.cpp"), default=["penstock", "llama.cpp"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped
    words = peers.prompt_words()
    measures: dict[str, Measure] = {
        f"{name} {kind} {server.name}": lambda seed, server=server: measured(server, words, seed)
        for name in options.models
        for kind in options.kinds
        for server in servers_of(name, kind)
        if server.name in options.only
    }
    record: dict[str, Any] = {
        **heading(),
        "limits": in_own_process("limits.py"),
        "source": peers.LLAMA_SOURCE,
        "weight_bytes": {
            f"{name} {kind}": weight_bytes(gguf_of(name, kind)) for name in options.models for kind in options.kinds
        },
        "repeats": [measure_all(measures, repeat) for repeat in range(options.repeats)],
        "limits_after": in_own_process("limits.py"),
    }
    keep(record, "states", report(record), options.out)
    exit_on_errors(record)


if __name__ == "__main__":
    main()
