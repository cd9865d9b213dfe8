"""What a step's layers are told: attention metadata is built once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from model_driver import ModelDriver
from penstock_server.device.attention.interface import StepBatch
from penstock_server.device.reference.attention import ReferenceAttention, ReferenceMetadata
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts

CPU = torch.device("cpu")


def driver_of(name: str, folder: Path) -> ModelDriver:
    save_model(make_model(name, CASES[name]), folder)
    return ModelDriver(load_model(LoadOptions(folder, torch.float32, CPU, 4), RankGroup()))


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
