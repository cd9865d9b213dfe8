"""Every architecture that GGUF names and we serve: a file made from transformers' model has that model's logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, LONGROPE, SIZES, Case, rope
from gguf_files import save_gguf
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.layers.shard import Shard
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.parameters import parameters
from penstock_server.models.registry import read_spec
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import open_checkpoint
from penstock_server.weights.gguf_config import BUILDERS
from penstock_server.weights.gguf_folder import gguf_folder
from penstock_server.weights.loader import Loader
from tiny_model import make_model, save_model
from tiny_models import prompts

NUM_TOKENS = 24
LONGROPE_TENSORS = {
    f"rope_factors_{name}.weight": np.array(LONGROPE["rope_parameters"][f"{name}_factor"], dtype=np.float32)
    for name in ("long", "short")
}


@dataclass(frozen=True)
class GgufCase:
    """GGUF's name, a case of the parity tests or one of its own, and what only some files say."""

    architecture: str
    case: str | Case
    metadata: dict[str, Any] = field(default_factory=dict)


GGUF_CASES = {
    "llama": GgufCase("llama", "llama"),
    "llama-tied": GgufCase("llama", "llama-nine-heads"),
    "llama-biases": GgufCase("llama", "llama-biases"),
    "llama-head-dim": GgufCase("llama", Case("LlamaConfig", {"head_dim": 16})),
    "llama-yarn": GgufCase(
        "llama",
        "llama-yarn",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "mistral": GgufCase("llama", "mistral-no-window"),
    "qwen2": GgufCase("qwen2", "qwen2"),
    "qwen3": GgufCase("qwen3", "qwen3"),
    "gemma": GgufCase("gemma", "gemma"),
    # GGUF does not say what queries are scaled by: it is the head dimension.
    "gemma2": GgufCase(
        "gemma2", Case("Gemma2Config", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16})
    ),
    "gemma3": GgufCase(
        "gemma3",
        Case(
            "Gemma3TextConfig",
            {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        ),
    ),
    "gemma3-linear": GgufCase(
        "gemma3",
        Case(
            "Gemma3TextConfig",
            {
                "head_dim": 16,
                "sliding_window": 12,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        ),
        {
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base_swa": 500.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi2": GgufCase("phi2", "phi"),
    "phi3": GgufCase("phi3", "phi3"),
    "phi3-longrope": GgufCase(
        "phi3",
        "phi3-long-rope",
        {"rope.scaling.original_context_length": 8, **LONGROPE_TENSORS},
    ),
    "phi4": GgufCase("phi3", "phi4"),
    "falcon-7b": GgufCase("falcon", "falcon-7b", {"attention.head_count_kv": 1}),
    "falcon-40b": GgufCase(
        "falcon",
        Case(
            "FalconConfig",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
        ),
        {"attention.head_count_kv": 2},
    ),
    "falcon-11b": GgufCase("falcon", "falcon-11b", {"attention.head_count_kv": 2}),
    "gpt2": GgufCase("gpt2", "gpt2"),
    "gptneox": GgufCase("gptneox", "gpt-neox"),
    "gptneox-sequential": GgufCase("gptneox", "gpt-neox-sequential"),
    "bloom": GgufCase("bloom", "bloom", {"context_length": 256}),
    "stablelm": GgufCase("stablelm", "stablelm"),
    "stablelm-12b": GgufCase("stablelm", "stablelm-12b"),
    "starcoder": GgufCase("starcoder", "gpt-bigcode", {"attention.head_count_kv": 1}),
    "mpt": GgufCase("mpt", "mpt", {"attention.clamp_kqv": 1.5, "attention.max_alibi_bias": 8.0}),
    "command-r": GgufCase("command-r", "cohere"),
    "command-r-plus": GgufCase("command-r", Case("CohereConfig", {"use_qk_norm": True, **rope("default")})),
    "olmo2": GgufCase("olmo2", "olmo2"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def made(name: str, folder: Path) -> tuple[Any, Path]:
    """transformers' model, and the folder prepared from the GGUF file of it."""
    gguf = GGUF_CASES[name]
    case = CASES[gguf.case] if isinstance(gguf.case, str) else gguf.case
    reference = make_model(name, case)
    changes = {
        key if isinstance(value, np.ndarray) else f"{gguf.architecture}.{key}": value
        for key, value in gguf.metadata.items()
    }
    path = save_gguf(reference, folder / f"{name}.gguf", gguf.architecture, **changes)
    return reference, gguf_folder(path, name)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_has_the_logits_and_the_greedy_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    reference, folder = made(name, tmp_path)
    prompt = prompts(7, [29], 131)[0]
    with torch.inference_mode():
        ids = reference.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0].tolist()
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    driver = ModelDriver(load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 4), RankGroup()))
    sequence = driver.sequence(ids)
    logits = driver.step([(sequence, len(ids))], every_row=True)
    assert logits is not None
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert logits.argmax(dim=-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


@pytest.mark.parametrize("name", GGUF_CASES)
@pytest.mark.parametrize("exact", [True, False])
def test_each_rank_reads_what_it_reads_of_the_model_itself(name: str, exact: bool, tmp_path: Path) -> None:
    reference, folder = made(name, tmp_path)
    hf = save_model(reference, tmp_path / "hf")
    for rank in range(3):
        ours, theirs = (parameters_of(place, RankGroup(rank, 3), exact) for place in (folder, hf))
        assert ours.keys() == theirs.keys()
        for parameter, tensor in theirs.items():
            # One is added to Gemma's norms in the file, which rounds.
            torch.testing.assert_close(ours[parameter], tensor, rtol=0, atol=1e-7, msg=parameter)


def parameters_of(folder: Path, group: RankGroup, exact: bool) -> dict[str, torch.Tensor]:
    """What a rank loads, by our names."""
    spec, names = read_spec(folder)
    table = parameters(spec, Shard.of(spec.hidden_size, spec.vocab_size, group, exact))
    checkpoint = open_checkpoint(folder)
    sources = checkpoint.own_names() or names.fitted(checkpoint.names())
    loader = Loader(checkpoint, table, sources, torch.float32, torch.device("cpu"))
    read = {name: loader.read(name) for name in table}
    loader.finish()
    return read


def test_every_architecture_with_a_builder_has_a_case() -> None:
    assert {case.architecture for case in GGUF_CASES.values()} == set(BUILDERS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count_kv", [2, 1, 2], "llama.attention.head_count_kv differs between layers"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope' is not supported; supported: none, linear"),
    ],
)
def test_what_a_decoder_cannot_do_is_refused_by_its_key(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama", CASES["llama"]), tmp_path / "x.gguf", "llama", **{f"llama.{key}": value})
    with pytest.raises(ConfigError, match=message):
        gguf_folder(path, "x")
