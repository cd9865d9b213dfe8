"""Architectures without a native decoder: served over our cache with the results of transformers, or refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import VOCAB, Case
from engine_run import EngineRun
from model_driver import ModelDriver
from near_tie import assert_greedy
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.models import load_model
from penstock_server.models.fallback import Fallback, load_fallback
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import ARCHITECTURES
from penstock_server.models.support import support_of
from penstock_server.parallel import RankGroup
from test_parity import Made
from tiny_model import make_model, save_model
from tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 12}
CASES: dict[str, Case] = {
    "diffllama": Case("DiffLlamaConfig"),  # calls attention twice per layer
    "afmoe": Case("AfmoeConfig", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, **LAYERS}),
    # Architectures with a native decoder, which these tests bypass.
    "nanochat": Case("NanoChatConfig"),  # caps its logits
    "jais2": Case("Jais2Config"),
    "helium": Case("HeliumConfig", {"head_dim": 8}),
    "apertus": Case("ApertusConfig"),
    "hunyuan_v1_dense": Case("HunYuanDenseV1Config", {"head_dim": 8}),
    "llama": Case("LlamaConfig"),
    "gemma2": Case("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24}),
}
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class TinyConfig(LlamaConfig):
    model_type = "tiny_of_its_own"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.flip(-1)
        return out
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @functools.cache
    def made(name: str) -> Made:
        reference = make_model(name, CASES[name])
        folder = save_model(reference, tmp_path_factory.mktemp(name))
        reference.set_attn_implementation("eager")
        return Made(name, CASES[name], reference, folder, folder)

    return made


def load(folder: Path, dtype: torch.dtype = torch.float32, block_tokens: int = 4, trust: bool = False) -> Fallback:
    options = LoadOptions(folder, dtype, CPU, block_tokens, trust_remote_code=trust)
    with torch.inference_mode():
        return load_fallback(options, RankGroup())


@torch.inference_mode()
def load_past_ours(options: LoadOptions, group: RankGroup) -> Fallback:
    return load_fallback(options, group)


def saved(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    """A folder with a configuration only."""
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_batch_gives_the_logits_of_transformers(make: Callable[[str], Made], name: str) -> None:
    made = make(name)
    driver = ModelDriver(load(made.folder), block_tokens=4)
    texts = prompts(1, [37, 9, 5], VOCAB)
    expected = [made.logits(text) for text in texts]
    first, second, third = (driver.sequence(text) for text in texts)
    steps = [[(first, 7), (second, 8)], [(second, 1), (first, 1), (third, 4)], [(third, 1), (first, 28)], [(first, 1)]]
    for step in steps:
        begins = [sequence.num_computed for sequence, _ in step]
        logits = driver.step(step, every_row=True)
        wanted = [
            expected[texts.index(sequence.token_ids)][begin : begin + count]
            for (sequence, count), begin in zip(step, begins, strict=True)
        ]
        torch.testing.assert_close(logits, torch.cat(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(make: Callable[[str], Made], name: str) -> None:
    """In chunks and batches, with a shared prefix and a preemption."""
    made = make(name)
    shared, first, other = prompts(3, [10, 5, 6], VOCAB)
    texts = [first, [*shared, *other[:3]], [*shared, *other[2:]]]
    engine = EngineRun(made.folder, load_past_ours)
    for text, tokens in zip(texts, engine.greedy(texts, 64, shared_tokens=len(shared), chunk=7), strict=True):
        assert_greedy(made.logits([*text, *tokens])[len(text) - 1 : -1], tokens)


@pytest.mark.parametrize("name", ["jais2", "gemma2"])
def test_bfloat16_logits_are_those_of_transformers(make: Callable[[str], Made], name: str) -> None:
    made = make(name)
    driver = ModelDriver(load(made.folder, torch.bfloat16, block_tokens=16), block_tokens=16)
    text = prompts(2, [30], VOCAB)[0]
    logits = driver.step([(driver.sequence(text), 30)], every_row=True)
    assert logits.dtype == torch.bfloat16
    exact = made.logits(text)
    assert (logits - exact).norm() < 5e-2 * exact.norm()


def test_some_cases_have_no_native_decoder() -> None:
    types = {getattr(transformers, case.config).model_type for case in CASES.values()}
    assert types - set(ARCHITECTURES) == {"afmoe", "diffllama"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("RecurrentGemmaConfig", "keeps a state"),
        ("ZambaConfig", "keeps a state"),
        ("RwkvConfig", "keeps a state"),
        ("MarianConfig", "an encoder-decoder model"),
        ("XGLMConfig", "does not use transformers' attention interface"),
        ("ViTConfig", "neither supported"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(tmp_path: Path, config: str, reason: str) -> None:
    made = getattr(transformers, config)()
    with pytest.raises(ConfigError, match=f"{made.model_type!r}.*{reason}"):
        load(saved(tmp_path, made))
    assert reason in support_of(made.model_type, made.to_dict())


def test_support_is_known_without_loading() -> None:
    assert support_of("llama", {}) == "native"
    assert support_of("diffllama", {}) == "fallback"
    assert "--trust-remote-code" in support_of("unheard_of", {"auto_map": {"AutoModelForCausalLM": "a.B"}})
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    assert "not plain attention: conv" in support_of("lfm3", layers)
    assert "unquantized" in support_of("diffllama", {"quantization_config": {"quant_method": "awq"}})


def test_a_checkpoint_that_a_tool_s_own_file_calls_quantized_is_refused(
    make: Callable[[str], Made], tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(make("diffllama").folder, folder)
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    with pytest.raises(ConfigError, match=r"'diffllama' is served unquantized only, and this checkpoint is quantized"):
        load(folder)


def test_several_ranks_are_refused_with_a_list_of_supported_types(make: Callable[[str], Made]) -> None:
    options = LoadOptions(make("diffllama").folder, torch.float32, CPU, 4)
    with pytest.raises(ConfigError, match=r"'diffllama'.*one rank only, not on 2; `penstock models` lists"):
        load_model(options, RankGroup(0, 2))


def test_an_fp8_cache_is_refused(make: Callable[[str], Made]) -> None:
    options = LoadOptions(make("diffllama").folder, torch.float32, CPU, 4, kv_dtype=torch.float8_e5m2)
    with pytest.raises(ConfigError, match=r"'diffllama' is run by transformers.*remove --kv-cache-dtype"):
        load_model(options, RankGroup())


def test_custom_attention_masks_are_refused(tmp_path: Path) -> None:
    save_model(make_model("doge", Case("DogeConfig")), tmp_path)
    with pytest.raises(ConfigError, match=r"'doge' is not served: .*masks of its own"):
        load(tmp_path)


LONG = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.2, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    },
}
# By kind of rope: the longest text by default, and the longest possible one.
LENGTHS = {"dynamic": (64, 128), "longrope": (64, 64)}


@pytest.mark.parametrize("kind", LONG)
def test_a_rope_that_depends_on_the_batch_is_that_of_the_longest_served_text(kind: str, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **LONG[kind]}, "max_position_embeddings": 64}
    reference = make_model("jais2", Case("Jais2Config", rope))
    save_model(reference, tmp_path)
    model = load(tmp_path)
    default, longest = LENGTHS[kind]
    assert (model.traits.default_position_tokens, model.max_position_tokens) == (default, longest)
    for served in sorted({default, longest}):
        model.serve_up_to(served)
        (text,) = prompts(5, [served], VOCAB)
        with torch.inference_mode():
            expected = reference(torch.tensor([text]), use_cache=False).logits[0]
        driver = ModelDriver(model, block_tokens=4, device=CPU)
        sequence = driver.sequence(text)
        # A short step does not change the frequencies, nor does another text.
        found = [driver.step([(sequence, count)], every_row=True) for count in (8, served - 8)]
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_memory_beyond_attention_is_refused(
    make: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers read the previous row, which may belong to another text of the batch."""
    layer = transformers.models.jais2.modeling_jais2.Jais2MLP
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
    with pytest.raises(ConfigError, match="its logits for a text depend on chunks"):
        load(make("jais2").folder)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = make_model("jais2", CASES["jais2"])
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"missing keys, e\.g\. model\.layers\.1\.mlp"):
        load(tmp_path)


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with its own model class: Llama with a reversed vocabulary."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "checkpoint"
    save_model(make_model("llama", CASES["llama"]), folder)
    (folder / "modeling_tiny.py").write_text(CODE)
    path = folder / "config.json"
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "tiny_of_its_own", "auto_map": auto_map}))
    return folder


