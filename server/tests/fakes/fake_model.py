"""A model without arithmetic: its next token is a function of the token ids in its cache."""

from __future__ import annotations

import functools
import threading

import torch
from penstock_server.device.attention.interface import StepAdapters, StepBatch
from penstock_server.models.interface import LoadOptions, ModelTraits
from penstock_server.parallel import RankGroup
from torch import Tensor

VOCAB = 997
BLOCK_TOKENS = 4
POISON = 13  # a sequence whose last token is this gets NaN
CRASH = 14  # a step with this token raises


START = 7  # digest of the empty context


def extended(digest: int, token: int) -> int:
    """The digest of a context to which a token is added."""
    return (digest * 31 + token + 1) % 1_000_003


def token_of(digest: int) -> int:
    """The model's greedy token after a context; never POISON or CRASH."""
    token = digest % VOCAB
    return token + 10 if token in (POISON, CRASH) else token


def next_token(context: list[int]) -> int:
    """The same, from the tokens of the context."""
    return token_of(functools.reduce(extended, context, START))


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation of a prompt."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeModel:
    """A CausalModel. Steps wait while `gate` is cleared; `started` is set when a step reaches the model."""

    traits = ModelTraits(
        architecture="fake",
        attention_name="fake",
        vocab_size=VOCAB,
        num_layers=1,
        hidden_size=1,
        default_position_tokens=64,
        max_source_tokens=0,
        decoder_prefix=(),
        window_tokens=0,
        is_recordable=False,
        is_row_independent=True,
    )
    max_position_tokens = 64
    pooler = None
    adapters = None
    images = None
    states = None
    weight_bytes = 1
    kv_bytes_per_block = 8 * BLOCK_TOKENS

    def __init__(self) -> None:
        self.cache = torch.zeros(0, dtype=torch.int64)
        self.caches = [self.cache]
        self.num_steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()

    def allocate_cache(self, num_blocks: int) -> None:
        self.cache = torch.full((num_blocks, BLOCK_TOKENS), -1)
        self.caches = [self.cache]

    def sample(self) -> FakeModel:
        return self

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        pass

    def forward(self, batch: StepBatch) -> Tensor:
        """[samples, 1]: the next token, or POISON."""
        self.num_steps += 1
        self.started.set()
        assert self.gate.wait(240)
        if (batch.token_ids == CRASH).any():
            raise RuntimeError("the model crashed")
        for part in (batch, batch.sources):
            if part is not None:
                is_stored = part.slots >= 0
                self.cache.view(-1)[part.slots[is_stored]] = part.token_ids[is_stored]
        outputs = torch.zeros(len(batch.sample_rows), 1, dtype=torch.int64)
        for place, row in enumerate(batch.sample_rows.tolist()):
            sequence = int(torch.searchsorted(batch.query_starts, row, right=True)) - 1
            num_source = 0 if batch.source_lens is None else int(batch.source_lens[sequence])
            end = num_source + int(batch.positions[row]) + 1
            context = self.cache[batch.block_tables[sequence].long()].view(-1)[:end]
            outputs[place] = POISON if context[-1] == POISON else next_token(context.tolist())
        return outputs

    def logits(self, outputs: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        logits = torch.zeros(len(outputs), VOCAB).scatter_(1, outputs, 20.0)
        logits[outputs[:, 0] == POISON] = float("nan")
        return logits


def load_fake(options: LoadOptions, group: RankGroup) -> FakeModel:
    return FakeModel()
