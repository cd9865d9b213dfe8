"""Logprobs of prompt tokens. The model's head runs on a few rows at a time: vocabulary × prompt never has to fit into
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.engine.batch import PromptRows
from penstock_server.engine.device import HostCopy, on_device
from penstock_server.engine.logprob import Alternatives, tops_of
from penstock_server.engine.sampler import Sampler
from penstock_server.models.interface import CausalModel
from penstock_server.plan import Tokens

# Rows for which the head's weight is read once, and whose logits are in memory together.
CHUNK_ROWS = {"cpu": 64, "cuda": 256}


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """A step's prompt tokens with their logprobs; on ranks other than the first, only what they are."""

    ids: npt.NDArray[np.int64]  # [prompt tokens]
    places: npt.NDArray[np.int64]  # [sequences] the selected advance of each sequence that has prompt tokens here
    starts: npt.NDArray[np.int64]  # [sequences] its first prompt token
    logprobs: HostCopy | None = None  # [prompt tokens]
    num_broken: Tensor | None = None  # [sequences] int64: rows with logits that are not finite
    alternatives: Sequence[Alternatives] = ()  # of the prompt tokens that asked for them

    def tokens(self, sequence_ids: npt.NDArray[np.uint64]) -> dict[int, Tokens]:
        """By sequence id; sequence_ids [selected] are those of the advances."""
        if self.logprobs is None:
            return {}
        logprobs, all_tops, tokens = self.logprobs.wait(), tops_of(self.alternatives), {}
        ends = [*self.starts[1:].tolist(), len(self.ids)]
        for place, start, end in zip(self.places.tolist(), self.starts.tolist(), ends, strict=True):
            tops = {index - start: all_tops[index] for index in range(start, end) if index in all_tops}
            tokens[int(sequence_ids[place])] = Tokens(self.ids[start:end], logprobs[start:end], tops)
        return tokens


def score_prompt(
    model: CausalModel, sampler: Sampler, hidden: Tensor, prompt: PromptRows, top_n: npt.NDArray[np.int64]
) -> PromptScores:
    """Scores of `prompt` with top_n [prompt tokens] alternatives, from the model's outputs [outputs, hidden]. All ranks
    must call it."""
    places, starts, owners = np.unique(prompt.places, return_index=True, return_inverse=True)
    chunks: list[Tensor] = []
    alternatives: list[Alternatives] = []
    step = CHUNK_ROWS[hidden.device.type]
    for start in range(0, len(prompt.ids), step):
        part = slice(start, start + step)
        rows = on_device(prompt.outputs[part], hidden.device)
        logits = model.logits(hidden[rows])
        if logits is None:
            continue
        ids = on_device(prompt.ids[part], hidden.device)
        scored, found = sampler.score(logits, ids, top_n[part])
        chunks.append(scored)
        alternatives.extend(each.renumbered(start + each.rows) for each in found)
    if not chunks:
        return PromptScores(prompt.ids, places, starts)
    logprobs = torch.cat(chunks)
    num_broken = torch.zeros(len(places), dtype=torch.int64, device=logprobs.device)
    num_broken.index_add_(0, on_device(owners, logprobs.device), logprobs.isnan().long())
    return PromptScores(prompt.ids, places, starts, HostCopy(logprobs), num_broken, alternatives)
