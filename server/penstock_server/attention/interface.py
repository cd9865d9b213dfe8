"""The attention interface: varlen queries over paged keys and values. One implementation is chosen at load.

An implementation owns the layout of its cache; nobody else looks inside a cache tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tensors, on the model's device. The tokens of all sequences stand one behind the other."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: block id * block_tokens + offset, where the token's key and value go
    query_starts: Tensor  # [sequences + 1] int32: where each sequence's tokens begin in the batch
    context_lens: Tensor  # [sequences] int32: tokens of the sequence up to and including this step's
    block_tables: Tensor  # [sequences, max blocks] int32, padded with 0
    sample_rows: Tensor  # [samples] int64: rows of the batch whose outputs are wanted, ascending
    max_query_tokens: int  # the most tokens one sequence advances
    max_context_tokens: int  # the longest context


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention of one model is made of, on one rank."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int  # on this rank; num_heads is a multiple of it
    head_dim: int
    scale: float  # applied to q·k
    block_tokens: int


class Attention(Protocol):
    """Causal attention of a batch's new tokens over their sequences' paged context. Stateless."""

    name: str

    def allocate(self, num_blocks: int, num_layers: int) -> list[Tensor]:
        """One cache tensor for each layer (its layout is private), zeroed; who asked for it touches its pages."""
        ...

    def bytes_per_block(self) -> int:
        """Bytes that one block of one layer takes."""
        ...

    def write(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [tokens, num_kv_heads, head_dim] (already rotated) at their slots."""
        ...

    def attend(self, queries: Tensor, cache: Tensor, batch: StepBatch) -> Tensor:
        """[tokens, num_heads, head_dim] → the same shape. Each query sees its context up to its own position."""
        ...

    def copy_blocks(self, caches: list[Tensor], pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer."""
        ...
