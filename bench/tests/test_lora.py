"""Adapters for the embedded model's layers, which requests take in turn."""

import json
from pathlib import Path

from figure import BENCHMARKS
from lora import dialect_of, linear_layers, make_adapter
from safetensors.torch import load_file

CONFIG = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
}


def test_an_adapter_has_both_matrices_of_every_linear_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    layers = linear_layers(tmp_path)
    assert len(layers) == 2 * 7
    assert layers["model.layers.1.self_attn.k_proj"] == (24, 48)
    make_adapter(tmp_path / "adapter", layers, 4, 0)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(layers)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    assert [tuple(tensors[f"{name}.{matrix}.weight"].shape) for matrix in ("lora_A", "lora_B")] == [(4, 96), (48, 4)]


def test_requests_take_the_adapters_in_turn() -> None:
    dialect = dialect_of(["a", "b"])
    assert [dialect.body("x", 1)["model"] for _ in range(3)] == ["a", "b", "a"]
    assert dialect_of([]).body("x", 1)["model"] == "tgi"


def test_throughput_is_relative_to_the_base_of_the_same_repeat() -> None:
    def repeat(*rates: float) -> dict[str, object]:
        cells = zip(("0", "1", "8"), rates, strict=True)
        return {"bf16": {num: {"tokens_per_s": rate} for num, rate in cells}}

    record = {"load": {"streams": 32, "rank": 16}, "repeats": [repeat(100.0, 90.0, 80.0), repeat(50.0, 50.0, 45.0)]}
    base, one, eight = BENCHMARKS["lora"](record)
    assert (base.values, one.values, eight.values) == ([100.0, 50.0], [0.9, 1.0], [0.8, 0.9])
    assert eight.name == "bf16, 32 streams: 8 adapters of rank 16 to the base"
