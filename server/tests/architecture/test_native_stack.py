"""All layers in one native call compute the bits of the layers one by one, for every architecture that they support,
and the log says why other layers run one by one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CASES, Case
from model_driver import ModelDriver
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts

pytestmark = pytest.mark.native

BLOCK_TOKENS = 16
VOCAB = 131
WIDTHS = ("hidden_size", "n_embd", "d_model")  # the names of the hidden size

# The native attention has no padding of the heads of these models: their size is a multiple of 16.
SUPPORTED = [
    "apertus",
    "arcee",
    "baichuan-13b",
    "baichuan2",
    "bloom",
    "codegen",
    "cohere",
    "cohere-qk-norm",
    "cohere2",
    "cwm",
    "ernie4-5",
    "exaone4",
    "falcon-7b",
    "falcon-40b",
    "falcon-11b",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "gpt-bigcode",
    "gpt-neo",
    "gpt-neox",
    "gpt-neox-sequential",
    "gpt2",
    "gptj",
    "granite",
    "helium",
    "hunyuan",
    "internlm2",
    "internlm3",
    "jais2",
    "llama",
    "llama-biases",
    "llama-gelu",
    "ministral",
    "mistral",
    "mpt",
    "nemotron",
    "olmo2",
    "olmo3",
    "opt",
    "persimmon",
    "phi",
    "phi-qk-norm",
    "phi3",
    "phi4",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "seed-oss",
    "smollm3",
    "smollm3-window",
    "stablelm",
    "stablelm-12b",
    "starcoder2",
]
ONE_BY_ONE = {
    "mixtral": "experts",
    "deepseek-v3": "latent attention",
    "olmo": "a norm without weights",
    "opt-350m": "not a norm's",
    "t5": "an encoder",
    "llama-nine-heads": "heads of 8 elements, which are padded",
}


def widened(case: Case) -> Case:
    """The case with heads of 16 elements."""
    given = {**case.sizes, **case.values}
    name = next(name for name in WIDTHS if name in given)
    num_heads = next(
        given[heads] for heads in ("num_attention_heads", "num_heads", "n_heads", "n_head") if heads in given
    )
    of_head = {"head_dim": 16} if "head_dim" in given else {}
    return replace(case, values={**case.values, name: 16 * num_heads, **of_head})


def load(name: str, case: Case, folder: Path) -> Decoder:
    reference = make_model(name, case)
    save_model(reference, folder)
    if case.published is not None:
        folder = case.published.save(reference, folder / "published")
    model = load_model(LoadOptions(folder, torch.bfloat16, torch.device("cpu"), BLOCK_TOKENS), RankGroup())
    assert isinstance(model, Decoder)
    return model


def logits_of_steps(model: Decoder) -> list[torch.Tensor]:
    """Steps of chunks, single tokens and both; each has the logits of every row, or of the last rows."""
    driver = ModelDriver(model, BLOCK_TOKENS)
    first, second, third = (driver.sequence(text) for text in prompts(5, [80, 40, 33], VOCAB))
    steps = [
        ([(first, 33)], False),
        ([(first, 17), (second, 20)], True),
        ([(first, 1), (second, 1), (third, 30)], False),
        ([(first, 1), (second, 1), (third, 1)], False),
        ([(third, 1)], True),
        ([(first, 20), (second, 3), (third, 1)], False),
    ]
    found = []
    for advances, every_row in steps:
        logits = driver.step(advances, every_row=every_row)
        assert logits is not None
        found.append(logits)
    return [*found, *(cache.clone() for cache in model.caches)]


@pytest.mark.parametrize("name", SUPPORTED)
def test_one_call_computes_the_bits_of_the_layers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load(name, widened(CASES[name]), tmp_path)
    assert "layers: one native call" in caplog.messages
    together = logits_of_steps(model)
    model.stack = None
    for one_call, one_by_one in zip(together, logits_of_steps(model), strict=True):
        assert one_call.isfinite().all()
        assert torch.equal(one_call, one_by_one)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_the_log_says_what_has_no_native_operation(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(name, CASES[name], tmp_path)
    (line,) = [message for message in caplog.messages if message.startswith("layers:")]
    assert line.startswith("layers: one by one (")
    assert ONE_BY_ONE[name] in line
