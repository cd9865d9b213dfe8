"""Mixtures of experts in GGUF files, in every published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import logits_of, mixtral_file, model_metadata, save_gguf, tokenizer_metadata, write_gguf
from penstock_server.errors import ConfigError
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.gguf.checkpoint import GgufCheckpoint
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.header import read_header
from tiny_models import make_model, prompts

pytestmark = pytest.mark.usefixtures("model_cache")


def test_a_tensor_for_each_expert_equals_the_stacked_layout(tmp_path: Path) -> None:
    """The first files of Mixtral have a tensor for each expert."""
    path = mixtral_file(tmp_path / "stacked.gguf")
    text = prompts(1, [17], 131)[0]
    apart: dict[str, Any] = {}
    for name, info in read_header(path).tensors.items():
        tensor = torch.empty(info.shape)
        GgufCheckpoint(path).read(name, None, tensor)
        if "_exps." in name:
            apart |= {name.replace("_exps.", f".{index}."): of.numpy() for index, of in enumerate(tensor)}
            apart[name] = None
    old = mixtral_file(tmp_path / "old.gguf", **apart)
    assert "blk.0.ffn_gate.3.weight" in read_header(old).tensors
    assert torch.equal(logits_of(gguf_folder(old), text), logits_of(gguf_folder(path), text))


def test_quantized_experts_equal_their_dequantized_matrices(tmp_path: Path) -> None:
    exact, quantized = (GgufCheckpoint(mixtral_file(tmp_path / f"{kind}.gguf", kind)) for kind in ("F32", "Q8_0"))
    name = "blk.1.ffn_down_exps.weight"
    whole, expected, second = torch.empty(4, 32, 64), torch.empty(4, 32, 64), torch.empty(1, 32, 64)
    exact.read(name, None, expected)
    quantized.read(name, None, whole)
    quantized.read(name, Part(0, range(1, 2)), second)
    type_ = GGMLQuantizationType.Q8_0
    assert torch.equal(whole, torch.from_numpy(dequantize(quantize(expected.numpy(), type_), type_)))
    assert torch.equal(second[0], whole[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepseek2.expert_gating_func": 3}, r"expert_gating_func 3 is not supported; supported: 1 \(softmax\), 2"),
        ({"deepseek2.expert_weights_norm": True}, "expert_weights_norm is not supported with softmax"),
        ({"deepseek2.attention.kv_lora_rank": None}, r"lacks the metadata deepseek2\.attention\.kv_lora_rank"),
    ],
)
def test_unsupported_routing_is_refused_by_its_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    lengths = {"key_length": 12, "value_length": 12, "kv_lora_rank": 16, "layer_norm_rms_epsilon": 1e-6}
    metadata = {
        "general.architecture": "deepseek2",
        **{f"deepseek2.attention.{key}": value for key, value in lengths.items()},
        **{f"deepseek2.{key}": 4 for key in ("block_count", "context_length", "embedding_length", "expert_count")},
        **{f"deepseek2.{key}": 4 for key in ("attention.head_count", "feed_forward_length", "expert_used_count")},
        "deepseek2.rope.dimension_count": 4,
        **tokenizer_metadata(),
        **changes,
    }
    values = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / "x.gguf", values, {"token_embd.weight": np.zeros((264, 4), dtype=np.float32)})
    with pytest.raises(ConfigError, match=message):
        gguf_folder(path)


def test_experts_of_a_dense_architecture_are_refused_by_name(tmp_path: Path) -> None:
    path = save_gguf(make_model("qwen2"), tmp_path / "x.gguf", "qwen2", **{"qwen2.expert_count": 4})
    with pytest.raises(ConfigError, match="qwen2 with experts is not supported; supported: dbrx, deepseek2"):
        gguf_folder(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((4, 5, 6), r"is \[4, 8, 3\] and does not match blk\.0\.attn_v_b\.weight, \[4, 5, 6\]"),
        (None, "has no matching attn_v_b tensor"),
    ],
)
def test_halves_of_a_latent_expansion_that_do_not_match_are_refused(
    values: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    metadata = {"general.architecture": "deepseek2", **model_metadata(make_model("llama").config, "deepseek2")}
    tensors = {"blk.0.attn_k_b.weight": np.zeros((4, 8, 3), dtype=np.float32)}
    if values is not None:
        tensors["blk.0.attn_v_b.weight"] = np.zeros(values, dtype=np.float32)
    with pytest.raises(ConfigError, match=message):
        GgufCheckpoint(write_gguf(tmp_path / "x.gguf", metadata, tensors))
