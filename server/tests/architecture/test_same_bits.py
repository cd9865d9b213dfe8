"""In bfloat16 on native kernels, a token's logits are the same to the bit however its prompt is cut into chunks,
whatever else is in the batch, and whatever blocks before its window contain: for every architecture, and for each kind
of attention over several tiles and segments of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB, Case
from model_driver import DrivenSequence, ModelDriver
from models_page import SAME_BITS
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts

pytestmark = pytest.mark.native

BLOCK_TOKENS = 16
LENGTH = 330  # two segments of the kernels, each with its own softmax
SHORT_LENGTH = 90  # two tiles of the kernels
DRAFT_CHUNKS = list(range(2, 10))  # a token and its draft
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LONG_CASES = {
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
    # Neither the head dimension nor the intermediate size is a multiple of the vector length.
    "gpt2": Case(
        "GPT2Config",
        {"n_embd": 100, "n_layer": 3, "n_head": 5, "n_inner": 1000, "n_positions": 512, "vocab_size": VOCAB},
        {},
    ),
    "deepseek-v3": Case("DeepseekV3Config", {**CASES["deepseek-v3"].values, "max_position_embeddings": 512}),
    "t5": Case("T5Config", {**CASES["t5"].values, "d_ff": 1000, "feed_forward_proj": "gated-gelu"}, CASES["t5"].sizes),
}


def load(name: str, case: Case, folder: Path) -> CausalModel:
    reference = make_model(name, case)
    save_model(reference, folder)
    if case.published is not None:
        folder = case.published.save(reference, folder / "published")
    return load_model(LoadOptions(folder, torch.bfloat16, torch.device("cpu"), BLOCK_TOKENS), RankGroup())


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def give_back(driver: ModelDriver, sequence: DrivenSequence) -> None:
    """Overwrites the blocks before the next token's window with NaN, as if they were released."""
    window = driver.model.traits.window_tokens
    num_passed = max(0, sequence.num_computed + 1 - window) // BLOCK_TOKENS if window else 0
    for cache in driver.model.caches:
        cache[sequence.blocks[:num_passed]] = float("nan")


def logits_of(
    model: CausalModel, text: list[int], num_source: int, chunks: list[int], beside: list[list[int]]
) -> torch.Tensor:
    """[tokens after the source, vocab] for a text in these chunks, while other texts start and continue."""
    driver = ModelDriver(model, BLOCK_TOKENS)
    sequence = driver.sequence(text, num_source)
    others = [driver.sequence(other, min(num_source, 3)) for other in beside]
    found = []
    for count in chunks:
        advances = [(other, 3) for other in others if other.num_computed + 3 <= len(other.token_ids)]
        num_before = sum(3 for other, _ in advances if other.num_computed >= other.num_source)
        logits = driver.step([*advances, (sequence, count)], every_row=True)
        if sequence.num_computed > num_source:
            found.append(logits[num_before:])
        for each in (sequence, *others):
            give_back(driver, each)
    return torch.cat(found)


def assert_same_bits(
    model: CausalModel, length: int, num_source: int, cuts: list[list[int]], drafts: list[int]
) -> None:
    """cuts: chunk sizes of the text after its source, which is never cut. drafts: a cut into chunks of the sizes of
    drafts, which runs without other sequences: their steps have the fewest rows."""
    assert model.traits.is_row_independent
    text, *beside = prompts(7, [length, 2 * length // 5, length // 4], VOCAB)
    company: list[list[list[int]]] = [[], beside]
    whole = logits_of(model, text, num_source, [length], [])
    assert whole.isfinite().all()
    for cut in (*cuts, drafts):
        first, *rest = cut
        for chunks in (cut,) if not num_source else ([num_source + first, *rest], [num_source, *cut]):
            for others in company[: 1 if cut is drafts else 2]:
                found = logits_of(model, text, num_source, chunks, others)
                assert torch.equal(found, whole), (chunks, bool(others), int((found != whole).any(-1).sum()))


@pytest.mark.parametrize("name", LONG_CASES)
def test_logits_do_not_depend_on_chunks_or_other_sequences(name: str, tmp_path: Path) -> None:
    model = load(name, LONG_CASES[name], tmp_path)
    num_source = 150 if model.traits.max_source_tokens else 0
    behind = LENGTH - num_source
    drafts = DRAFT_CHUNKS * 4  # from the first segment into the second one
    cuts = [[behind - 160, 160], [30] * (behind // 30), [1] * 30 + [behind - 100] + [1] * 70]
    assert_same_bits(model, LENGTH, num_source, cuts, [behind - sum(drafts), *drafts])


@pytest.mark.column(SAME_BITS)
@pytest.mark.parametrize("name", CASES)
def test_logits_of_every_architecture_do_not_depend_on_chunks_or_other_sequences(name: str, tmp_path: Path) -> None:
    model = load(name, CASES[name], tmp_path)
    num_source = 20 if model.traits.max_source_tokens else 0
    behind = SHORT_LENGTH - num_source
    cuts = [[40, behind - 40], [1] * 5 + [behind - 15] + [1] * 10]
    drafts = [10, *DRAFT_CHUNKS, behind - 10 - sum(DRAFT_CHUNKS)]
    assert_same_bits(model, SHORT_LENGTH, num_source, cuts, drafts)
