"""Adapters of experts and routers that `peft` makes, of the parameters of all experts and of single experts, give the
logits of `peft`, in one batch with other adapters and the base, whose bits they leave alone, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES
from penstock_server.errors import ConfigError
from penstock_server.models.decoder import Decoder
from safetensors.torch import load_file, save_file
from test_adapters import (
    ACCURATE,
    assert_two_ranks_compute_the_bits_of_one,
    damage,
    load,
    loaded,
    logits_of,
    make_adapter,
    reference,
    save,
    texts,
)
from test_native_stack import widened

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.native

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
NAMES = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "phimoe", "deepseek-v2", "granitemoe", "gpt-oss", "llama4")
OFTEN = ("mixtral", "qwen3-moe", "gpt-oss")
# Modules of transformers 4, and their places.
SINGLE = {
    "mixtral": ("block_sparse_moe.experts.{e}", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj")),
}


def of_experts(folder: Path, base: Path, seed: int, **config: Any) -> tuple[Path, Any]:
    config = {"target_modules": ["q_proj"], "target_parameters": EXPERTS, **config}
    return make_adapter(folder, base, seed, **config)


def assert_logits(model: Decoder, adapters: list[Any], models: list[Any]) -> list[torch.Tensor]:
    """Asserts that the logits of a batch with these adapters are right, and those of each text alone."""
    found = logits_of(model, texts()[: len(adapters)], adapters)
    for text, adapter, logits, expected in zip(texts(), adapters, found, models, strict=False):
        torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)
        assert torch.equal(logits_of(model, [text], [adapter])[0], logits)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in NAMES]
)
def test_logits_are_those_of_peft_and_neighbours_keep_their_bits(name: str, tmp_path: Path) -> None:
    folder = save(name, widened(CASES[name]), tmp_path / "base")
    one, one_model = of_experts(tmp_path / "one", folder, 1)
    other, other_model = of_experts(tmp_path / "other", folder, 2, r=5, lora_alpha=3, use_rslora=True)
    model = load(folder)
    first, second = loaded(model, [one, other])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = assert_logits(model, [first, None, second, first], [one_model, base, other_model, one_model])
    plain = logits_of(model, texts(), [None] * 4)
    assert torch.equal(found[1], plain[1])
    assert (found[0] - plain[0]).abs().max() > 0.01, "the adapter changes something"
    torch.testing.assert_close(found[0], reference(one_model.merge_and_unload(), texts()[0]), **ACCURATE)


def all_linear(folder: Path, base: Path, seed: int, **config: Any) -> tuple[Path, Any]:
    """As PEFT makes it of a model whose experts were linear layers in transformers 4."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    given = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", **config)
    return randomized(peft.get_peft_model(model, given), folder)


def randomized(adapted: Any, folder: Path) -> tuple[Path, Any]:
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5)
    adapted.eval().save_pretrained(folder)
    return folder, adapted


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_all_linear_layers_are_experts_and_routers_too(name: str, tmp_path: Path) -> None:
    folder = save(name, widened(CASES[name]), tmp_path / "base")
    one, one_model = all_linear(tmp_path / "one", folder, 1)
    config = json.loads((one / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == ["down_proj", "gate.weight", "gate_up_proj"]
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 8}, "PEFT doubles the rank"
    model = load(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_logits(model, [*loaded(model, [one]), None], [one_model, base])


def old_adapter(name: str, base: Path, folder: Path) -> Path:
    """With a module for each matrix of an expert, and one for the router, as PEFT saved them with transformers 4."""
    block, projections = SINGLE[name]
    config = transformers.AutoConfig.from_pretrained(base)
    hidden = config.hidden_size
    width = config.moe_intermediate_size if name == "qwen3-moe" else config.intermediate_size
    num_experts = config.num_experts if name == "qwen3-moe" else config.num_local_experts
    router = f"{block.partition('.')[0]}.gate"
    sizes = {router: (hidden, num_experts)}
    for expert in range(num_experts):
        for projection in projections:
            inner, outer = (width, hidden) if projection == projections[-1] else (hidden, width)
            sizes[f"{block.format(e=expert)}.{projection}"] = (inner, outer)
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for module, (in_features, out_features) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, in_features) / in_features**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out_features, 4) / 2
    given = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["gate", *projections], task_type="CAUSAL_LM")
    given.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_an_adapter_of_single_experts_is_what_peft_makes_of_it(name: str, tmp_path: Path) -> None:
    """Before and after PEFT has converted it to parameters of all experts, of twice the rank."""
    folder = save(name, widened(CASES[name]), tmp_path / "base")
    old = old_adapter(name, folder, tmp_path / "old")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    converted = peft.PeftModel.from_pretrained(base, old).eval()
    converted.save_pretrained(tmp_path / "converted")
    assert not any("experts.0." in each for each in load_file(tmp_path / "converted" / "adapter_model.safetensors"))
    model = load(folder)
    adapters = loaded(model, [old, tmp_path / "converted"])
    found = assert_logits(model, adapters, [converted] * 2)
    torch.testing.assert_close(found[0], logits_of(model, texts()[:1], adapters[1:])[0], **ACCURATE)


