"""Logprobs of prompt tokens, through the model's head by few rows at a time: never vocabulary × prompt in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine.batch import PromptRows
from penstock_server.engine.logprob import NO_TOP
from penstock_server.engine.sampler import Sampler
from penstock_server.models.interface import CausalModel
from penstock_server.plan import Token

# The head's weight is read once for so many rows; their logits are in memory together.
CHUNK_ROWS = {"cpu": 64, "cuda": 256}


def score_prompt(
    model: CausalModel, sampler: Sampler, hidden: Tensor, prompt: PromptRows, top_n: npt.NDArray[np.int64]
) -> list[Token]:
    """The prompt tokens in the order of `prompt`, with top_n [prompt tokens] alternatives, from the model's outputs
    [outputs, hidden]. Empty on every rank but the first."""
    tokens: list[Token] = []
    step = CHUNK_ROWS[hidden.device.type]
    for start in range(0, len(prompt.ids), step):
        part = slice(start, start + step)
        rows = torch.from_numpy(prompt.outputs[part]).to(hidden.device)
        logits = model.logits(hidden[rows])
        if logits is None:
            continue
        ids = prompt.ids[part]
        logprobs, tops = sampler.score(logits, torch.from_numpy(ids).to(hidden.device), top_n[part])
        listed = enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True))
        tokens += [Token(token_id, logprob, tops.get(place, NO_TOP)) for place, (token_id, logprob) in listed]
    return tokens
