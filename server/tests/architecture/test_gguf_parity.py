"""GGUF parity: a file made from a transformers model has the logits and weights of that model, for each architecture.

`gguf_tensors` writes the files by the `gguf` package's name table, while the reader has its own. Where transformers
reads an architecture from GGUF, its reader confirms that the files are valid.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cases import CASES
from gguf_cases import DECODERS, ENCODERS, GGUF_CASES
from gguf_files import save_gguf
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.layers.experts import MoeSpec
from penstock_server.layers.experts.parameters import read_experts
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.shard import Shard
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import read_spec
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.config import BUILDERS
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.header import read_header
from rank_threads import run_native_ranks
from shares import open_loader
from tiny_model import make_model, save_model
from tiny_models import prompts
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

pytestmark = pytest.mark.usefixtures("model_cache")

NUM_TOKENS = 24


def made(name: str, folder: Path) -> tuple[Any, Path]:
    """Returns a transformers model and the prepared folder of its GGUF file."""
    case = GGUF_CASES[name]
    reference = make_model(name, case.own_case)
    changes = {
        key if isinstance(value, np.ndarray) else f"{case.architecture}.{key}": value
        for key, value in case.metadata.items()
    } | case.facts(reference)
    path = folder / f"{name}.gguf"
    save_gguf(reference, path, case.architecture, old_layout=case.old_layout, **changes)
    return reference, gguf_folder(path)


@pytest.mark.parametrize("name", DECODERS)
def test_a_gguf_file_gives_the_logits_and_greedy_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    reference, folder = made(name, tmp_path)
    prompt = prompts(7, [29], 131)[0]
    with torch.inference_mode():
        # Stand-ins for models that are not in transformers do not all support a KV cache.
        has_cache = GGUF_CASES[name].own_case.published is None
        options = {"do_sample": False, "use_cache": has_cache, "pad_token_id": 0, "eos_token_id": None}
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, **options)[0].tolist()
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    driver = ModelDriver(load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 4), RankGroup()))
    sequence = driver.sequence(ids)
    logits = driver.step([(sequence, len(ids))], every_row=True)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert logits.argmax(dim=-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


@pytest.mark.parametrize("name", [name for name, case in GGUF_CASES.items() if not case.other_order])
def test_each_rank_reads_the_same_weights_from_gguf_and_safetensors(name: str, tmp_path: Path) -> None:
    reference, folder = made(name, tmp_path)
    published = GGUF_CASES[name].own_case.published
    hf = published.save(reference, tmp_path / "hf") if published else save_model(reference, tmp_path / "hf")
    for rank, exact in itertools.product(range(3), (True, False)):
        ours, theirs = (parameters_of(place, RankGroup(rank, 3), exact) for place in (folder, hf))
        assert ours.keys() == theirs.keys()
        for parameter, tensor in theirs.items():
            # Norms that are stored plus one are rounded.
            torch.testing.assert_close(ours[parameter], tensor, rtol=0, atol=2e-7, msg=f"{parameter} of rank {rank}")


def parameters_of(folder: Path, group: RankGroup, exact: bool) -> dict[str, torch.Tensor]:
    """The weights that a rank loads, by our names. Experts are unpacked, because formats store them differently."""
    spec, _ = read_spec(folder)
    layout = WeightLayout(Shard.of(spec.hidden_size, spec.vocab_size, group, exact))
    loader = open_loader(folder, group, exact)
    read = {name: loader.read(name) for name in loader.parameters if ".experts." not in name}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            prefix = f"layers.{index}.mlp"
            for place, expert in enumerate(read_experts(layer.mlp, prefix, layout, loader)):
                for name, weights in zip(("gate_up", "down"), expert, strict=True):
                    weight, bias = weights.dense()
                    read[f"{prefix}.{place}.{name}"] = weight
                    if bias is not None:
                        read[f"{prefix}.{place}.{name}_bias"] = bias
    loader.finish()
    return read


@pytest.mark.native
def test_ranks_share_heads_in_another_order(tmp_path: Path) -> None:
    _, folder = made("qwen3-5", tmp_path)
    (text,) = prompts(7, [29], 131)

    def logits(group: RankGroup) -> torch.Tensor:
        driver = ModelDriver(load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), group))
        return driver.step([(driver.sequence(text), len(text))], every_row=True)

    whole = logits(RankGroup())
    for size in (2, 3):
        for found in run_native_ranks(size, logits):
            assert torch.equal(found, whole), size


@pytest.mark.parametrize("name", ENCODERS)
def test_the_configuration_of_an_encoder_decoder_model_survives_gguf(name: str, tmp_path: Path) -> None:
    """Together with the weights compared above, this implies equal outputs."""
    reference, folder = made(name, tmp_path)
    ours, theirs = (read_spec(place)[0] for place in (folder, save_model(reference, tmp_path / "hf")))
    assert ours == theirs
    assert ours.encoder is not None


# A case for each architecture that transformers reads from GGUF. It does not reorder Falcon 40B's fused q, k and v.
READ_BY_TRANSFORMERS = [
    *("llama", "llama-biases", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "bloom", "falcon-7b", "gpt2", "nemotron"),
    *("stablelm", "starcoder2", "t5"),
]


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_model_s_weights_from_the_test_file(name: str, tmp_path: Path) -> None:
    reference, _ = made(name, tmp_path)
    path = tmp_path / f"{name}.gguf"
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    expected = reference.state_dict()
    assert len(found) == len(read_header(path).tensors)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=2e-7, msg=key)


def test_transformers_puts_the_heads_of_the_test_file_back_in_its_own_order(tmp_path: Path) -> None:
    reference, _ = made("qwen3-5", tmp_path)
    options = {"gguf_file": "qwen3-5.gguf", "dtype": torch.float32, "ignore_mismatched_sizes": True}
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).state_dict()
    expected = reference.state_dict()
    assert found.keys() == expected.keys()
    for key in expected.keys() - {"model.embed_tokens.weight", "lm_head.weight"}:  # sized as the tokenizer
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-7, msg=key)


def test_every_architecture_with_a_builder_has_a_case() -> None:
    assert {case.architecture for case in GGUF_CASES.values()} == set(BUILDERS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count_kv", [2, 1, 2], "llama.attention.head_count_kv differs between layers"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope' needs the tensors rope_factors_long"),
    ],
)
def test_an_unsupported_value_is_refused_by_its_key(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = save_gguf(make_model("llama", CASES["llama"]), tmp_path / "x.gguf", "llama", **{f"llama.{key}": value})
    with pytest.raises(ConfigError, match=message):
        gguf_folder(path)
