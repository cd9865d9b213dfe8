"""The attention interface: varlen queries over paged keys and values. One implementation is chosen at load.

An implementation owns the layout of its cache; nobody else looks inside a cache tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

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
    # [sequences] int32: how many of the tokens are the source's, at the beginning. None: the model has no encoder.
    source_lens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """What a query sees of its sequence's context: one interval of positions. It ends with the query's own, but for
    sources, which are seen whole."""

    window: int | None = None  # the last so many positions, its own included (Mistral)
    chunk: int | None = None  # those of its own chunk of so many (Llama 4)
    # Encoder and decoder: the source from anywhere, or what stands behind the source.
    part: Literal["context", "source", "answer"] = "context"

    def interval(self, positions: Tensor, source_len: int) -> tuple[Tensor, Tensor]:
        """Where the interval begins and where it stops, for queries at these positions of a sequence with such a
        source; neither ever descends from one query to the next."""
        if self.part == "source":
            return positions.new_zeros(positions.shape), positions.new_full(positions.shape, source_len)
        first = positions.new_full(positions.shape, source_len if self.part == "answer" else 0)
        if self.window is not None:
            first = first.maximum(positions - self.window + 1)
        if self.chunk is not None:
            first = first.maximum(positions - positions % self.chunk)
        return first, positions + 1

    @property
    def width(self) -> int | None:
        """The most positions that a query sees, from its own back; None: there is no such bound."""
        return min((bound for bound in (self.window, self.chunk) if bound is not None), default=None)


@dataclass(frozen=True, slots=True)
class Alibi:
    """A bias on scores: a head's slope times the key's position (https://arxiv.org/abs/2108.12409)."""

    slopes: tuple[float, ...]  # of this rank's heads
    is_scaled: bool = False  # added before scores are scaled, so scaled with them (Falcon)
    is_bfloat16: bool = False  # slope, position and product are rounded to bfloat16 (Falcon)

    def of(self, heads: range) -> Alibi:
        return replace(self, slopes=self.slopes[heads.start : heads.stop])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention of one layer is made of, on one rank. Layers of one shape share their implementation."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int  # on this rank; num_heads is a multiple of it
    head_dim: int  # of queries and keys
    scale: float  # applied to q·k
    block_tokens: int
    value_dim: int | None = None  # of values and results; None: head_dim
    values_in_keys: bool = False  # values are the first value_dim numbers of keys, and are not stored
    sight: Sight = Sight()
    soft_cap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    alibi: Alibi | None = None
    has_bias: bool = False  # scores have a learned bias by the key's distance, which `attend` is given (T5)

    @property
    def result_dim(self) -> int:
        """Of each head's result."""
        return self.head_dim if self.value_dim is None else self.value_dim


def window_tokens(attentions: Iterable[Attention]) -> int:
    """How many of the last positions layers with these attentions see at most; 0: some sees all."""
    widths = [attention.shape.sight.width for attention in attentions]
    return 0 if None in widths else max(width for width in widths if width is not None)


class Attention(Protocol):
    """Attention of a batch's new tokens over their sequences' paged context. Stateless."""

    name: str
    shape: AttentionShape

    def allocate(self, num_blocks: int, num_layers: int) -> list[Tensor]:
        """One cache tensor for each layer (its layout is private), zeroed; who asked for it touches its pages."""
        ...

    def bytes_per_block(self) -> int:
        """Bytes that one block of one layer takes."""
        ...

    def write(self, cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys [tokens, num_kv_heads, head_dim] (already rotated) and values [tokens, num_kv_heads, value_dim]
        at their slots. Where values are in the keys, they are not looked at."""
        ...

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        batch: StepBatch,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[tokens, num_heads, head_dim] → [tokens, num_heads, value_dim]. Each query sees what `Sight` says.

        sinks [num_heads]: a score that takes part in the softmax and has no value (gpt-oss).
        bias [num_heads, 2 * n + 1] float32, where the shape has one: added to the score of a key by how many positions
        it is ahead of its query, from -n to n; those farther away count as the farthest of these.
        """
        ...
