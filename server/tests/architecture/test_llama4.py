"""Options of Llama 4 that published models have and the case of `test_parity` has not, and those that are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB, Case
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import read_spec
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_model
from tiny_models import prompts

OPTIONS = Case(
    "Llama4TextConfig",
    {
        "num_local_experts": 5,
        "intermediate_size_mlp": 112,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [0, 1, 0],
        "attn_temperature_tuning": False,
        "use_qk_norm": False,
        "attention_bias": True,
    },
)


@pytest.mark.native
@torch.inference_mode()
def test_options_give_the_logits_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = make_model("llama4-options", OPTIONS)
    options = LoadOptions(save_model(reference, tmp_path), torch.float32, torch.device("cpu"), 16)
    with caplog.at_level(logging.DEBUG):
        driver = ModelDriver(load_model(options, RankGroup()), block_tokens=16)
    assert "layers: one native call" in caplog.messages
    (text,) = prompts(1, [30], VOCAB)
    sequence = driver.sequence(text)
    found = [driver.step([(sequence, num)], every_row=True) for num in (17, 12, 1)]
    expected = reference(torch.tensor([text]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must have 3 numbers, not 2"),
        ({"moe_layers": "all"}, "moe_layers must be a list of integers, not 'all'"),
        ({"interleave_moe_layer_step": 0}, "must be at least 1"),
        ({"floor_scale": 0}, "floor_scale, .* must be at least 1, not 0"),
        ({"layer_types": ["sliding_attention"] * 3}, "layers of type sliding_attention are not supported"),
        ({"num_experts_per_tok": 5}, "a token cannot go to 5 of 4 experts"),
    ],
)
def test_what_cannot_be_built_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    case = CASES["llama4"]
    config = {**case.sizes, **case.values, **values, "model_type": "llama4_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)
