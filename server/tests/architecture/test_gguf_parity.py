"""Every architecture that GGUF names and we serve: a file made from transformers' model has that model's logits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from shares import open_loader
from tiny_model import make_model, save_model
from tiny_models import prompts

NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def made(name: str, folder: Path) -> tuple[Any, Path]:
    """transformers' model, and the folder prepared from the GGUF file of it."""
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
def test_a_gguf_file_has_the_logits_and_the_greedy_tokens_of_its_model(name: str, tmp_path: Path) -> None:
    reference, folder = made(name, tmp_path)
    prompt = prompts(7, [29], 131)[0]
    with torch.inference_mode():
        # Models that stand for published ones do not all compute with a cache.
        has_cache = GGUF_CASES[name].own_case.published is None
        options = {"do_sample": False, "use_cache": has_cache, "pad_token_id": 0, "eos_token_id": None}
        ids = reference.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, **options)[0].tolist()
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    driver = ModelDriver(load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 4), RankGroup()))
    sequence = driver.sequence(ids)
    logits = driver.step([(sequence, len(ids))], every_row=True)
    assert logits is not None
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert logits.argmax(dim=-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


@pytest.mark.parametrize("name", GGUF_CASES)
def test_each_rank_reads_what_it_reads_of_the_model_itself(name: str, tmp_path: Path) -> None:
    reference, folder = made(name, tmp_path)
    published = GGUF_CASES[name].own_case.published
    hf = published.save(reference, tmp_path / "hf") if published else save_model(reference, tmp_path / "hf")
    for rank, exact in itertools.product(range(3), (True, False)):
        ours, theirs = (parameters_of(place, RankGroup(rank, 3), exact) for place in (folder, hf))
        assert ours.keys() == theirs.keys()
        for parameter, tensor in theirs.items():
            # One is added to some norms in the file, which rounds.
            torch.testing.assert_close(ours[parameter], tensor, rtol=0, atol=2e-7, msg=f"{parameter} of rank {rank}")


def parameters_of(folder: Path, group: RankGroup, exact: bool) -> dict[str, torch.Tensor]:
    """What a rank loads, by our names; of experts what each is made of, however it is stored."""
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


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_and_its_decoder_are_those_of_the_model_itself(name: str, tmp_path: Path) -> None:
    """With the parameters of the test above, its answers are."""
    reference, folder = made(name, tmp_path)
    ours, theirs = (read_spec(place)[0] for place in (folder, save_model(reference, tmp_path / "hf")))
    assert ours == theirs
    assert ours.encoder is not None


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
        gguf_folder(path)
