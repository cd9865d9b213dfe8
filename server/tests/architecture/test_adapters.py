"""Adapters that `peft` makes give the logits of `peft`, merged and not, in one batch with other adapters and the base,
whose bits they leave alone, on one rank and on two. `test_quantized_adapters.py` has quantized weights."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, VOCAB, Case
from model_driver import ModelDriver
from penstock_server.engine import Engine
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.errors import ConfigError
from penstock_server.layers.executor import NativeExecutor
from penstock_server.layers.step import StepContext
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Adapter, NewSequence
from penstock_server.weights.adapted import adapted_folder
from plans import Advance, plan, step
from rank_threads import run_native_ranks
from safetensors.torch import load_file, save_file
from test_native_stack import BLOCK_TOKENS, COMBINED, EXPERTS, PADDED, SUPPORTED, sized, widened
from tiny_model import make_model, save_model
from tiny_models import prompts
from torch import Tensor

peft = pytest.importorskip("peft")
conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
pytestmark = pytest.mark.native

CPU = torch.device("cpu")
MAX_RANK = 16
# Fused and separate projections, Conv1D, gated MLPs and others, parallel layers, norms and clamps behind the products.
# Latent attention, mixtures.
OFTEN = (
    "deepseek-v2",
    "falcon-40b",
    "gemma2",
    "gpt-neox",
    "gpt2",
    "granite",
    "llama",
    "llama-biases",
    "mpt",
    "phi3",
    "qwen2-moe",
    "qwen3",
    "qwen3-5",
)
STATES = ("bailing-hybrid", "bamba", "jamba-dense", "kimi-linear", "lfm2", "minimax", "qwen3-5")
BY_PEFT = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name in (*SUPPORTED, *PADDED, *EXPERTS, *COMBINED, *STATES)
    if CASES[name].published is None  # transformers does not have these layouts, so peft has no adapters for them
]
MIXTURES = ("bailing", "dbrx", "deepseek", "gpt-oss", "kimi", "minimax", "mixtral")
# Attention, dense layers, and experts that all tokens share.
DENSE_PARTS = (
    r".*(self_attn\.(output_gate|(forget_gate\.)?\w+_proj(_with_mqa)?)|attn\.(Wqkv|out_proj)|shared_mlp\.\w+_linear|"
    r"(mlp|shared_experts?)\.\w+_proj)"
)
ACCURATE = {"rtol": 2e-4, "atol": 2e-4}


def make_adapter(
    folder: Path, base: Path, seed: int, kind: Any = transformers.AutoModelForCausalLM, **config: Any
) -> tuple[Path, Any]:
    """An adapter with random weights, saved, and the model that has it. kind: of the model."""
    model = kind.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    config = {"r": 8, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    with pytest.MonkeyPatch.context() as patch:
        # It would take the names of shared experts' projections, and of dense layers', for those of all experts.
        patch.setattr(conversion, "_MOE_TARGET_MODULE_MAPPING", {})
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(folder)
    return folder, adapted


def targets(name: str) -> dict[str, Any]:
    """What adapters can change in mixtures, which is all but their experts, in latent attention, and in layers between
    projections."""
    if name == "opt-350m":
        return {"target_modules": r".*layers.*(_proj|fc1|fc2)"}
    if name == "jamba-dense":  # transformers calls its other projection past peft
        return {"target_modules": r".*layers.*\.([qkvox]|in|out|gate|up|down)_proj"}
    is_mixture = name in (*EXPERTS, *COMBINED)
    return {"target_modules": DENSE_PARTS} if is_mixture else {}


def save(name: str, case: Case, folder: Path) -> Path:
    return save_model(make_model(name, case), folder)


def load(folder: Path, group: RankGroup | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    of_adapters = {"max_adapters": 2, "max_adapter_rank": MAX_RANK}
    model = load_model(LoadOptions(folder, dtype, CPU, BLOCK_TOKENS, **of_adapters, **options), group or RankGroup())
    assert isinstance(model, Decoder)
    return model


def loaded(model: Decoder, folders: list[Path]) -> list[Any]:
    assert model.adapters is not None
    return [model.adapters.load(Adapter(index + 1, folder)) for index, folder in enumerate(folders)]


def logits_of(
    model: Decoder, texts: list[list[int]], adapters: list[Any], driver: ModelDriver | None = None
) -> list[torch.Tensor]:
    """[tokens, vocab] of each text, which is computed in three steps beside the others."""
    driver = driver or ModelDriver(model, BLOCK_TOKENS)
    sequences = [driver.sequence(text, adapter=adapter) for text, adapter in zip(texts, adapters, strict=True)]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for num_tokens in ([len(text) - 10 for text in texts], [1] * len(texts), [9] * len(texts)):
        logits = driver.step(list(zip(sequences, num_tokens, strict=True)), every_row=True)
        for each, part in zip(found, logits.split(num_tokens), strict=True):
            each.append(part)
    return [torch.cat(parts) for parts in found]


def texts() -> list[list[int]]:
    return prompts(3, [40, 25, 33, 20], VOCAB)


@torch.inference_mode()
def reference(model: Any, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("name", BY_PEFT)
def test_logits_are_those_of_peft_and_neighbours_keep_their_bits(name: str, tmp_path: Path) -> None:
    folder = save(name, sized(name), tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", folder, 1, **targets(name))
    rs_lora = {"r": 5, "lora_alpha": 3, "use_rslora": True}
    other, other_model = make_adapter(tmp_path / "other", folder, 2, **rs_lora, **targets(name))
    model = load(folder)
    first, second = loaded(model, [one, other])
    of_sequences = [first, None, second, first]
    together = logits_of(model, texts(), of_sequences)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = logits_of(model, texts(), [None] * 4)
    for text, logits, expected in zip(texts(), together, (one_model, base, other_model, one_model), strict=True):
        torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)
    assert torch.equal(together[1], plain[1])
    assert not torch.equal(together[0], plain[0])
    for text, adapter, logits in zip(texts(), of_sequences, together, strict=True):
        assert torch.equal(logits_of(model, [text], [adapter])[0], logits)
    merged = one_model.merge_and_unload()
    torch.testing.assert_close(together[0], reference(merged, texts()[0]), **ACCURATE)


@pytest.mark.parametrize(
    "name",
    [
        "bamba",
        "deepseek-v2",
        "falcon-40b",
        "gpt2",
        "jamba-dense",
        "kimi-linear",
        "lfm2",
        "llama",
        "minimax",
        "phi3",
        "qwen3-5",
    ],
)
def test_two_ranks_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    folder = save(name, widened(CASES[name]), tmp_path / "base")
    one, _ = make_adapter(tmp_path / "one", folder, 1, **targets(name))
    other, _ = make_adapter(tmp_path / "other", folder, 2, r=3, **targets(name))

    assert_two_ranks_compute_the_bits_of_one(folder, [one, other])


def assert_two_ranks_compute_the_bits_of_one(folder: Path, adapters: list[Path]) -> None:
    def logits(group: RankGroup) -> list[torch.Tensor]:
        model = load(folder, group, torch.bfloat16)
        first, second = loaded(model, adapters)
        return logits_of(model, texts(), [first, None, second, first])

    alone = logits(RankGroup())
    for of_rank in run_native_ranks(2, logits):
        for found, expected in zip(of_rank, alone, strict=True):
            assert torch.equal(found, expected)


def test_an_adapter_that_peft_has_trained_answers_as_in_peft(tmp_path: Path) -> None:
    base = save("llama", widened(CASES["llama"]), tmp_path / "base")
    text = texts()[0]
    ids = torch.tensor([text])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    trained.eval().save_pretrained(tmp_path / "trained")

    served = load(base)
    (adapter,) = loaded(served, [tmp_path / "trained"])
    with_adapter, without = (logits_of(served, [text], [each])[0] for each in (adapter, None))
    losses = [torch.nn.functional.cross_entropy(each[:-1], ids[0, 1:]) for each in (with_adapter, without)]
    assert losses[0] < losses[1] - 1, "the adapter has learned the text"
    torch.testing.assert_close(with_adapter, reference(trained, text), **ACCURATE)
    torch.testing.assert_close(with_adapter, reference(trained.merge_and_unload(), text), **ACCURATE)
    assert_two_ranks_compute_the_bits_of_one(base, [tmp_path / "trained"] * 2)


def damage(folder: Path, values: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Changes keys of the adapter's config, and tensors by a part of their names; None removes them."""
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **(values or {})}))
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    for part, tensor in tensors.items():
        (name,) = [name for name in stored if part.replace("__", ".") in name]
        del stored[name]
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path)


