"""What the engine needs of a model: load it, give it a cache, run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock_server.attention.interface import StepBatch


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a prepared model folder on one rank."""

    folder: Path
    dtype: torch.dtype
    device: torch.device
    block_tokens: int
    trust_remote_code: bool = False
    deterministic: bool = False  # the same numbers on any number of ranks, also where it costs speed; on a CPU always


class CausalModel(Protocol):
    """A decoder on one rank, with an encoder before it or without. `load_model(options, group)` in
    `penstock_server.models` makes one."""

    architecture: str
    attention_name: str
    vocab_size: int
    num_layers: int
    max_position_tokens: int  # of a source and its answer together, where there is an encoder
    max_source_tokens: int  # 0: the model has no encoder
    decoder_prefix: tuple[int, ...]  # token ids behind every source, before the answer
    window_tokens: int  # how many of the last tokens any layer sees; 0: some layer sees all
    weight_bytes: int  # on this rank
    kv_bytes_per_block: int  # on this rank, all layers
    load_phases: list[tuple[str, float]]  # what loading did, in order, and the seconds it took
    caches: list[Tensor]  # the pool, one tensor a layer; its pages may not have been touched

    def allocate_cache(self, num_blocks: int) -> None:
        """Make the paged KV pool, replacing one made before."""
        ...

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        """No sequence will be longer. Called once, before the first step that counts."""
        ...

    def forward(self, batch: StepBatch) -> Tensor:
        """One step: the outputs [samples, hidden] of `batch.sample_rows`, in the model's dtype, for `logits`. Rows of
        sources have none, and may not be among them."""
        ...

    def logits(self, outputs: Tensor) -> Tensor | None:
        """Outputs [rows, hidden] → on rank 0 their logits [rows, vocab], in the model's dtype; else None. The ranks
        call it together, with the same rows; the memory is theirs to bound."""
        ...
