"""Samples in one call what the engine's steps sample in three."""

from __future__ import annotations

import torch
from penstock_server.engine.sampler import History, Sampled, Sampler
from penstock_server.engine.sampling import Composition
from penstock_server.engine.transfer import Download, Upload
from torch import Tensor


def sample_at_once(
    sampler: Sampler,
    logits: Tensor,
    composition: Composition,
    history: History,
    words: Tensor | None = None,
) -> Sampled:
    """A token for each row of logits [rows, vocab], on a CPU. words [constrained rows, words]: the rows' masks."""
    cpu = torch.device("cpu")
    put, fetch = Upload(cpu).add, Download(cpu).add
    prepared = sampler.prepare(composition, history, put)
    return sampler.sample(logits, prepared, sampler.read_context(prepared, words, put), fetch)
