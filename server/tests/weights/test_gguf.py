"""GGUF files give the weights, configuration and tokenizer of their model, or an error that names the fault."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import (
    MERGES,
    TOKENS,
    finish,
    logits_of,
    model_metadata,
    raw_writer,
    save_gguf,
    tokenizer_metadata,
    write_gguf,
)
from gguf_tensors import gguf_tensors
from penstock_server.errors import ConfigError
from penstock_server.layers.rope import inverse_frequencies
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from penstock_server.tokenizer.byte_level import byte_spelling
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.gguf.checkpoint import GgufCheckpoint
from penstock_server.weights.gguf.config import generation_config, model_config
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.header import GgufHeader, read_header
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.tokenizer import tokenizer_config, tokenizer_json
from tiny_models import make_model, prompts, save_model
from tokenizers import Tokenizer

pytestmark = pytest.mark.usefixtures("model_cache")


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [("llama", "llama"), ("llama-tied", "llama"), ("llama-biases", "llama"), ("linear-rope", "llama"), ("qwen2",) * 2],
)
def test_a_gguf_file_has_the_logits_of_its_model(variant: str, architecture: str, tmp_path: Path) -> None:
    model = make_model(variant)
    changes: dict[str, Any] = {}
    if variant == "linear-rope":
        changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = save_gguf(model, tmp_path / "tiny.gguf", architecture, **changes)
    text = prompts(1, [17], 131)[0]
    expected = logits_of(save_model(model, tmp_path / "hf"), text)
    torch.testing.assert_close(logits_of(gguf_folder(path), text), expected)


def readable_types() -> list[GGMLQuantizationType]:
    """All types that the `gguf` package can dequantize."""
    types = []
    for type_ in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), dtype=np.uint8), type_)
        except NotImplementedError:
            continue
        types.append(type_)
    return types


def finite_blocks(type_: GGMLQuantizationType, count: int) -> np.ndarray:
    """Random blocks [count, bytes] whose scales are finite."""
    generator = np.random.default_rng(type_)
    blocks = generator.integers(0, 256, (4 * count, GGML_QUANT_SIZES[type_][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(dequantize(blocks, type_)).all(axis=-1)
    assert finite.sum() >= count
    return blocks[finite][:count]


def test_every_common_quantization_is_readable() -> None:
    common = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ2_XS MXFP4"
    assert set(common.split()) <= {type_.name for type_ in readable_types()}


@pytest.mark.parametrize("shape", [(48, 768), (3, 16, 768)])
@pytest.mark.parametrize("type_", readable_types(), ids=lambda type_: type_.name)
def test_a_part_of_a_quantized_tensor_equals_that_part_of_the_dequantized_whole(
    type_: GGMLQuantizationType, shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 48 rows of 768 columns are more than one piece.
    block_weights, block_bytes = GGML_QUANT_SIZES[type_]
    blocks = finite_blocks(type_, 48 * 768 // block_weights)
    raw = blocks.reshape(*shape[:-1], 768 // block_weights * block_bytes)
    expected = torch.from_numpy(dequantize(raw, type_)).reshape(shape)
    name = "blk.0.ffn_up_exps.weight" if len(shape) == 3 else "blk.0.attn_q.weight"
    metadata = {"general.architecture": "qwen2", **model_metadata(make_model("qwen2").config, "qwen2")}
    path = tmp_path / "quantized.gguf"
    writer = raw_writer(path, metadata)
    writer.add_tensor(name, raw, raw_dtype=type_)
    finish(writer)
    with caplog.at_level("INFO"):
        checkpoint = GgufCheckpoint(path)
    is_dequantized = block_weights > 1 and checkpoint.quantized(name, None) is None
    assert (f"weights of type {type_.name} are dequantized" in caplog.text) == is_dequantized
    assert checkpoint.shape(name) == shape
    parts = [Part(dim, range(1, shape[dim] - 1)) for dim in range(len(shape))] + [Part(0, range(2, 2))]
    for part in (None, *parts):
        out = torch.full(shape if part is None else part.shape_of(shape), float("nan"))
        checkpoint.read(name, part, out)
        assert torch.equal(out, expected if part is None else part.of(expected))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_interleaved_rows_of_a_quantized_tensor_are_reordered(kind: str, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=64, num_attention_heads=4, intermediate_size=128)
    checkpoint = GgufCheckpoint(save_gguf(model, tmp_path / "tiny.gguf", kind=kind))
    type_ = GGMLQuantizationType[kind]
    exact = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    expected = torch.from_numpy(dequantize(quantize(exact.numpy(), type_), type_))
    for part in (None, Part(0, range(16, 48)), Part(1, range(5, 57))):
        out = torch.empty(exact.shape if part is None else part.shape_of(tuple(exact.shape)))
        checkpoint.read("blk.0.attn_q.weight", part, out)
        assert torch.equal(out, expected if part is None else part.of(expected))


def test_an_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    metadata = {"general.architecture": "qwen2", **model_metadata(make_model("qwen2").config, "qwen2")}
    writer = raw_writer(tmp_path / "x.gguf", metadata)
    writer.add_tensor("output.weight", np.zeros((2, 32), dtype=np.int8), raw_dtype=GGMLQuantizationType.I8)
    finish(writer)
    with pytest.raises(ConfigError, match=r"tensor output\.weight is quantized as I8, which is not supported"):
        GgufCheckpoint(tmp_path / "x.gguf")


def test_an_embedding_larger_than_a_piece_is_read_completely(tmp_path: Path) -> None:
    rows, columns = 1000, 96
    weights = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    tensors = {"token_embd.weight": weights}
    metadata = {
        "general.architecture": "llama",
        **model_metadata(make_model("llama").config, "llama"),
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "large.gguf", metadata, tensors, "Q8_0"))
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    checkpoint.read("token_embd.weight", None, out)
    type_ = GGMLQuantizationType.Q8_0
    assert torch.equal(out, torch.from_numpy(dequantize(quantize(weights, type_), type_)).bfloat16())


def test_the_configuration_equals_that_of_transformers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 256}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 64}, 256),
        # As in llama.cpp, the context length of a file is the long one.
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "linear", "factor": 4.0, "original_context_length": 256}, 1024),
        # A factor without a type is linear.
        ({"factor": 4.0, "original_context_length": 256}, 1024),
        ({"factor": 0.0, "original_context_length": 256}, 256),
    ],
    ids=str,
)
def test_a_scaled_rope_lengthens_the_context_of_a_file(scaling: dict[str, Any], longest: int, tmp_path: Path) -> None:
    metadata = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf", **metadata)
    config = Config(model_config(Metadata(read_header(path), path)), path)
    assert config.max_position_tokens == longest


def rope_file(folder: Path, table: np.ndarray) -> Path:
    metadata = {
        "general.architecture": "llama",
        **model_metadata(make_model("llama").config, "llama"),
        "llama.embedding_length": 256,
        "llama.attention.head_count": 2,
        "llama.attention.key_length": 128,
        "llama.rope.dimension_count": 128,
        "llama.rope.freq_base": 500000.0,
    }
    tensors = {"token_embd.weight": np.zeros((4, 256), dtype=np.float32), "rope_freqs.weight": table}
    return write_gguf(folder / "rope.gguf", metadata, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "lacks the metadata llama.expert_used_count"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' needs the tensors rope_factors_long.weight"),
        ({"llama.context_length": 256.5}, "context_length is 256.5, must be an integer"),
        ({"llama.rope.scaling.type": "ntk"}, "rope scaling 'ntk' is not supported"),
        ({"llama.block_count": None}, "lacks the metadata llama.block_count"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        (
            {"tokenizer.ggml.pre": "superbpe"},
            "pre-tokenizer 'superbpe' is not supported; supported: a.x-4.0, bailingmoe",
        ),
        ({"tokenizer.ggml.pre": None}, "the file does not name its pre-tokenizer, and models of architecture 'llama'"),
        ({"tokenizer.ggml.pre": "default"}, "does not name its pre-tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "264 tokens but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, but the vocabulary has 264 tokens"),
        ({"tokenizer.ggml.tokens": None}, "lacks the metadata tokenizer.ggml.tokens"),
    ],
)
def test_unsupported_metadata_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(path)
    assert not list((tmp_path / "cache").glob("**/config.json"))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "rwkv6"}, {})
    with pytest.raises(ConfigError, match=r"architecture 'rwkv6' is not supported; supported: apertus, .*, t5$"):
        gguf_folder(path)


@pytest.mark.parametrize("with_vocabulary", [False, True])
@pytest.mark.parametrize("size", [0, 3, 20, 300, 5000])
def test_a_file_truncated_in_its_header_is_refused(size: int, with_vocabulary: bool, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is (truncated|not a GGUF file)"):
        read_header(path, with_vocabulary=with_vocabulary)


def test_a_header_without_its_vocabulary_lacks_only_the_tokenizers_arrays(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    whole, small = read_header(path), read_header(path, with_vocabulary=False)
    assert whole.tensors == small.tensors
    left_out = whole.metadata.keys() - small.metadata.keys()
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"} <= left_out
    assert small.metadata == {key: value for key, value in whole.metadata.items() if key not in left_out}
    assert all(key.startswith("tokenizer.ggml.") and isinstance(whole.metadata[key], list) for key in left_out)


def test_a_file_truncated_in_its_tensors_is_refused_on_opening(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is truncated: tensor .* ends at byte"):
        GgufCheckpoint(path)


def test_an_unknown_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    model = make_model("llama")
    metadata = {"general.architecture": "llama", **model_metadata(model.config, "llama"), **tokenizer_metadata()}
    tensors = gguf_tensors(model, "llama") | {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, tensors)
    with pytest.raises(ConfigError, match=r"no place for: blk\.0\.attn_sinks\.weight"):
        logits_of(gguf_folder(path), [1])


def tokenizer(tmp_path: Path, **changes: Any) -> Tokenizer:
    path = write_gguf(
        tmp_path / "tokenizer.gguf",
        {"general.architecture": "llama", "llama.context_length": 64, **tokenizer_metadata(**changes)},
        {},
    )
    return Tokenizer.from_str(json.dumps(tokenizer_json(Metadata(read_header(path), path))))


def test_control_and_user_defined_tokens_are_not_split(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path)
    ids = encoder.encode("<|user|>hell<tool>!<|end|>").ids
    assert ids[0] == 1
    assert 2 in ids
    assert ids[-1] == 0
    assert encoder.decode(ids, skip_special_tokens=True) == "hell<tool>!"
    assert encoder.decode(ids, skip_special_tokens=False) == "<|user|>hell<tool>!<|end|>"


def test_a_token_outside_of_the_byte_alphabet_stands_for_itself(tmp_path: Path) -> None:
    """As in Command R, which also has the token of the same bytes."""
    spelled = "".join(byte_spelling()[byte] for byte in "🎉".encode())
    tokens, merges = [*TOKENS, spelled[:2], spelled[2:], spelled, "🎉", "中 a"], [*MERGES, *merges_of(spelled)]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3)}
    encoder = tokenizer(tmp_path, pre="command-r", **changes, **{"tokenizer.ggml.merges": merges})
    assert encoder.encode("🎉").ids == [len(TOKENS) + 2]
    assert [encoder.decode([len(TOKENS) + place]) for place in (2, 3, 4)] == ["🎉", "🎉", "中 a"]
    assert encoder.decode(encoder.encode("中 a").ids) == "中 a"


def test_qwen_3_5_composes_combining_marks(tmp_path: Path) -> None:
    """As the model's own tokenizer does; llama.cpp does not."""
    assert tokenizer(tmp_path, pre="qwen35").normalizer.normalize_str("re\u0301sume\u0301") == "r\u00e9sum\u00e9"


