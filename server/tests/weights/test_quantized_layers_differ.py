"""Checkpoints whose layers are quantized in several ways, or not at all, as the libraries write them: they have the
logits of the weights that the libraries read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_name
from hypothesis import example, given
from hypothesis import strategies as st
from model_driver import ModelDriver
from native_builds import BUILD
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.quantization.exclusion import by_name, by_part, check_exclusions
from penstock_server.weights.quantization.method import method_of
from safetensors.torch import load_file
from tiny_models import make_model, prompts
from transformers.quantizers.quantizers_utils import should_convert_module

TEXT = prompts(1, [23], 131)[0]
# Weights of four kinds, and some that are dense.
GROUPS: dict[str, Any] = {
    "attention": {
        "targets": ["re:.*self_attn.*"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    },
    "gate and up": {
        "targets": ["re:.*up_proj", "re:.*gate_proj"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    },
    "a value": {  # next to queries and keys of integers
        "targets": ["model.layers.2.self_attn.v_proj"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    },
    "a layer": {
        "targets": ["model.layers.2.mlp.down_proj"],
        "weights": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
    },
    "others": {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [32, 32],
            "symmetric": True,
        },
    },
}
IGNORED = ["lm_head", "model.layers.1.mlp.down_proj", "re:.*[01].*v_proj"]
SKIPPED = ["lm_head", "model.layers.1.mlp", "v_proj"]


def make() -> transformers.PreTrainedModel:
    return make_model("qwen2", hidden_size=64, num_attention_heads=4, intermediate_size=128)


def save_compressed(folder: Path) -> transformers.PreTrainedModel:
    """Returns the model with the weights that the library decompresses."""
    model = make()
    apply_quantization_config(model, QuantizationConfig(config_groups=GROUPS, ignore=IGNORED))
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        options, weight = scheme.weights, module.weight.data
        if options.strategy == "group":
            each, dims = weight.unflatten(1, (-1, options.group_size)), (-1,)
        elif options.strategy == "block":
            each, dims = weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 32)), (1, 3)
        else:
            each, dims = weight[:, None], (-1,)
        scale, zero_point = calculate_qparams(each.amin(dims), each.amax(dims), options)
        module.weight_scale.data, module.weight_zero_point.data = scale, zero_point
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    for module in model.modules():
        module.quantization_enabled = False  # quantization of inputs
    return model


def save_bitsandbytes(folder: Path) -> transformers.PreTrainedModel:
    """Returns the model with the weights that transformers reads."""
    make().save_pretrained(folder / "dense")
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=SKIPPED
    )
    read = transformers.AutoModelForCausalLM.from_pretrained
    read(folder / "dense", quantization_config=options, device_map="cpu").save_pretrained(folder)
    return read(folder, dtype=torch.float32).dequantize()


def logits(folder: Path, dtype: torch.dtype, *, dequantize: bool = False) -> torch.Tensor:
    options = LoadOptions(folder, dtype, torch.device("cpu"), 16, dequantize=dequantize)
    driver = ModelDriver(load_model(options, RankGroup()), 16)
    found = driver.step([(driver.sequence(TEXT), len(TEXT))], every_row=True)
    assert found is not None
    return found.float()


@pytest.mark.parametrize("save", [save_compressed, save_bitsandbytes])
@torch.inference_mode()
def test_layers_that_differ_are_those_of_the_library(
    save: Callable[[Path], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    expected = save(tmp_path)(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(logits(tmp_path, torch.float32, dequantize=True), expected, atol=1e-4, rtol=1e-4)
    if BUILD is not None:
        found = logits(tmp_path, torch.bfloat16)
        assert (found - expected).norm() < 0.06 * expected.norm()
    stored = load_file(tmp_path / "model.safetensors")
    dense = {name for name, tensor in stored.items() if name.endswith("proj.weight") and tensor.dtype == torch.float32}
    assert {"model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= dense


def test_a_layer_without_a_group_is_refused() -> None:
    options = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": GROUPS["a layer"], "b": GROUPS["attention"]},
    }
    with pytest.raises(
        ConfigError, match=r"x\.up_proj is quantized, but not a target of .*config_groups: model\.layers"
    ):
        method_of(options | {"format": "dense"}, lambda name, rows=None: torch.empty(0)).options_of("x.up_proj")


NAMES = st.from_regex(r"\A[ab]{1,2}(\.([0-9]{1,2}|fc[12]|gate|gate_proj)){1,3}\Z")
ENTRIES = st.lists(
    NAMES | st.sampled_from(["fc1", "gate", "a.*fc", r".*\.1", "re:a", r"re:.*\.fc[12]$", "b.*", ""]), min_size=1
)


@given(NAMES, ENTRIES)
@example("a.11.fc1", ["a.1"])
@example("a.mlp.gate_proj", ["a.mlp.gate"])
def test_layers_are_excluded_as_in_the_libraries(name: str, entries: list[str]) -> None:
    assert by_part(entries)(name) == (not should_convert_module(name, entries))
    assert by_name(entries)(name) == any(match_name(name, entry) for entry in entries)


@pytest.mark.parametrize("value", ["null", "None", "", None, [], "lm_head"])
def test_skipped_modules_may_be_a_text(value: object) -> None:
    options = {"llm_int8_skip_modules": value}
    check_exclusions(options, ["model.layers.0.mlp.up.weight"])
    if value == "lm_head":
        with pytest.raises(ConfigError, match="llm_int8_skip_modules says that lm_head is not quantized"):
            check_exclusions(options, ["lm_head.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_not_convert": 1}, "modules_to_not_convert is 1, must be a list of names"),
        ({"modules_to_not_convert": "mlp.up"}, "modules_to_not_convert says that model.layers.0.mlp.up is not"),
        ({"ignored_layers": [1]}, r"ignored_layers is \[1\], must be a list of names"),
        ({"modules_to_not_convert": ["mlp.("]}, r"has an invalid regular expression 'mlp\.\('"),
        (
            {"modules_to_not_convert": ["model.layers.0"]},
            "modules_to_not_convert says that model.layers.0.mlp.up is not",
        ),
        (
            {"llm_int8_skip_modules": ["head", "up"]},
            "llm_int8_skip_modules says that model.layers.0.mlp.up is not quant",
        ),
        (
            {"ignored_layers": ["model.layers.0.mlp"]},
            "ignored_layers says that model.layers.0.mlp.up is not quantized, bu",
        ),
        ({"skip_modules": ["head", "mlp.up"]}, "skip_modules says that model.layers.0.mlp.up is not quantized, but it"),
        ({"ignore": ["re:.*layers.0"]}, "ignore says that model.layers.0.mlp.up is not quantized, but it is"),
    ],
    ids=str,
)
def test_a_quantized_layer_that_should_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_exclusions(options, ["model.layers.0.mlp.up.weight", "model.layers.10.mlp.down.weight"])
