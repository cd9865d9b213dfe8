"""What the engine needs of a model: load it, allocate its cache, run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock_server.device import ACTIVATION_BITS
from penstock_server.device.attention.interface import StepAdapters, StepBatch
from penstock_server.models.adapter import Adapters
from penstock_server.models.pooler import Pooler
from penstock_server.vision.encoder import ImageEncoder


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a prepared model folder on one rank."""

    folder: Path
    dtype: torch.dtype
    device: torch.device
    block_tokens: int
    trust_remote_code: bool = False
    attention: str = ""  # the implementation; empty: the fastest for each layer
    cpu_isa: str = ""  # instruction set of native kernels, see `find_build`
    dequantize: bool = False  # quantized weights at load
    activation_bits: int = ACTIVATION_BITS  # bits of the inputs of weights that stay quantized: 8 or 16
    quantize: str = ""  # the method of the checkpoint, or one that quantizes at load; empty: the checkpoint's
    deterministic: bool = False  # a row's bits must not depend on its batch
    max_adapters: int = 0  # loaded at a time; 0: the model is loaded without them
    max_adapter_rank: int = 0
    kv_dtype: torch.dtype | None = None  # an fp8 dtype of stored keys and values; None: dtype
    drafts_with_mtp: bool = False  # the checkpoint's multi-token prediction layer is loaded, if it has one


class States(Protocol):
    """The states that the layers of a model keep between tokens, on one rank. A sequence has a slot with all of them,
    see `StepBatch.state_slots`. A snapshot is a copy of what a sequence needs of them at a position, a multiple of
    `chunk_tokens`, to continue there."""

    chunk_tokens: int
    # A slot can save the state at a position until more than this many tokens behind it have been computed, those of
    # wrong drafts too. At least chunk_tokens; a ring of 2 * chunk_tokens rows allows 2 * chunk_tokens - (width of a
    # convolution - 1).
    reach_tokens: int
    bytes_per_slot: int
    bytes_per_snapshot: int

    @property
    def tensors(self) -> list[Tensor]:
        """Slots and snapshots. Their memory pages may not have been touched."""
        ...

    def allocate(self, num_slots: int, num_snapshots: int) -> None:
        """Allocates slots and snapshots, and replaces earlier ones. Called before `CausalModel.allocate_cache`."""
        ...

    def save(self, slot: int, position: int, snapshot: int) -> None:
        """Copies the state at `position` from a slot to a snapshot. The slot's sequence has computed the tokens before
        the position, and at most `reach_tokens` behind it."""
        ...

    def restore(self, snapshot: int, slot: int, position: int) -> None:
        """Copies a snapshot of `position` to a slot, whose sequence's next token has this position."""
        ...


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is known of a loaded model."""

    architecture: str
    attention_name: str
    vocab_size: int
    num_layers: int
    hidden_size: int  # size of an output
    default_position_tokens: int  # longest sequence that is served unless longer ones are asked for
    max_source_tokens: int  # 0: no part of a sequence is read by an encoder
    decoder_prefix: tuple[int, ...]  # token ids between every source and its answer
    window_tokens: int  # no layer attends to more of the last tokens; 0: at least one layer attends to all
    # Whether `forward` of a decode step only enqueues device work, so that it can be recorded as a graph.
    is_recordable: bool
    # Whether a row has the same bits in every batch, and however a sequence is cut into chunks. False: unknown.
    is_row_independent: bool

    @property
    def is_encoder(self) -> bool:
        """Whether all of a sequence is read at once."""
        return self.max_source_tokens > 0 and not self.decoder_prefix


class CausalModel(Protocol):
    """A decoder on one rank, with or without an encoder, or an encoder alone. `load_model(options, group)` in
    `penstock_server.models` makes one."""

    traits: ModelTraits
    adapters: Adapters | None  # None: sequences have none
    images: ImageEncoder | None  # None: it reads none
    # The KV pool, and the slots of states: a tensor for each part of a layer that has either.
    # Their memory pages may not have been touched.
    caches: list[Tensor]
    states: States | None  # None: it keeps no state between tokens

    @property
    def pooler(self) -> Pooler | None:
        """None: the model generates tokens. With it there are no `logits`."""
        ...

    @property
    def max_position_tokens(self) -> int:
        """The longest sequence; with an encoder, source and answer together."""
        ...

    @property
    def weight_bytes(self) -> int:
        """On this rank."""
        ...

    @property
    def kv_bytes_per_block(self) -> int:
        """On this rank, of all layers."""
        ...

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocates the paged KV pool and replaces an earlier one."""
        ...

    def sample(self) -> CausalModel:
        """A model with one layer of each kind and the same caches, to measure steps: they need as much temporary memory
        as those of the whole model. It may be the model itself."""
        ...

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        """Promises that no sequence will be longer. Called before the steps that measure memory, with what the limits
        allow, and before the first step whose results are used, with what fits in the pool."""
        ...

    def forward(self, batch: StepBatch) -> Tensor:
        """One step. Returns the outputs [samples, hidden] of the rows `batch.sample_rows` in the model's dtype, as
        input for `logits` or `pooler`. Source tokens in front of a decoder have no outputs and must not be among these
        rows. A pipeline stage waits for the residual of the stage before, and sends its own of all tokens to the next
        one; what it returns has no use before the last stage."""
        ...

    def logits(self, outputs: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Outputs [rows, hidden] → logits [rows, vocab] in the model's dtype, the same on all ranks. All ranks must
        call it together with the same rows; the caller bounds the memory by the number of rows. adapters: of the rows;
        None: no row has one."""
        ...

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """The rows [tokens, hidden] of the output matrix, in the model's dtype, the same on all ranks, which call it
        together. Called only if drafts are verified. Those of a quantized matrix may be rounded."""
        ...
