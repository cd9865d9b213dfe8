"""A step's plan and result as the worker's own types. proto/worker.proto specifies every field.

No torch and no protobuf here: `service` converts from and to the wire, `engine` executes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock_server.protocol.grammar import Grammar as Grammar
from penstock_server.protocol.grammar import ThoughtLimit as ThoughtLimit


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are chosen; constant for its life. The fields are those of the message `Sampling`."""

    do_sample: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()  # (token id, what is added); several of one id add up
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    watermark: bool = False
    top_n: int = 0
    prompt_logprobs: bool = False
    model_logprobs: bool = False  # logprobs of the model's own distribution instead of the processed one
    allowed_tokens: bytes = b""  # a bit for each token that may be sampled; empty: all may be
    bad_words: Sequence[tuple[int, ...]] = ()  # the last token of each is not sampled behind the others
    grammar: Grammar | None = None

    @property
    def masked(self) -> bool:
        """Whether a mask leaves out tokens."""
        return self.grammar is not None or bool(self.allowed_tokens) or bool(self.bad_words)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar's state follows the tokens."""
        return self.grammar is not None

    @property
    def mask_reads_history(self) -> bool:
        """Whether the mask depends on the tokens before."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. An id is never given to another folder."""

    id: int  # ≥ 1
    folder: Path


@dataclass(frozen=True, slots=True)
class Image:
    """An image file."""

    hash: bytes  # SHA-256 of the data
    data: bytes


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image among a sequence's tokens."""

    image: Image
    offset: int  # index of the first token that stands for it


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker does not know yet."""

    sequence_id: int
    token_ids: Sequence[int]  # every token known
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_ids: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    num_source_tokens: int = 0  # leading token_ids that an encoder reads
    num_second_text_tokens: int = 0  # last token_ids that have token type 1; the others have type 0
    adapter: Adapter | None = None
    images: Sequence[ImageSpan] = ()  # in the order of their offsets
    cache_salt: int | None = None  # recent answers are looked up only in sequences with the same one
    snapshot: int | None = None  # its states behind num_computed_tokens; None: no token is computed, or it has none


@dataclass(frozen=True, slots=True)
class Advances:
    """Each sequence's share of a step, as columns: one entry per sequence, no sequence twice."""

    sequence_ids: npt.NDArray[np.uint64]
    num_tokens: npt.NDArray[np.uint32]
    sample: npt.NDArray[np.bool_]
    num_new_blocks: npt.NDArray[np.uint32]
    new_block_ids: npt.NDArray[np.uint32]  # [sum of num_new_blocks], in the order of the sequences
    # Draft tokens to verify at most; empty: none of any sequence.
    num_draft_tokens: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    # The last known token of each sequence, for pipeline stages that do not sample; empty: every rank samples.
    last_token_ids: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))

    def __len__(self) -> int:
        return len(self.sequence_ids)

    @classmethod
    def of(
        cls,
        sequence_ids: Sequence[int],
        num_tokens: Sequence[int],
        sample: Sequence[bool],
        new_block_ids: Sequence[Sequence[int]] = (),
        num_draft_tokens: Sequence[int] = (),
        last_token_ids: Sequence[int] = (),
    ) -> Advances:
        """From lists; without `new_block_ids` no sequence gets a block."""
        blocks = new_block_ids or [()] * len(sequence_ids)
        return cls(
            np.array(sequence_ids, np.uint64),
            np.array(num_tokens, np.uint32),
            np.array(sample, np.bool_),
            np.array([len(ids) for ids in blocks], np.uint32),
            np.array([block_id for ids in blocks for block_id in ids], np.uint32),
            np.array(num_draft_tokens, np.uint32),
            np.array(last_token_ids, np.uint32),
        )


NO_ADVANCES = Advances.of((), (), ())


class TransferKind(IntEnum):
    """From where to where a block's content moves. The values are those of `Transfers.kinds`."""

    STORE = 0  # from a block to a slot
    LOAD = 1  # from a slot to a block
    DEMOTE = 2  # from a slot to a slot


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block's content that moves between the pool and the slots beside it."""

    kind: TransferKind
    source: int  # a block id or a slot
    target: int


@dataclass(frozen=True, slots=True)
class Save:
    """A snapshot of a sequence's states, as the plans before have left them."""

    sequence_id: int
    num_tokens: int  # tokens before the position whose states are saved
    snapshot: int  # its place


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: changes to what the worker knows, applied in the order of the fields."""

    step: int
    freed_sequence_ids: Sequence[int] = ()
    new_sequences: Sequence[NewSequence] = ()
    advances: Advances = NO_ADVANCES
    drafts_by_lookup: bool = False  # drafts come from the sequences' texts and grammars alone
    drafts_only_forced: bool = False  # drafts are only tokens that grammars force
    transfers: Sequence[Transfer] = ()  # before the new sequences
    saves: Sequence[Save] = ()  # before all others


Top = Sequence[tuple[int, float]]  # alternatives to a token and their logprobs, best first


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens and their logprobs (natural logarithm), as columns."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]
    tops: Mapping[int, Top] = field(default_factory=dict)  # by index, of the tokens that asked for alternatives


NO_TOKENS = Tokens(np.zeros(0, np.int64), np.zeros(0))
NO_VECTORS = np.zeros((0, 0), np.float32)


class Fault(Enum):
    """What is at fault where a sequence is over."""

    SERVER = auto()
    REQUEST = auto()
    NONE = auto()  # its grammar has ended, and it has no stop token


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence is over."""

    sequence_id: int
    reason: str
    fault: Fault = Fault.SERVER


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Durations of a step's parts, in seconds."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    idle_s: float = 0.0
    draft_s: float = 0.0  # part of prepare_s on a CPU; on a GPU, the time in which it waits because of drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan. Ranks other than the first fill in only `step` and `timing`."""

    step: int
    timing: StepTiming = StepTiming()
    sequence_ids: npt.NDArray[np.uint64] = field(default_factory=lambda: NO_ADVANCES.sequence_ids)  # [sampled]
    # [sequences that sampled]: draft tokens that were verified; empty: none.
    num_draft_tokens: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_ADVANCES.num_draft_tokens)
    # [sequences that sampled]: whether a model or heads made these; empty: not of any.
    drafted_by_model: npt.NDArray[np.bool_] = field(default_factory=lambda: NO_ADVANCES.sample)
    sampled: Tokens = NO_TOKENS
    prompts: Mapping[int, Tokens] = field(default_factory=dict)  # prompt tokens by sequence id
    failures: Sequence[Failure] = ()
    vectors: npt.NDArray[np.float32] = field(
        default_factory=lambda: NO_VECTORS
    )  # [pooled, dimensions], of sequence_ids