FIRST_QUERY = "layers__0__self_attn__q_proj__lora_A"
WITHOUT_FIRST_QUERY: dict[str, torch.Tensor | None] = {FIRST_QUERY: None, FIRST_QUERY.replace("lora_A", "lora_B"): None}
LACKS_FIRST_QUERY = "lacks the tensors of 1 modules that adapter_config.json names"
DAMAGES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "type": ({"peft_type": "IA3"}, {}, "peft_type is 'IA3', must be 'LORA'"),
    "dora": ({"use_dora": True}, {}, "DoRA adapters are not supported"),
    "bias": ({"bias": "all"}, {}, "bias is 'all', must be 'none'"),
    "lora bias": ({"lora_bias": True}, {}, "lora_bias is True, which is not supported"),
    "modules": (
        {"modules_to_save": ["lm_head"]},
        {},
        "whole modules are not supported; merge the adapter",
    ),
    "parameters": (
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {},
        "target_parameters has 'mlp.experts.gate_up_proj', which the base model does not have",
    ),
    "tokens": ({"trainable_token_indices": [3]}, {}, "tokens with embeddings of their own are not supported; merge"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, {}, "changes the base's weights"),
    "unknown": ({"new_kind": {"a": 1}}, {}, "new_kind is {'a': 1}, which is not supported"),
    "pattern": ({"rank_pattern": {".*q": 4}}, {}, "rank_pattern has the regular expression '.*q'"),
    "alpha": ({"lora_alpha": "much"}, {}, "lora_alpha is 'much', must be a number"),
    "high rank": ({"r": 17}, {}, "is 17, at most 16 is allowed; raise --max-lora-rank"),
    "another rank": ({"r": 4}, {}, "was the adapter trained on another base?"),
    "missing A": ({}, {FIRST_QUERY: None}, "lacks the tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A"),
    "missing module": ({}, WITHOUT_FIRST_QUERY, LACKS_FIRST_QUERY),
    "missing module of a pattern": ({"target_modules": r".*\.(q|k)_proj"}, WITHOUT_FIRST_QUERY, LACKS_FIRST_QUERY),
    "broken pattern": ({"target_modules": r".*\.(q|k_proj"}, {}, "which is no regular expression: missing )"),
    "shape": ({}, {FIRST_QUERY: torch.zeros(8, 95)}, "has shape [8, 95], but base model"),
    "nan": ({}, {FIRST_QUERY: torch.full((8, 96), float("nan"))}, "holds NaN"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Decoder]:
    """A base, an adapter for it, and the loaded base."""
    folder = tmp_path_factory.mktemp("served")
    base = save("llama", widened(CASES["llama"]), folder / "base")
    adapter, _ = make_adapter(folder / "adapter", base, 1)
    return base, adapter, load(base)


