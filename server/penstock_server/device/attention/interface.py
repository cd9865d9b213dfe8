"""The attention interface: queries of sequences of any length over paged keys and values.

INVARIANT: an implementation owns the layout of its caches. No other code looks inside a cache tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from penstock_server.device.attention.fp8 import KvScales


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The LoRA adapters of a step's tokens, or of the rows of a layer's input."""

    loaded: Sequence[Any]  # the adapters, packed by `AdapterSites`
    of_tokens: Tensor  # [tokens] int64: the index of each token's adapter among the loaded ones, or -1
    tables: Tensor | None = None  # on a GPU, [at least the loaded ones] int64: the addresses of their tables

    def select(self, rows: Tensor) -> StepAdapters:
        """The adapters of `rows` [rows] int64, which index the step's rows."""
        return replace(self, of_tokens=self.of_tokens[rows])


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tensors, on the model's device. The new tokens of all sequences are concatenated."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    # [tokens] int64: block id * block_tokens + offset, where the token's key and value are stored. In a recorded graph,
    # -1: the token is padding and is not stored.
    slots: Tensor
    query_starts: Tensor  # [sequences + 1] int32: each sequence's first row; the last entry is the number of tokens
    context_lens: Tensor  # [sequences] int32: length of the sequence including this step's tokens
    block_tables: Tensor  # [sequences, max blocks] int32, padded with 0
    sample_rows: Tensor  # [samples] int64: rows of the batch whose outputs are wanted, ascending
    max_query_tokens: int  # the most new tokens of one sequence
    max_context_tokens: int  # the longest context
    # For models with an encoder. [sequences] int32: the length of the source (encoder input), the first tokens of the
    # sequence, which are not among the tokens of this batch. Positions, but not contexts, count from behind it.
    source_lens: Tensor | None = None
    # The step's source tokens: their positions count from the start of the source, and their contexts are the source.
    # No row is sampled. None: the step has none.
    sources: StepBatch | None = None
    adapters: StepAdapters | None = None  # None: no token has one
    token_types: Tensor | None = (
        None  # [tokens] int64: 1 for those of a second text, otherwise 0; None: the model has no types
    )
    # Image tokens. None: the step has none.
    image_places: Tensor | None = None  # [image tokens] int64: rows of the batch
    # [image tokens, hidden]: instead of those of the tokens. Wider: each further `hidden` is added after a layer.
    image_embeddings: Tensor | None = None
    image_positions: Tensor | None = None  # [image tokens, 3] int64: in time, row and column; None: as of text
    # [tokens] int32, for masks with `sees_spans`: each token attends to positions before this end. It is greater than
    # the token's position, at most the length of its context, and ascends within a sequence. None: no later tokens.
    ends: Tensor | None = None
    seen: CrossAttentionImages | None = None  # for models that attend to images; None: no token sees an image
    # For models that keep a state between tokens: [sequences] int64, each sequence's slot, which no other one has. A
    # sequence whose tokens start at position 0 must not read what its slot holds. -1: padding. None: the model keeps no
    # state.
    state_slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """An image whose keys and values a step writes."""

    states: Tensor  # [states, hidden]
    # By the place of each layer that attends to images, [states, 2 * kv heads, head_dim]. None: the step computes them.
    kv: Mapping[int, Tensor] | None


