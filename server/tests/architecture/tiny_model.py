"""Makes a case's model with transformers, in float32, and saves it as transformers does."""

from __future__ import annotations

import copy
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from cases import CASES, NEVER, Case


def make_model(name: str, case: Case) -> transformers.PreTrainedModel:
    """All tensors are random, norms too, and keep the scale of activations, so that an omitted part changes the result.

    The attention implementation is transformers' default, because its eager Falcon adds ALiBi twice.
    """
    if case.config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {case.config}")
    config = case.config_class(**copy.deepcopy({**NEVER, **case.sizes, **case.values}))
    torch.manual_seed(zlib.crc32(name.encode()))
    if case.published is not None:
        model = case.published.reference._from_config(config, dtype=torch.float32)
    elif case.has_encoder:
        model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if case.has_own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("final_logits_bias", "expert_bias", "e_score_correction_bias")):
                buffer.uniform_(-0.4, 0.4)
        for name, parameter in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                parameter.uniform_(-0.4, 0.4)
            if not parameter.requires_grad:
                continue  # a computed table
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
            else:
                parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
            if name.endswith("Attention.q.weight"):
                parameter.mul_(config.d_kv**-0.5)  # T5 does not scale scores; its queries are small instead
    return model.eval()


def save_model(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def save_case(name: str, folder: Path) -> Path:
    """The folder of a case's checkpoint, in the published layout where transformers' own differs."""
    case = CASES[name]
    reference = make_model(name, case)
    save_model(reference, folder)
    return folder if case.published is None else case.published.save(reference, folder / "published")