@pytest.mark.parametrize("parameters", [["experts.down_proj"], ["model.layers.1.mlp.experts.gate_up_proj"]], ids=str)
def test_an_adapter_of_some_parameters_or_layers_changes_these_only(parameters: list[str], tmp_path: Path) -> None:
    """PEFT names the tensors by the module, not by the parameter."""
    folder = save("mixtral", widened(CASES["mixtral"]), tmp_path / "base")
    patterns = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"experts.gate_up_proj": 20}}
    one, one_model = of_experts(tmp_path / "one", folder, 1, target_parameters=parameters, **patterns)
    model = load(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_logits(model, [*loaded(model, [one]), None], [one_model, base])


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_two_ranks_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    folder = save(name, widened(CASES[name]), tmp_path / "base")
    one, _ = of_experts(tmp_path / "one", folder, 1)
    other, _ = of_experts(tmp_path / "other", folder, 2, r=3)
    assert_two_ranks_compute_the_bits_of_one(folder, [one, other])


def test_adapters_are_added_to_quantized_experts(tmp_path: Path) -> None:
    case = widened(CASES["mixtral"])
    folder = save("mixtral", replace(case, values={**case.values, "intermediate_size": 96}), tmp_path / "base")
    one, one_model = of_experts(tmp_path / "one", folder, 1)
    model = load(folder, quantize="eetq", activation_bits=16)
    (adapter,) = loaded(model, [one])
    text = texts()[0]
    with_adapter, plain = (logits_of(model, [text], [each])[0] for each in (adapter, None))
    together = logits_of(model, [text, text], [None, adapter])
    assert torch.equal(together[0], plain)
    assert torch.equal(together[1], with_adapter)
    expected, base = reference(one_model, text), reference(one_model.unload(), text)
    error = (plain - base).norm() / base.norm()
    assert error < 0.2 * (expected - base).norm() / base.norm(), "the adapter changes more than quantization"
    assert (with_adapter - expected).norm() / expected.norm() < 2 * error + 0.002


def test_the_room_for_adapters_counts_experts_and_router(tmp_path: Path) -> None:
    """For each rank of an adapter: the inputs and outputs of every module, with gate and up of an expert apart."""
    case = widened(CASES["mixtral"])
    folder = save("mixtral", case, tmp_path / "base")
    config = transformers.AutoConfig.from_pretrained(folder)
    hidden, width, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * (hidden + heads * head_dim) + 2 * (hidden + kv_heads * head_dim)
    of_layer = attention + hidden + experts
    vocabulary = 2 * (hidden + config.vocab_size)
    model = load(folder)
    assert model.adapters is not None
    elements = config.num_hidden_layers * of_layer + vocabulary
    assert model.adapters.max_bytes == 2 * 16 * elements * torch.float32.itemsize
    # Once a listed adapter changes experts, there is room for changes of all of them.
    model.adapters.check(of_experts(tmp_path / "adapter", folder, 1)[0])
    elements += config.num_hidden_layers * experts * 3 * (hidden + width)
    assert model.adapters.max_bytes == 2 * 16 * elements * torch.float32.itemsize


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """An adapter, and the loaded base."""
    folder = tmp_path_factory.mktemp("served")
    base = save("mixtral", widened(CASES["mixtral"]), folder / "base")
    return of_experts(folder / "adapter", base, 1)[0], load(base)


FIRST = "layers__0__mlp__experts__lora_A"
INNER = "layers__0__mlp__experts__base_layer__lora_B"
DAMAGES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "shape": ({}, {FIRST: torch.zeros(8, 40)}, "experts.lora_A.weight has shape [8, 40], but base model"),
    "missing parameter": (
        {},
        {INNER: None, INNER.replace("_B", "_A"): None},
        "lacks the tensors of 1 modules that adapter_config.json names: model.layers.0.mlp.experts.gate_up_proj",
    ),
    "half a parameter": ({}, {INNER: None}, "lacks the tensor base_model.model.model.layers.0.mlp.experts.base_layer"),
    "more parameters": (
        {"target_parameters": ["experts.down_proj"]},
        {},
        "modules that the base model does not have, or that adapters cannot change here: model.layers.0.mlp.experts",
    ),
    "another parameter": (
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "experts.up_proj"]},
        {},
        "target_parameters has 'experts.up_proj', which the base model does not have",
    ),
    "no list": ({"target_parameters": "experts"}, {}, "target_parameters is 'experts', must be a list of names"),
    "high rank": (
        {"rank_pattern": {r".*\.gate_up_proj": 17}},
        {},
        "the rank of model.layers.0.mlp.experts.gate_up_proj is 17, at most 16 is allowed; raise --max-lora-rank",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_adapter_of_experts_that_cannot_be_applied_in_full_is_refused(
    name: str, served: tuple[Path, Decoder], tmp_path: Path
) -> None:
    adapter, model = served
    values, tensors, reason = DAMAGES[name]
    folder = shutil.copytree(adapter, tmp_path / "damaged")
    damage(folder, values, **tensors)
    with pytest.raises(ConfigError) as caught:
        loaded(model, [folder])
    assert reason in str(caught.value)


def test_an_adapter_that_changes_experts_twice_is_refused(served: tuple[Path, Decoder], tmp_path: Path) -> None:
    adapter, model = served
    folder = shutil.copytree(adapter, tmp_path / "twice")
    path = folder / "adapter_model.safetensors"
    single = "base_model.model.model.layers.0.block_sparse_moe.experts.2.w1.lora_"
    width = transformers.AutoConfig.from_pretrained(adapter.parent / "base").intermediate_size
    hidden = model.spec.hidden_size
    added = {f"{single}A.weight": torch.zeros(8, hidden), f"{single}B.weight": torch.zeros(width, 8)}
    save_file({**load_file(path), **added}, path)
    with pytest.raises(ConfigError, match="changes experts twice, one by one and by a parameter of all of them"):
        loaded(model, [folder])