def test_a_checkpoints_own_code_runs_only_with_the_flag(own_code: Path, make: Callable[[str], Made]) -> None:
    with pytest.raises(ConfigError, match=r"'tiny_of_its_own'.*--trust-remote-code"):
        load(own_code)
    assert not (own_code.parent / "modules").exists()
    driver = ModelDriver(load(own_code, trust=True), block_tokens=4)
    text = prompts(4, [11], VOCAB)[0]
    logits = driver.step([(driver.sequence(text), 11)], every_row=True)
    torch.testing.assert_close(logits, make("llama").logits(text).flip(-1), atol=1e-4, rtol=1e-4)


def test_a_check_runs_a_checkpoints_own_code_only_with_the_flag(own_code: Path, capsys: Any) -> None:
    check.main([str(own_code), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["layout"] is None
    assert any("--trust-remote-code" in problem for problem in report["problems"])
    assert not (own_code.parent / "modules").exists()
    check.main([str(own_code), "--json", "--trust-remote-code", "--dtype", "float32"])
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["architecture"] == "tiny_of_its_own"
    assert report["layout"]["ranks"][0]["weight_bytes"] == load(own_code, trust=True).weight_bytes
    assert [problem for problem in report["problems"] if "no tokenizer.json" not in problem] == []


def test_code_that_is_not_needed_is_not_run(make: Callable[[str], Made], tmp_path: Path) -> None:
    """If transformers knows the model, the flag has no effect."""
    save_model(make("jais2").reference, tmp_path)
    (tmp_path / "modeling_bad.py").write_text("raise RuntimeError('was run')")
    path = tmp_path / "config.json"
    auto_map = {"AutoModelForCausalLM": "modeling_bad.Bad"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    assert load(tmp_path, trust=True).traits.architecture == "jais2"