def merges_of(spelled: str) -> list[str]:
    """Merges of four characters into one token."""
    first, second, third, fourth = spelled
    return [f"{first} {second}", f"{third} {fourth}", f"{first}{second} {third}{fourth}"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["hell", "Ġw", "1", "2", "1", "2", "Ġ", "1", "2"]),
        ("gpt-2", ["hell", "Ġw", "12", "12", "Ġ", "12"]),
        ("qwen2", ["hell", "Ġw", "1", "2", "1", "2", "Ġ", "1", "2"]),
        ("llama-bpe", ["<|user|>", "hell", "Ġw", "12", "1", "2", "Ġ", "12"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_split(pre: str, pieces: list[str], tmp_path: Path) -> None:
    # llama-bpe adds a BOS token and splits 1212 into at most three digits: 121 and 2; 12 of 121 is a token.
    assert tokenizer(tmp_path, pre=pre).encode("hell w1212 12").tokens == pieces


def test_a_file_without_a_pre_tokenizer_name_uses_that_of_its_architecture(tmp_path: Path) -> None:
    metadata = {"general.architecture": "starcoder", **tokenizer_metadata()}
    del metadata["tokenizer.ggml.pre"]
    path = write_gguf(tmp_path / "old.gguf", metadata, {})
    encoder = Tokenizer.from_str(json.dumps(tokenizer_json(Metadata(read_header(path), path))))
    assert encoder.encode("hell 12").tokens == ["hell", "Ġ", "1", "2"]


def test_bos_and_eos_are_added_as_the_metadata_say(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer(tmp_path, **changes).encode("hell").tokens == ["<|user|>", "hell", "<|end|>"]
    assert tokenizer(tmp_path, **changes).encode("hell", add_special_tokens=False).tokens == ["hell"]


def test_sampling_defaults_are_those_of_the_metadata(tmp_path: Path) -> None:
    names = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05, "mirostat": math.nan}
    changes = {f"general.sampling.{name}": value for name, value in names.items()}
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf", **changes)
    config = json.loads((gguf_folder(path) / "generation_config.json").read_text())
    assert {name: config[name] for name in config if not name.endswith("_id")} == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "mirostat": "nan",
    }
    assert "temperature" not in json.loads((gguf_folder(path) / "config.json").read_text())


def test_a_template_for_tools_is_kept_beside_the_default(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "a.gguf", **{"tokenizer.chat_template.tool_use": "{{ tools }}"})
    config = json.loads((gguf_folder(path) / "tokenizer_config.json").read_text())
    default = {"name": "default", "template": "{{ messages[0].content }}"}
    assert config["chat_template"] == [default, {"name": "tool_use", "template": "{{ tools }}"}]


def test_another_table_of_divisors_divides_the_frequencies(tmp_path: Path) -> None:
    table = np.linspace(1, 9, 64, dtype=np.float32)
    path = rope_file(tmp_path, table)
    config = Config(model_config(Metadata(read_header(path), path)), path)
    spec = read_rope(config, 128)
    plain = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    torch.testing.assert_close(inverse_frequencies(spec, 256).double(), plain / torch.from_numpy(table))
    assert config.max_position_tokens == 256


def test_the_tokenizer_configuration_has_special_tokens_and_template(tmp_path: Path) -> None:
    path = save_gguf(make_model("llama"), tmp_path / "tiny.gguf")
    config = tokenizer_config(Metadata(read_header(path), path))
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|user|>", "<|end|>", False)
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert "unk_token" not in config


def gguf_metadata(tokens: dict[str, int], **roles: int) -> Metadata:
    """tokens: the type of each."""
    content = {"tokenizer.ggml.tokens": list(tokens), "tokenizer.ggml.token_type": list(tokens.values())}
    content |= {f"tokenizer.ggml.{role}_token_id": id_ for role, id_ in roles.items()}
    header = SimpleNamespace(metadata={"general.architecture": "llama", **content})
    return Metadata(cast(GgufHeader, header), Path("tiny.gguf"))


def test_files_that_name_no_special_tokens_have_those_of_llama_cpp(tmp_path: Path) -> None:
    control, unknown = 3, 2
    tokens = {"<unk>": unknown, "<s>": control, "</s>": control, "a": 1, "": 1}
    metadata = gguf_metadata(tokens, padding=5, unknown=0xFFFFFFFF, eot=0xFFFFFFFF)
    metadata.header.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 5,
        "llama.context_length": 8,
    }
    assert generation_config(metadata) == {"eos_token_id": 2, "bos_token_id": 1}
    config = tokenizer_config(metadata)
    assert (config["bos_token"], config["eos_token"], "pad_token" in config) == ("<s>", "</s>", False)
    assert Tokenizer.from_str(json.dumps(tokenizer_json(metadata))).encode("a").ids[0] == 1
    with pytest.raises(ConfigError, match="eot_token_id is 5, but the vocabulary has 5 tokens"):
        generation_config(gguf_metadata(tokens, eot=5))


