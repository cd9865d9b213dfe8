"""What a step's layers are told: the rows of their input, and attention metadata that is built once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from model_driver import ModelDriver
from penstock_server.attention.interface import StepBatch
from penstock_server.attention.reference import ReferenceAttention, ReferenceMetadata
from penstock_server.layers.linear import DenseLinear
from penstock_server.layers.step import StepContext
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts
from torch import Tensor

CPU = torch.device("cpu")


def driver_of(name: str, folder: Path) -> ModelDriver:
    save_model(make_model(name, CASES[name]), folder)
    return ModelDriver(load_model(LoadOptions(folder, torch.float32, CPU, 4), RankGroup()))


@pytest.mark.parametrize(
    "name", ["llama", "falcon-7b", "opt-350m", "mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v3", "t5"]
)
@torch.inference_mode()
def test_every_linear_layer_knows_the_rows_of_its_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences with different adapters in one batch compute what each computes alone. The adapter stands for any
    function of the row: here it scales the output of each linear layer, by the parity of the row's token."""
    apply, scales = DenseLinear.__call__, torch.tensor([1.0, 0.8])

    def apply_with_adapter(linear: DenseLinear, x: Tensor, step: StepContext | None) -> Tensor:
        if step is None:
            return apply(linear, x, step)
        token_ids = step.batch.token_ids if step.rows is None else step.batch.token_ids[step.rows]
        return apply(linear, x, step) * scales[token_ids % 2, None]

    driver = driver_of(name, tmp_path)

    def logits_of(*batch: list[int]) -> Tensor:
        steps = [(driver.sequence(text, CASES[name].num_source(text)), len(text)) for text in batch]
        return driver.step(steps)

    first, second = (
        [id - id % 2 + parity for id in text] for parity, text in enumerate(prompts(1, [15, 20], VOCAB - 1))
    )
    plain = logits_of(second)
    monkeypatch.setattr(DenseLinear, "__call__", apply_with_adapter)
    alone = torch.cat([logits_of(first), logits_of(second)])
    assert not torch.allclose(alone[1:], plain, atol=1e-2)
    torch.testing.assert_close(logits_of(first, second), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "num_masks"), [("llama", 1), ("gemma2", 2), ("t5", 2)])
@torch.inference_mode()
def test_a_step_prepares_its_attention_once_for_all_layers(
    name: str, num_masks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, prepared = ReferenceAttention.prepare, list[ReferenceMetadata]()

    def record(batch: StepBatch) -> ReferenceMetadata:
        prepared.append(prepare(batch))
        return prepared[-1]

    driver, text = driver_of(name, tmp_path), prompts(1, [20], VOCAB)[0]
    sequence = driver.sequence(text, CASES[name].num_source(text))
    driver.step([(sequence, 19)])
    monkeypatch.setattr(ReferenceAttention, "prepare", staticmethod(record))
    driver.step([(sequence, 1)])
    (metadata,) = prepared
    assert len(metadata.by_mask) == num_masks
