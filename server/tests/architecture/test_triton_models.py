"""Models that run on the Triton kernels, in Triton's interpreter or on a GPU, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from model_driver import ModelDriver
from penstock_server.device.triton import device as triton_device
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tested_device import DEVICE, triton_skip_reason
from tiny_model import make_model, save_model
from tiny_models import prompts

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton.ops import TritonOps

# Each norm, activation and rotation that the kernels fuse.
NAMES = [
    *("llama", "llama-gelu", "qwen3", "gemma3", "cohere-qk-norm", "persimmon", "hunyuan", "apertus", "glm4"),
    *("olmo", "olmo2", "mpt", "llama4"),
]


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_device, "unavailable_reason", lambda device: None)
    monkeypatch.setattr("penstock_server.device.choose_ops", lambda device, dtype, *_, **__: TritonOps(device, dtype))
    reference = make_model(name, CASES[name])
    options = LoadOptions(save_model(reference, tmp_path), torch.float32, DEVICE, 4, attention="triton")
    driver = ModelDriver(load_model(options, RankGroup(), exact=False))
    assert driver.model.traits.attention_name == "triton"
    (text,) = prompts(1, [9], VOCAB)
    expected = reference(torch.tensor([text]), use_cache=False).logits[0]
    sequence = driver.sequence(text)
    found = [driver.step([(sequence, num)], every_row=True) for num in (5, 3, 1)]
    torch.testing.assert_close(torch.cat([each for each in found if each is not None]), expected, atol=2e-4, rtol=2e-4)