def test_known_marks_of_turns_end_a_text_beside_eos() -> None:
    normal, control, user_defined = 1, 3, 4
    chat = {"</s>": control, "a": normal, "<|im_start|>": control, "<|im_end|>": control, "<|own|>": control}
    assert generation_config(gguf_metadata(chat, eos=0))["eos_token_id"] == [0, 3]
    assert generation_config(gguf_metadata(chat, eos=0, eot=4))["eos_token_id"] == [0, 3, 4]
    # Some files give the mark another type by mistake, but a word that only looks like an end is none.
    gemma = {"<eos>": control, "<end_of_turn>": user_defined, "<EOT>": normal, "</s>": normal}
    assert generation_config(gguf_metadata(gemma, eos=0))["eos_token_id"] == [0, 1]
    # Here <|end|> ends a message, after which the turn goes on.
    messages = {"<|return|>": control, "<|call|>": control, "<|end|>": control}
    assert generation_config(gguf_metadata(messages, eos=0))["eos_token_id"] == [0, 1]
    assert generation_config(gguf_metadata({"</s>": control, "a": normal}, eos=0))["eos_token_id"] == 0


def test_a_mark_of_another_type_is_a_control_token(tmp_path: Path) -> None:
    model = make_model("llama")
    path = save_gguf(model, tmp_path / "tiny.gguf")
    tokens = list(read_header(path).metadata["tokenizer.ggml.tokens"])
    tokens[-1] = "<end_of_turn>"
    path = save_gguf(model, path, **{"tokenizer.ggml.tokens": tokens})
    content = json.loads((gguf_folder(path) / "tokenizer.json").read_text())
    assert {"id": len(tokens) - 1, "content": "<end_of_turn>", "special": True}.items() <= content["added_tokens"][
        -1
    ].items()