@dataclass(frozen=True, slots=True)
class CrossAttentionImages:
    """The states of images that tokens of a step attend to, whose keys and values are in a pool of their own."""

    rows: Tensor  # [rows] int64: the step's tokens that see images
    # Batch of these rows: adjacent rows that see the same states form one sequence with these states as its source.
    batch: StepBatch
    written: Sequence[WrittenImage]  # before any row attends
    slots: Tensor  # [states] int64 in the pool of images, of all states in `written`


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The interval of positions that a query attends to. It ends at the query, except in a source, which is attended to
    as a whole or on both sides of the query."""

    # Sliding window: the last `window` positions, including the query's own (Mistral); in a source also the next ones.
    window: int | None = None
    chunk: int | None = None  # positions of the query's own chunk of `chunk` tokens (Llama 4)
    # Encoder-decoder models: "source" is the whole source, from any position; "answer" is what follows the source.
    part: Literal["context", "source", "answer"] = "context"
    sees_spans: bool = False  # the interval ends where `StepBatch.ends` says (Gemma 3)

    def interval(self, positions: Tensor, source_len: int) -> tuple[Tensor, Tensor]:
        """First position and end (exclusive) for queries at `positions`, of a sequence with a source of this length.
        Both are non-decreasing if positions ascend."""
        if self.part == "source":
            if self.window is not None:
                return (positions - self.window + 1).clamp(min=0), (positions + self.window).clamp(max=source_len)
            return positions.new_zeros(positions.shape), positions.new_full(positions.shape, source_len)
        first = positions.new_full(positions.shape, source_len if self.part == "answer" else 0)
        if self.window is not None:
            first = first.maximum(positions - self.window + 1)
        if self.chunk is not None:
            first = first.maximum(positions - positions % self.chunk)
        return first, positions + 1

    @property
    def max_span(self) -> int | None:
        """Upper bound on the positions that one query attends to, counted back from its own; None: unbounded."""
        if self.part == "source":
            return None
        return min((bound for bound in (self.window, self.chunk) if bound is not None), default=None)


@dataclass(frozen=True, slots=True)
class Alibi:
    """A bias on scores: the head's slope times the key's position (https://arxiv.org/abs/2108.12409)."""

    slopes: tuple[float, ...]  # one per query head
    is_scaled: bool = False  # added before scores are scaled, so it is scaled as well (Falcon)
    is_bfloat16: bool = False  # slope, position and product are rounded to bfloat16 (Falcon)

    def for_heads(self, heads: range) -> Alibi:
        return replace(self, slopes=self.slopes[heads.start : heads.stop])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and variant of one layer's attention on one rank. Layers of one shape share an implementation."""

    num_heads: int  # query heads on this rank
    num_kv_heads: int  # on this rank; divides num_heads
    head_dim: int  # dimension of queries and keys
    scale: float  # factor of q·k
    block_tokens: int
    value_dim: int | None = None  # dimension of a value head; None: head_dim
    values_in_keys: bool = False  # a value is the first value_dim elements of its key, and is not stored separately
    mask: AttentionMask = AttentionMask()
    soft_cap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    alibi: Alibi | None = None
    has_relative_bias: bool = False  # scores have a learned bias by distance, an argument of `attend` (T5)
    has_sinks: bool = False  # heads have sinks, an argument of `attend` (gpt-oss)

    def __str__(self) -> str:
        """What tells the shapes of one model apart, for people."""
        features = [f"{self.num_heads} heads of {self.head_dim} with {self.num_kv_heads} KV heads"]
        if self.mask.window is not None:
            features.append(f"a window of {self.mask.window}")
        if self.mask.chunk is not None:
            features.append(f"chunks of {self.mask.chunk}")
        if self.mask.part != "context":
            features.append(f"over the {self.mask.part}")
        if self.mask.sees_spans:
            features.append("over whole images")
        return ", ".join(features)

    @property
    def output_dim(self) -> int:
        """Elements per head of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of a layer's queries and keys. Weights are [heads, head_dim], or [head_dim] for all heads, or None; biases
    the same."""

    query_weight: Tensor | None
    query_bias: Tensor | None
    key_weight: Tensor | None
    key_bias: Tensor | None
    eps: float
    is_layer: bool  # LayerNorm, not RMSNorm
    is_wide: bool  # an RMSNorm that is rounded once, at the end
    is_whole: bool = False  # over all heads of a token together, not over each head
    follows_rotation: bool = False

    @property
    def weight_stride(self) -> int:
        """Between the weights of two heads."""
        weight = self.query_weight
        return 0 if weight is None or weight.dim() == 1 else weight.shape[-1]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of a layer's queries and keys."""

    cos: Tensor  # [max positions, rotary_dim / 2] float32
    sin: Tensor  # the same
    positions: Tensor  # [tokens] int64
    is_interleaved: bool  # a pair is elements 2i and 2i + 1, not i and i + rotary_dim / 2


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a layer's queries in place, and to its keys and values as they are stored, in this order. What
    another step follows is rounded to their dtype."""

    queries: Tensor  # [tokens, num_heads, head_dim]
    clip: float | None = None  # queries, keys and values are clamped to ± this, a number of their dtype
    norms: HeadNorms | None = None  # norms of queries and keys; `follows_rotation`: applied last
    rotation: Rotation | None = None  # rotation of queries and keys


@dataclass(frozen=True, slots=True)
class Latents:
    """What the down projection of latent attention gives for a step's tokens, and how it becomes keys: the latent is
    normed (RMSNorm), and the rotary part, whose pairs are in halves, is rotated."""

    x: Tensor  # [tokens, query latent + value_dim + rotary elements]; features are contiguous
    query_weight: Tensor | None  # [query latent] of its norm; None: queries have no latent
    weight: Tensor  # [value_dim]
    eps: float  # epsilon of both norms
    cos: Tensor  # [max positions, rotary elements / 2] float32
    sin: Tensor  # the same
    positions: Tensor  # [tokens] int64


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Queries of latent attention in two parts, the second of which is not rotated yet."""

    absorbed: Tensor  # [tokens, num_heads, value_dim]
    rotary: Tensor  # [tokens, num_heads, head_dim - value_dim]
    cos: Tensor  # see `Latents`
    sin: Tensor


class LatentKernels(Protocol):
    """Latent attention in fewer launches than by `write_kv` and `attend`."""

    def write_latents(
        self, cache: Tensor, latents: Latents, slots: Tensor, scales: KvScales | None = None
    ) -> Tensor | None:
        """Stores keys at their slots [tokens] int64. Returns the normed latents of queries [tokens, query latent], if
        they have any."""
        ...

    def attend_latents(
        self, queries: LatentQueries, cache: Tensor, metadata: Any, scales: KvScales | None = None
    ) -> Tensor:
        """`Attention.attend`. Queries are rotated by their positions in the sequences."""
        ...


class Attention(Protocol):
    """Attention of one shape: a batch's new tokens over their sequences' paged context. It keeps no state."""

    @property
    def name(self) -> str:
        """The implementation's name. Attentions with one name share the metadata of a step."""
        ...

    @property
    def preferred_block_tokens(self) -> int:
        """The block size that the implementation computes fastest with."""
        ...

    @property
    def transforms(self) -> bool:
        """Whether `write_kv` accepts a transform."""
        ...

    @property
    def latent(self) -> LatentKernels | None:
        """None: there are none for this shape."""
        ...

    @property
    def shape(self) -> AttentionShape: ...

    def allocate(self, num_blocks: int) -> Tensor:
        """The zeroed cache of one layer. The memory pages behind it may not have been touched yet."""
        ...

    def bytes_per_block(self) -> int:
        """Cache bytes of one block of one layer."""
        ...

    def prepare(self, batch: StepBatch) -> Any:
        """The metadata that `attend` needs for this batch. It is built once per step, for layers of every shape; what
        depends on a layer's mask is computed for its first layer and kept for the others."""
        ...

    def write_kv(
        self,
        cache: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        transform: Transform | None = None,
        scales: KvScales | None = None,
    ) -> None:
        """Stores keys [tokens, num_kv_heads, head_dim] and values [tokens, num_kv_heads, value_dim] at their slots
        [tokens] int64. With `values_in_keys`, `values` is ignored.

        transform: None: keys and values are as they should be stored.
        scales: of the layer, if the cache is in fp8; None: 1."""
        ...

    def attend(
        self,
        queries: Tensor,
        cache: Tensor,
        metadata: Any,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        scales: KvScales | None = None,
    ) -> Tensor:
        """[tokens, num_heads, head_dim] → [tokens, num_heads, value_dim], over the positions that the mask selects.

        metadata: what `prepare` returned for the batch of these queries.
        sinks [num_heads]: a score per head that takes part in the softmax and has no value (gpt-oss).
        bias [num_heads, 2 * n + 1] float32, if the shape has one: added to the score of a key by its distance ahead of
        the query, from -n to n; larger distances are clamped.
        scales: those that the layer's keys and values were written with.
        """
        ...


def window_tokens(attentions: Iterable[Attention]) -> int:
    """How many of the last positions any of these layers attends to; 0: at least one layer has no bound."""
    spans = [attention.shape.mask.max_span for attention in attentions]
    return 0 if None in spans else max((span for span in spans if span is not None), default=0)
