"""In bfloat16 on native kernels a token's logits are the same bits, however its prompt is cut, whatever is beside it,
and whatever stands in blocks before its window, for models whose attention is more than causal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import Case
from model_driver import DrivenSequence, ModelDriver
from penstock_server.kernels import native_ops
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts

pytestmark = pytest.mark.skipif(not native_ops.available(), reason="needs native operators")

BLOCK_TOKENS = 16
LENGTH = 330  # two of the segments that the kernels give a softmax of its own
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
CASES = {
    "mistral": Case("MistralConfig", {"sliding_window": 100}, GROUPED),
    "gemma2": Case("Gemma2Config", {"head_dim": 16, "sliding_window": 100, "query_pre_attn_scalar": 24}, GROUPED),
    "gpt-oss": Case(
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 100, "num_local_experts": 4, "num_experts_per_tok": 2},
        GROUPED,
    ),
    "falcon-rw": Case(
        "FalconConfig", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}, SIZES
    ),
    "bloom": Case("BloomConfig", {"n_layer": 3, "n_head": 8}, SIZES),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(make_model(request.param, CASES[request.param]), folder)
    options = LoadOptions(folder, torch.bfloat16, torch.device("cpu"), BLOCK_TOKENS)
    return load_model(options, RankGroup())


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def give_back(driver: ModelDriver, sequence: DrivenSequence) -> None:
    """What the next token does not see is another's: here, what is not a number."""
    window = driver.model.window_tokens
    num_passed = max(0, sequence.num_computed + 1 - window) // BLOCK_TOKENS if window else 0
    for cache in driver.model.caches:
        cache[sequence.blocks[:num_passed]] = float("nan")


def logits_of(model: CausalModel, text: list[int], chunks: list[int], beside: list[list[int]]) -> torch.Tensor:
    """[tokens, vocab]: of all tokens of a text, given in such chunks, while others start and go on."""
    driver = ModelDriver(model, BLOCK_TOKENS)
    sequence, others = driver.sequence(text), [driver.sequence(other) for other in beside]
    found = []
    for count in chunks:
        advances = [(other, 3) for other in others if other.num_computed + 3 <= len(other.token_ids)]
        num_before = sum(count for _, count in advances)
        logits = driver.step([*advances, (sequence, count)], every_row=True)
        assert logits is not None
        found.append(logits[num_before:])
        for each in (sequence, *others):
            give_back(driver, each)
    return torch.cat(found)


def test_logits_are_the_same_bits_however_a_prompt_is_cut_and_beside_anything(model: CausalModel) -> None:
    assert model.attention_name == "native"
    text, *beside = prompts(7, [LENGTH, 140, 90], 131)
    whole = logits_of(model, text, [LENGTH], [])
    assert whole.isfinite().all()
    for chunks in ([170, 160], [33] * 10, [1] * 30 + [230] + [1] * 70):
        for others in ([], beside):
            assert torch.equal(logits_of(model, text, chunks, others), whole), chunks