@pytest.mark.parametrize("name", DAMAGES)
def test_an_adapter_that_cannot_be_applied_in_full_is_refused(
    name: str, served: tuple[Path, Path, Decoder], tmp_path: Path
) -> None:
    _, adapter, model = served
    values, tensors, reason = DAMAGES[name]
    folder = shutil.copytree(adapter, tmp_path / "damaged")
    damage(folder, values, **tensors)
    with pytest.raises(ConfigError) as caught:
        loaded(model, [folder])
    assert reason in str(caught.value)


def test_patterns_and_a_part_of_the_layers_are_applied(served: tuple[Path, Path, Decoder], tmp_path: Path) -> None:
    base, _, model = served
    patterns = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}}
    folder, reference_model = make_adapter(
        tmp_path / "some", base, 3, target_modules=["q_proj", "v_proj"], layers_to_transform=[1, 2], **patterns
    )
    (adapter,) = loaded(model, [folder])
    text = texts()[0]
    torch.testing.assert_close(logits_of(model, [text], [adapter])[0], reference(reference_model, text), **ACCURATE)


def test_an_adapter_of_an_older_peft_is_the_same(served: tuple[Path, Path, Decoder], tmp_path: Path) -> None:
    """In a pickle, and with the adapter's name in the names of its tensors."""
    _, adapter, model = served
    tensors = load_file(adapter / "adapter_model.safetensors")
    named = {re.sub(r"(lora_[AB])\.", r"\1.default.", name): tensor for name, tensor in tensors.items()}
    assert named.keys() != tensors.keys()
    folders = [adapter]
    for name, content, save in (
        ("pickled", tensors, lambda tensors, folder: torch.save(tensors, folder / "adapter_model.bin")),
        ("named", named, lambda tensors, folder: save_file(tensors, folder / "adapter_model.safetensors")),
        ("both", named, lambda tensors, folder: torch.save(tensors, folder / "adapter_model.bin")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(adapter / "adapter_config.json", folder)
        save(content, folder)
        folders.append(folder)
    text = texts()[0]
    expected, *others = (logits_of(model, [text], loaded(model, [folder]))[0] for folder in folders)
    assert all(torch.equal(logits, expected) for logits in others)
    for folder in folders:
        assert model.adapters is not None
        model.adapters.check(folder)


def test_files_that_are_no_adapter_are_refused(served: tuple[Path, Path, Decoder], tmp_path: Path) -> None:
    _, adapter, model = served
    tensors = load_file(adapter / "adapter_model.safetensors")
    several = {
        re.sub(r"(lora_A)\.", r"\1.one.", re.sub(r"(lora_B)\.", r"\1.two.", name)): tensors[name] for name in tensors
    }
    folder = shutil.copytree(adapter, tmp_path / "several")
    save_file(several, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="holds several adapters: one, two; save one of them alone"):
        loaded(model, [folder])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither adapter_model\.safetensors nor adapter_model\.bin"):
        loaded(model, [folder])
    with pytest.raises(ConfigError, match=r"is not a LoRA adapter: cannot read adapter_config\.json"):
        loaded(model, [tmp_path])


def test_a_model_that_is_served_with_an_adapter_has_it_in_every_sequence(tmp_path: Path) -> None:
    base = save("llama", widened(CASES["llama"]), tmp_path / "base")
    own, reference_model = make_adapter(tmp_path / "own", base, 1)
    other, other_model = make_adapter(tmp_path / "other", base, 2)
    folder = adapted_folder(base, own, "test")
    model = load(folder)
    assert model.adapters is not None
    table = SequenceTable(TableLimits(model.traits.vocab_size, 16, 16, 256, 4), model.adapters)
    named = Adapter(1, other)
    for number, adapter in enumerate((None, named), 1):
        table.add(NewSequence(number, [1, 2], 2, adapter=adapter))
    assert model.adapters.own is not None
    assert table.adapter[table.rows([1, 2])].tolist() == [model.adapters.own.id, named.id]
    chosen = [model.adapters.own, named]
    text = texts()[0]
    logits = logits_of(model, [text, text], [model.adapters.get(adapter) for adapter in chosen])
    torch.testing.assert_close(logits[0], reference(reference_model, text), **ACCURATE)
    torch.testing.assert_close(logits[1], reference(other_model, text), **ACCURATE)


@pytest.mark.parametrize(
    ("name", "targets", "module"),
    [
        ("qwen2-moe", ["shared_expert_gate"], "layers.0.mlp.shared_expert_gate"),
    ],
)
def test_a_module_that_adapters_cannot_change_is_refused_by_name(
    name: str, targets: list[str], module: str, tmp_path: Path
) -> None:
    folder = save(name, widened(CASES[name]), tmp_path / "base")
    adapter, _ = make_adapter(tmp_path / "adapter", folder, 1, target_modules=targets)
    with pytest.raises(ConfigError) as caught:
        loaded(load(folder), [adapter])
    assert module in str(caught.value)


@pytest.mark.parametrize("pattern", [r"(\w+\.?)+!", r".*.*.*.*.*.*.*!", "x" * 5000])
def test_a_pattern_that_may_take_long_is_not_searched_for(
    pattern: str, served: tuple[Path, Path, Decoder], tmp_path: Path
) -> None:
    _, adapter, model = served
    folder = shutil.copytree(adapter, tmp_path / "slow")
    damage(folder, {"target_modules": pattern})
    assert len(loaded(model, [folder])) == 1


def test_weights_that_cannot_be_read_are_refused(
    served: tuple[Path, Path, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, adapter, model = served

    def no_access(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", no_access)
    with pytest.raises(ConfigError, match=r"cannot read .*adapter_model\.safetensors: Permission denied"):
        loaded(model, [adapter])


def test_an_adapter_whose_folder_is_gone_fails_its_sequences_only(
    served: tuple[Path, Path, Decoder], tmp_path: Path
) -> None:
    _, adapter, model = served
    engine = Engine(model, RankGroup(), CPU, BLOCK_TOKENS)
    engine.warm_up(WarmUpConfig(max_step_tokens=64, max_step_sequences=8, num_blocks=20, proven=True))
    named = [Adapter(21, tmp_path / "gone"), None, Adapter(22, adapter)]
    new = [NewSequence(number, [1, 2, 3], 3, adapter=each) for number, each in enumerate(named)]
    advances = [Advance(number, 3, [number], sample=True) for number in range(3)]
    gone, *others = sorted(step(engine, plan(1, (), new, advances)), key=lambda output: output.sequence_id)
    assert gone.error.startswith(f"its adapter cannot be loaded: {tmp_path}/gone is not a LoRA adapter")
    assert [(output.error, len(output.tokens)) for output in others] == [("", 1), ("", 1)]


def test_the_warm_up_runs_the_largest_step_with_adapters(
    served: tuple[Path, Path, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, model = served
    steps, run = [], NativeExecutor.run

    def seen(
        executor: NativeExecutor, residual: Tensor, caches: list, context: StepContext, *, visits: bool = False
    ) -> Tensor:
        if context.adapters is not None:
            steps.append((len(residual), len(context.batch.sample_rows)))
        return run(executor, residual, caches, context, visits=visits)

    monkeypatch.setattr(NativeExecutor, "run", seen)
    Engine(model, RankGroup(), CPU, BLOCK_TOKENS).warm_up(WarmUpConfig(64, 8, num_blocks=20))
    assert steps == [(64, 8)]


def test_only_the_last_adapters_stay_loaded(served: tuple[Path, Path, Decoder]) -> None:
    _, folder, model = served
    adapters = model.adapters
    assert adapters is not None
    first, second = (Adapter(index, folder) for index in (11, 12))
    loaded_first = adapters.load(first)
    assert adapters.get(first) is loaded_first
    adapters.load(second)
    adapters.load(Adapter(13, folder))
    assert adapters.get(first) is not loaded_first  # read again: two are loaded at most


def test_a_model_without_a_native_stack_says_why_it_has_no_adapters(tmp_path: Path) -> None:
    folder = save("t5", CASES["t5"], tmp_path)
    with pytest.raises(ConfigError, match=r"not supported for this model on this device: .*only decoders"):
        load(folder)
