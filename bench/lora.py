"""Measures what LoRA adapters cost: throughput with one adapter on every stream, and with eight of them in one batch,
relative to the base alone.

All loads of one repeat alternate on one server. The adapters have random weights for every linear layer of the embedded
model; each request takes the next one.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
import torch
from compare import WEIGHTS, embedded_folder, free_port, penstock_server, running, stream_load
from figure import lora, table_of
from load import Dialect, openai_dialect, run
from result import heading, keep, machine, option_parser, title
from safetensors.torch import save_file

NUM_ADAPTERS = (0, 1, 8)
NUM_REQUESTS = 4  # requests per stream


def linear_layers(folder: Path) -> dict[str, tuple[int, int]]:
    """The linear layers of a prepared model, with their output and input features."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * (config.get("head_dim") or hidden // num_heads)
    queries = num_heads * (config.get("head_dim") or hidden // num_heads)
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        f"model.layers.{layer}.{block}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for block, shapes in (("self_attn", attention), ("mlp", mlp))
        for name, shape in shapes.items()
    }


def make_adapter(folder: Path, layers: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """An adapter whose products are small beside those of the base."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out_features, in_features) in layers.items():
        for matrix, shape in (("lora_A", (rank, in_features)), ("lora_B", (out_features, rank))):
            values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.{matrix}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 16, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def dialect_of(names: Sequence[str]) -> Dialect:
    """Requests that take the adapters in turn. All answers have the same length: adapters move their ends."""
    turns = itertools.cycle(names or ["tgi"])
    return openai_dialect(
        "/v1/completions", lambda prompt, _: {"prompt": prompt, "model": next(turns), "ignore_eos": True}
    )


def main() -> None:
    parser = option_parser(__doc__, num_repeats=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that every server is stopped

    words = peers.prompt_words()
    names = [f"adapter-{index}" for index in range(max(NUM_ADAPTERS))]
    repeats: list[dict[str, Any]] = [{} for _ in range(options.repeats)]
    record: dict[str, Any] = {
        **heading(),
        "machine": machine(),
        "load": {"streams": options.streams, "rank": options.rank},
        "repeats": repeats,
    }
    with tempfile.TemporaryDirectory(prefix="lora-") as folder:
        layers = linear_layers(embedded_folder())
        for seed, name in enumerate(names):
            make_adapter(Path(folder) / name, layers, options.rank, seed)
        flags = ["--lora-adapters", ",".join(f"{name}={folder}/{name}" for name in names)]
        for weights in options.weights:
            port = free_port()
            with running(penstock_server(flags, dequantize=WEIGHTS[weights]), port):
                for num in NUM_ADAPTERS:
                    run(port, dialect_of(names[:num]), stream_load(options.streams, 1), words, "warm-up")
                for repeat, measured in enumerate(repeats):
                    cells = measured.setdefault(weights, {})
                    for num in NUM_ADAPTERS[:: -1 if repeat % 2 else 1]:
                        load = stream_load(options.streams, NUM_REQUESTS)
                        result = run(port, dialect_of(names[:num]), load, words, f"{repeat}/{num}")
                        cells[str(num)] = {"tokens_per_s": result.tokens_per_s, "wall_s": result.wall_s}
                        print(f"  {weights}, {num} adapters: {result.tokens_per_s:.1f} tokens/s", flush=True)
    keep(record, "lora", title(record) + table_of(lora(record)), options.out)


if __name__ == "__main__":
    main()
