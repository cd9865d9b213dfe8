"""One model over several ranks, each a process: the same logits and tokens as on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from native_builds import BUILD
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from rank_pool import RankPool
from rank_program import run
from tiny_models import make_model, prompts, save_model


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("variant", "size", "exact"),
    [("llama-nine-heads", 2, True), ("llama-biases", 3, True), ("llama-biases", 2, False), ("llama-mqa", 2, False)],
)
def test_ranks_agree_with_one(variant: str, size: int, exact: bool, pool: RankPool, tmp_path: Path) -> None:
    folder = save_model(make_model(variant), tmp_path)
    texts = prompts(11, [19, 33, 1], 131)
    one = run(folder, "float32", RankGroup(), texts, 16)
    several = pool.run(folder, size, exact=exact, dtype="float32", texts=texts, num_tokens=16)
    torch.testing.assert_close(several["logits"], one["logits"], atol=1e-4, rtol=1e-4)
    assert several["tokens"] == one["tokens"]
    # Split, not copied: what every rank holds is norms, and one KV head where there are fewer than ranks.
    assert several["smallest"] < one["weight_bytes"] / size * 1.1


@pytest.mark.parametrize(
    "tolerance",
    [
        pytest.param(0.0, marks=pytest.mark.native),
        # torch's matrix products may sum in another order.
        pytest.param(0.5, marks=pytest.mark.skipif(BUILD is not None, reason="native operators pass the exact test")),
    ],
)
def test_the_embedded_model_gives_the_same_logits_on_two_ranks(
    tolerance: float, pool: RankPool, embedded_folder: Path
) -> None:
    texts = prompts(12, [40, 7], 49152)
    one = run(embedded_folder, "bfloat16", RankGroup(), texts, 24)
    two = pool.run(embedded_folder, 2, dtype="bfloat16", texts=texts, num_tokens=24)
    assert two["logits"].dtype == torch.bfloat16
    torch.testing.assert_close(two["logits"], one["logits"], atol=tolerance, rtol=0)
    if tolerance == 0.0:
        assert two["tokens"] == one["tokens"]
        assert two["is_one_call"]


@pytest.mark.parametrize("rank", [0, 6])
def test_too_many_ranks_are_refused_before_anything_is_read(rank: int, tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    options = LoadOptions(folder, torch.float32, torch.device("cpu"), 16)
    with pytest.raises(ConfigError, match="6 attention heads in 2 groups cannot be split over 7 ranks; at most 6"):
        load_model(options, RankGroup(rank, 7))
