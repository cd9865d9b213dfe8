"""How a `config.json` that names a rope twice is read, and how long sequences may be with a scaled rope."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.layers.rope import inverse_frequencies
from penstock_server.models import load_model
from penstock_server.models.config import Config
from penstock_server.models.context import DEFAULT_TOKENS
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import ARCHITECTURES, ENCODERS, read_spec
from penstock_server.models.rope_config import read_rope
from penstock_server.parallel import RankGroup
from tested_device import DEVICE
from tiny_models import make_model, prompts, save_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
SAVED = {"rope_type": "default", "rope_theta": 1000.0}
SAVED_BY_TYPE = {"full_attention": SAVED, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
# What model cards say to add, in both spellings.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "linear-old": {"type": "linear", "factor": 8.0},
    "rope_type has precedence": {"type": "dynamic", "rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with theta": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0},
    "yarn with other betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 32, **LONG},
    "no kind": {"factor": 8.0},
    "empty": {},
}


def write(folder: Path, model_type: str, **values: Any) -> Config:
    values = {"model_type": model_type, **SIZES, **values}
    (folder / "config.json").write_text(json.dumps(values))
    return Config.read(folder)


def expected(folder: Path, layer_type: str | None = None) -> torch.Tensor:
    """The inverse frequencies that transformers computes for this folder, for short texts."""
    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=layer_type)[0]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)


@pytest.mark.parametrize("top", [{}, {"rope_theta": 5e4}, {"original_max_position_embeddings": 16}], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "glm4", "gpt_oss"])
def test_a_scaling_beside_rope_parameters_is_read_as_by_transformers(
    model_type: str, scaling: str, top: dict[str, Any], tmp_path: Path
) -> None:
    head_dim = {"head_dim": 32} if model_type == "glm4" and "long_factor" in SCALINGS[scaling] else {"head_dim": 16}
    write(tmp_path, model_type, rope_parameters=SAVED, rope_scaling=SCALINGS[scaling], **head_dim, **top)
    spec, _ = read_spec(tmp_path)
    rope = spec.layers[0].attention.rope  # type: ignore[union-attr]
    assert rope is not None
    torch.testing.assert_close(inverse_frequencies(rope, 16), expected(tmp_path), rtol=1e-6, atol=0)


@pytest.mark.parametrize("truncate", [True, False, None])
def test_a_range_of_yarn_is_rounded_as_by_transformers(truncate: bool | None, tmp_path: Path) -> None:
    config = write(tmp_path, "llama", rope_scaling={**YARN, "beta_fast": 2, "truncate": truncate})
    torch.testing.assert_close(inverse_frequencies(read_rope(config, 16), 16), expected(tmp_path), rtol=1e-6, atol=0)


@pytest.mark.parametrize("top", [{}, {"rope_theta": 5e4}], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "modernbert"])
def test_a_scaling_is_added_to_the_ropes_of_layer_types_as_by_transformers(
    model_type: str, scaling: str, top: dict[str, Any], tmp_path: Path
) -> None:
    types = ["full_attention", "sliding_attention"]
    values = {**SCALINGS[scaling], "rope_theta": 1000.0} if scaling == "llama3" else SCALINGS[scaling]
    write(
        tmp_path, model_type, rope_parameters=SAVED_BY_TYPE, rope_scaling=values, layer_types=types, head_dim=16, **top
    )
    spec, _ = read_spec(tmp_path)
    for layer, kind in zip(spec.layers, types, strict=True):
        rope = layer.attention.rope  # type: ignore[union-attr]
        assert rope is not None
        torch.testing.assert_close(inverse_frequencies(rope, 16), expected(tmp_path, kind), rtol=1e-6, atol=0)


def test_what_has_no_effect_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_rope(write(tmp_path, "llama", rope_parameters=SAVED, rope_scaling=SCALINGS["linear"]), 16)
        assert "so theta is 10000.0 and not the rope_theta 1000.0 of rope_parameters; write rope_theta" in caplog.text
        caplog.clear()
        write(tmp_path, "olmo3", rope_parameters=SAVED_BY_TYPE, rope_scaling=SCALINGS["linear-old"])
        read_spec(tmp_path)
        assert "the type 'linear' of rope_scaling has no effect beside the rope_type 'default'" in caplog.text
        caplog.clear()
        keeps = {**SCALINGS["yarn"], "rope_theta": 1000.0}
        read_rope(write(tmp_path, "llama", rope_parameters=SAVED, rope_scaling=keeps), 16)
        read_rope(write(tmp_path, "llama", rope_parameters=SAVED, rope_theta=1000.0, rope_scaling=YARN), 16)
        assert not caplog.text


YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "model", "longest"),
    [
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 64}}, {}, 256),
        ({"rope_scaling": YARN}, {}, 256),
        # Qwen 3: max_position_embeddings has room for an answer.
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 48}}, {}, 192),
        # DeepSeek: max_position_embeddings is the lengthened one.
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, {}, 64),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 8}}, {}, 64),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 32}, {}, 128),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}}, {}, 64),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1.5}}, {}, 96),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, {}, 160),
        ({"rope_parameters": SAVED, "rope_scaling": SCALINGS["linear"]}, {}, 512),
        ({"rope_scaling": {**SCALINGS["linear"], "original_max_position_embeddings": 8}}, {}, 64),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, 128),
        # Their max_position_embeddings is the long one.
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, {}, 64),
        ({"rope_parameters": SCALINGS["longrope"]}, {}, 64),
        (
            {"rope_parameters": {**SAVED_BY_TYPE, "full_attention": SCALINGS["linear"]}},
            {"model_type": "gemma3_text"},
            64,
        ),
        ({"rope_scaling": SCALINGS["linear"]}, {"model_type": "gemma3_text"}, 64),
        ({"rope_scaling": {**SCALINGS["yarn"], "rope_type": "yarn"}}, {"model_type": "olmo3"}, 128),
        ({"rope_parameters": dict.fromkeys(SAVED_BY_TYPE, SCALINGS["linear"])}, {"model_type": "olmo3"}, 512),
        ({"rope_parameters": SCALINGS["linear"]}, {"model_type": "falcon", "max_position_embeddings": None}, 16384),
        ({"rope_parameters": SCALINGS["linear"]}, {"model_type": "nomic_bert", "max_trained_positions": 32}, 512),
        ({}, {"model_type": "nomic_bert", "max_trained_positions": 32}, 32),
    ],
    ids=str,
)
def test_a_factor_lengthens_the_context_unless_the_model_states_the_longer_one(
    rope: dict[str, Any], model: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    values = {**SIZES, "model_type": "llama", "head_dim": 16, **model, **rope}
    values = {key: value for key, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec, _ = read_spec(tmp_path)
    assert spec.max_position_tokens == longest


def test_a_file_without_a_length_has_the_default_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, "llama")
    del config.values["max_position_embeddings"]
    assert ARCHITECTURES["llama"](config)[0].max_position_tokens == 2048
    monkeypatch.setattr("penstock_server.models.context.DEFAULT_TOKENS", {})
    for model_type in sorted({*ARCHITECTURES, *ENCODERS} & set(CONFIG_MAPPING)):
        values = CONFIG_MAPPING[model_type]().to_dict()
        longest = values.pop("max_position_embeddings", None)
        if longest is not None and "lacks max_position" in _refusal(values, model_type):
            assert DEFAULT_TOKENS[model_type] == longest, model_type


def _refusal(values: dict[str, Any], model_type: str) -> str:
    """Why the builder of the type refuses these values; empty if it does not."""
    try:
        (ARCHITECTURES.get(model_type) or ENCODERS[model_type])(Config(values, Path("config.json")))
    except ConfigError as error:
        return str(error)
    return ""


def test_windows_are_compared_with_the_lengthened_context(tmp_path: Path) -> None:
    config = write(tmp_path, "mistral", sliding_window=100)
    assert config.window() is None
    config = write(tmp_path, "mistral", sliding_window=100, rope_scaling=YARN)
    assert config.window() == 100


def test_dynamic_scaling_changes_nothing_up_to_the_original_length(tmp_path: Path) -> None:
    """And is that of transformers for the longest text that is served."""
    values = {"rope_parameters": {**SCALINGS["dynamic"], "rope_theta": 1000.0}}
    config = write(tmp_path, "llama", **values)
    assert (config.max_position_tokens, config.default_position_tokens) == (128, 64)
    rope, reference = read_rope(config, 16), AutoConfig.from_pretrained(tmp_path)
    for length in (1, 64, 65, 128):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, seq_len=length)
        torch.testing.assert_close(inverse_frequencies(rope, length), frequencies, rtol=1e-6, atol=0)
    plain = read_rope(write(tmp_path, "llama", rope_parameters=SAVED), 16)
    assert torch.equal(inverse_frequencies(rope, 64), inverse_frequencies(plain, 64))
    values["rope_parameters"]["lengthened"] = True
    assert write(tmp_path, "llama", **values).default_position_tokens == 128


@pytest.mark.parametrize(
    ("model_type", "rope", "message"),
    [
        ("llama", {"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "lacks factor"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 0.0}}, "factor of rope scaling must be above 0, not 0"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ("llama", {"rope_scaling": {"type": "wave", "factor": 2.0}}, "rope scaling 'wave' is not supported"),
        ("olmo3", {"rope_parameters": SAVED}, "rope_parameters must have an object for each type of layer"),
        (
            "gpt2",
            {"n_positions": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "rope_scaling": YARN},
            "rope scaling 'yarn' has no effect on a model of type 'gpt2'",
        ),
    ],
)
def test_scalings_that_cannot_be_read_are_refused(
    model_type: str, rope: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, model_type, **rope)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


UNSCALED = {"gptj", "codegen"}
# transformers refuses linear scaling for Phi, does not know some others, ignores a scaling beside Cohere's parameters,
# and loses MiMo's parameters of each type of layer with one.
OTHERS = {"baichuan", "cohere2_moe", "internlm2", "mimo_v2_flash", "phi3", "phimoe"}
# By default, these have no layer that attends, layers without names, no experts, or heads that are refused.
INCOMPLETE = {"bamba", "dots1", "falcon_h1", "glm4_moe", "granitemoehybrid", "lfm2_moe"}


@pytest.mark.parametrize(
    "model_type", sorted(({*ARCHITECTURES, *ENCODERS} - UNSCALED - OTHERS - INCOMPLETE) & set(CONFIG_MAPPING))
)
def test_an_added_scaling_has_the_theta_and_the_rotary_part_of_transformers(model_type: str, tmp_path: Path) -> None:
    made = AutoConfig.for_model(model_type)
    values = json.loads(made.to_json_string(use_diff=False))
    values = {"num_experts_per_tok": 2, **{key: value for key, value in values.items() if value is not None}}
    if not isinstance(values.get("rope_parameters"), dict) or values.get("alibi"):
        return  # it has no rope
    values["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec, _ = read_spec(tmp_path)
    types = getattr(made, "layer_types", None)
    by_type = any(isinstance(value, dict) for value in values["rope_parameters"].values())
    for index, layer in enumerate(spec.layers):
        if layer.attention.rope is not None:
            wanted = expected(tmp_path, types[index] if by_type and types else None)
            torch.testing.assert_close(inverse_frequencies(layer.attention.rope, 16), wanted, rtol=1e-6, atol=0)
            if not by_type:
                return


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
@torch.inference_mode()
def test_a_text_beyond_the_stated_length_has_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    model = make_model("qwen2", max_position_embeddings=32)
    path = save_model(model, tmp_path) / "config.json"
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 1000.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 4), RankGroup())
    assert ours.max_position_tokens == 128
    for length in (20, 100):
        text = prompts(3, [length], ours.traits.vocab_size)[0]
        if kind != "dynamic" or length > 32:  # by default, dynamic scaling has no effect
            ours.serve_up_to(length)
        driver = ModelDriver(ours, block_tokens=4)
        logits = driver.step([(driver.sequence(text), length)], every_row=True)
        torch.testing.assert_close(logits, reference(torch.tensor([text])).logits[0], atol=1e-4, rtol=1e-4)
