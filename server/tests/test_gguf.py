"""GGUF files: the same weights, configuration and tokenizer as the model they were made from, or a message why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import gguf_tensors, model_metadata, save_gguf, tokenizer_metadata, write_gguf
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.gguf_config import Metadata, model_config
from penstock_server.weights.gguf_file import GgufCheckpoint
from penstock_server.weights.gguf_folder import gguf_folder
from penstock_server.weights.gguf_header import read_header
from penstock_server.weights.gguf_tokenizer import tokenizer_config, tokenizer_json
from tiny_models import make_model, prompts, save_model
from tokenizers import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits_of(folder: Path, text: list[int]) -> torch.Tensor:
    model = load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 4), RankGroup())
    driver = ModelDriver(model)
    logits = driver.step([(driver.sequence(text), len(text))], every_row=True)
    assert logits is not None
    return logits


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [("llama", "llama"), ("llama-tied", "llama"), ("llama-biases", "llama"), ("linear-rope", "llama"), ("qwen2",) * 2],
)
def test_a_gguf_file_is_the_model_it_was_made_from(variant: str, architecture: str, tmp_path: Path) -> None:
    model = make_model(variant)
    changes: dict[str, Any] = {}
    if variant == "linear-rope":
        changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = save_gguf(model, tmp_path / "tiny.gguf", architecture, **changes)
    text = prompts(1, [17], 131)[0]
    expected = logits_of(save_model(model, tmp_path / "hf"), text)
    torch.testing.assert_close(logits_of(gguf_folder(path, "tiny"), text), expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"])
def test_every_part_of_a_quantized_tensor_is_the_part_of_the_whole(kind: str, name: str, tmp_path: Path) -> None:
    # Blocks of quantized weights have 32, and 640 columns of 64 rows are more than one piece.
    model = make_model("llama", hidden_size=64, num_attention_heads=4, intermediate_size=640)
    checkpoint = GgufCheckpoint(save_gguf(model, tmp_path / "tiny.gguf", kind=kind))
    type_ = GGMLQuantizationType[kind]
    exact = model.state_dict()[name]
    expected = torch.from_numpy(dequantize(quantize(exact.numpy(), type_), type_))
    rows, columns = exact.shape
    head_dim = 16
    for part in (None, Part(0, range(head_dim, 3 * head_dim)), Part(1, range(5, columns - 7)), Part(0, range(rows))):
        out = torch.empty(exact.shape if part is None else part.shape_of((rows, columns)))
        checkpoint.read(name, part, out)
        assert torch.equal(out, expected if part is None else part.of(expected))


def test_an_embedding_larger_than_a_piece_is_whole(tmp_path: Path) -> None:
    rows, columns = 1000, 96
    weights = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    tensors = {"token_embd.weight": weights}
    metadata = {
        "general.architecture": "llama",
        **model_metadata(make_model("llama").config, "llama"),
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "large.gguf", metadata, tensors, "Q8_0"))
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    checkpoint.read("model.embed_tokens.weight", None, out)
    type_ = GGMLQuantizationType.Q8_0
    assert torch.equal(out, torch.from_numpy(dequantize(quantize(weights, type_), type_)).bfloat16())


def test_the_configuration_is_that_of_transformers(tmp_path: Path) -> None:
    model = make_model("llama")
    path = save_gguf(model, tmp_path / "tiny.gguf")
    config = model_config(Metadata(read_header(path), path))
    theirs = model.config.to_dict()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert config[key] == theirs[key]
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "model_type"):
        assert config[key] == theirs[key]
    assert config["tie_word_embeddings"] is False
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised_by_its_table(factor: float, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    published = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor}
    published |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=published)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (500000.0 ** (torch.arange(0, 128, 2).float() / 128))
    table = (plain / scaled).numpy()
    path = rope_file(tmp_path, table)
    assert model_config(Metadata(read_header(path), path))["rope_parameters"] == published
    table[20] *= 1.5
    path = rope_file(tmp_path, table)
    with pytest.raises(ConfigError, match="is not the table of Llama 3's rope scaling"):
        model_config(Metadata(read_header(path), path))


def rope_file(folder: Path, table: np.ndarray) -> Path:
    metadata = {
        "general.architecture": "llama",
        **model_metadata(make_model("llama").config, "llama"),
        "llama.embedding_length": 256,
        "llama.attention.head_count": 2,
        "llama.rope.freq_base": 500000.0,
    }
    tensors = {"token_embd.weight": np.zeros((4, 256), dtype=np.float32), "rope_freqs.weight": table}
    return write_gguf(folder / "rope.gguf", metadata, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama.rope.dimension_count": 4}, "rope over 4 of 8 dimensions is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.block_count": None}, "lacks the metadata llama.block_count"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: default, gpt-2"),
        ({"tokenizer.ggml.token_type": [1]}, "264 tokens but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, but the vocabulary has 264 tokens"),
        ({"tokenizer.ggml.tokens": None}, "lacks the metadata tokenizer.ggml.tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(path, "tiny")
    assert not list((tmp_path / "cache").glob("**/config.json"))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "rwkv6"}, {})
    with pytest.raises(ConfigError, match="GGUF architecture 'rwkv6' is not supported; supported: llama, qwen2"):
        gguf_folder(path, "x")


@pytest.mark.parametrize("size", [0, 3, 20, 300, 5000])
def test_a_file_that_ends_in_its_header_is_refused(size: int, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is (truncated|not a GGUF file)"):
        read_header(path)


def test_a_file_that_ends_in_its_tensors_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is truncated: tensor .* ends at byte"):
        GgufCheckpoint(path)


def test_a_tensor_without_a_place_is_refused_by_its_name(tmp_path: Path) -> None:
    model = make_model("llama")
    metadata = {"general.architecture": "llama", **model_metadata(model.config, "llama"), **tokenizer_metadata()}
    tensors = gguf_tensors(model, "llama") | {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, tensors)
    with pytest.raises(ConfigError, match=r"no place for: blk\.0\.attn_sinks\.weight"):
        logits_of(gguf_folder(path, "tiny"), [1])


def tokenizer(tmp_path: Path, **changes: Any) -> Tokenizer:
    path = write_gguf(
        tmp_path / "tokenizer.gguf",
        {"general.architecture": "llama", "llama.context_length": 64, **tokenizer_metadata(**changes)},
        {},
    )
    return Tokenizer.from_str(json.dumps(tokenizer_json(Metadata(read_header(path), path))))


def test_special_and_defined_tokens_stay_whole(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path)
    ids = encoder.encode("<|user|>hell<tool>!<|end|>").ids
    assert ids[0] == 1
    assert 2 in ids
    assert ids[-1] == 0
    assert encoder.decode(ids, skip_special_tokens=True) == "hell<tool>!"
    assert encoder.decode(ids, skip_special_tokens=False) == "<|user|>hell<tool>!<|end|>"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hell", "Ġw", "1", "2", "1", "2", "Ġ", "1", "2"]),
        ("gpt-2", ["hell", "Ġw", "12", "12", "Ġ", "12"]),
        ("qwen2", ["hell", "Ġw", "1", "2", "1", "2", "Ġ", "1", "2"]),
        ("llama-bpe", ["<|user|>", "hell", "Ġw", "12", "1", "2", "Ġ", "12"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    # llama-bpe: at most three digits in a piece, 121 and 2, and a begin token before the text.
    assert tokenizer(tmp_path, pre=pre).encode("hell w1212 12").tokens == pieces


def test_the_text_is_wrapped_as_the_metadata_says(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer(tmp_path, **changes).encode("hell").tokens == ["<|user|>", "hell", "<|end|>"]
    assert tokenizer(tmp_path, **changes).encode("hell", add_special_tokens=False).tokens == ["hell"]


def test_roles_and_template_are_in_the_tokenizer_configuration(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    config = tokenizer_config(Metadata(read_header(path), path))
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|user|>", "<|end|>", False)
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert "unk_token" not in config
