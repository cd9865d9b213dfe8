"""Logprobs of prompt tokens. The model's head runs on a few rows at a time: vocabulary × prompt never has to fit into
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.device.attention.interface import StepAdapters
from penstock_server.engine.batch import PromptRows
from penstock_server.engine.logprob import Alternatives, tops_of
from penstock_server.engine.parameter import Asking, asking, slices
from penstock_server.engine.sampler import Sampler
from penstock_server.engine.transfer import Fetch, Fetched, Put
from penstock_server.models.interface import CausalModel
from penstock_server.protocol.plan import Tokens

# Rows for which the head's weight is read once, and whose logits are in memory together.
CHUNK_ROWS = {"cpu": 64, "cuda": 256}


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """A step's prompt tokens with their logprobs."""

    ids: npt.NDArray[np.int64]  # [prompt tokens]
    places: npt.NDArray[np.int64]  # [sequences] the selected advance of each sequence that has prompt tokens here
    starts: npt.NDArray[np.int64]  # [sequences] its first prompt token
    logprobs: Fetched  # [prompt tokens]
    num_broken: Tensor  # [sequences] int64: rows with logits that are not finite
    alternatives: Sequence[Alternatives]  # for the prompt tokens whose requests asked for them

    def tokens(self, sequence_ids: npt.NDArray[np.uint64]) -> dict[int, Tokens]:
        """By sequence id; sequence_ids [selected] are those of the advances."""
        logprobs, all_tops, tokens = self.logprobs.wait(), tops_of(self.alternatives), {}
        ends = [*self.starts[1:].tolist(), len(self.ids)]
        for place, start, end in zip(self.places.tolist(), self.starts.tolist(), ends, strict=True):
            tops = {index - start: all_tops[index] for index in range(start, end) if index in all_tops}
            tokens[int(sequence_ids[place])] = Tokens(self.ids[start:end], logprobs[start:end], tops)
        return tokens


@dataclass(frozen=True, slots=True, eq=False)
class PromptInputs:
    """The prompt tokens of a step that get logprobs, and what computing them needs on the device."""

    ids: npt.NDArray[np.int64]  # ids, places and starts: see `PromptScores`
    places: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    owners: Tensor  # [prompt tokens] index into `places`
    chunks: Sequence[tuple[Tensor, Tensor, Sequence[Asking]]]  # rows of the outputs, ids, and who wants alternatives


def prepare_prompt(prompt: PromptRows, top_n: npt.NDArray[np.int64], sampler: Sampler, put: Put) -> PromptInputs:
    """top_n [prompt tokens]: the number of alternatives of each."""
    places, starts, owners = np.unique(prompt.places, return_index=True, return_inverse=True)
    chunks = [
        (put(prompt.outputs[part]), put(prompt.ids[part]), list(asking(top_n[part], sampler.chunk_rows, put)))
        for part in slices(len(prompt.ids), CHUNK_ROWS[sampler.device.type])
    ]
    return PromptInputs(prompt.ids, places, starts, put(owners), chunks)


def score_prompt(
    model: CausalModel,
    sampler: Sampler,
    hidden: Tensor,
    adapters: StepAdapters | None,
    prompt: PromptInputs,
    fetch: Fetch,
) -> PromptScores:
    """Scores from the model's outputs [outputs, hidden], whose adapters these are. All ranks must call it."""
    found: list[Tensor] = []
    alternatives: list[Alternatives] = []
    start = 0
    for rows, ids, asking_rows in prompt.chunks:
        logits = model.logits(hidden[rows], adapters and adapters.select(rows))
        scored, best = sampler.score(logits, ids, asking_rows, fetch)
        found.append(scored)
        alternatives.extend(each.renumbered(start + each.rows) for each in best)
        start += len(ids)
    logprobs = torch.cat(found)
    num_broken = torch.zeros(len(prompt.places), dtype=torch.int64, device=logprobs.device)
    num_broken.index_add_(0, prompt.owners, logprobs.isnan().long())
    return PromptScores(prompt.ids, prompt.places, prompt.starts, fetch(logprobs), num_broken, alternatives)
