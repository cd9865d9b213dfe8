"""Drafts from Medusa heads: each head reads the output from which the last token was sampled, and predicts the
token one place further than that of the head before.

Heads have the layout of TGI: `config.json` with `medusa_num_heads` and `medusa_num_layers`, and
`medusa_lm_head.safetensors` with a few residual blocks and a matrix of the vocabulary per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock_server.engine.drafting.interface import Tokens
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable
from penstock_server.errors import ConfigError
from penstock_server.models.config import Config
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint

WEIGHTS_NAME = "medusa_lm_head.safetensors"


@dataclass(frozen=True, slots=True)
class Head:
    """Residual blocks x + silu(weight · x + bias), then a matrix of the vocabulary."""

    blocks: Sequence[tuple[Tensor, Tensor]]  # weight [hidden, hidden], bias [hidden]
    vocabulary: Tensor  # [vocab, hidden]

    @property
    def num_bytes(self) -> int:
        tensors = (self.vocabulary, *(tensor for block in self.blocks for tensor in block))
        return sum(tensor.nbytes for tensor in tensors)

    def __call__(self, outputs: Tensor) -> Tensor:
        """Outputs [rows, hidden] → the most probable tokens [rows]."""
        for weight, bias in self.blocks:
            outputs = outputs + functional.silu(functional.linear(outputs, weight, bias))
        return functional.linear(outputs, self.vocabulary).argmax(-1)


def read_heads(folder: Path, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> list[Head]:
    """The heads in a folder. Raises ConfigError if they are damaged, were made for another model, or are no heads."""
    config = Config.read(folder)
    num_heads = config.optional_int("medusa_num_heads")
    if not num_heads or num_heads < 1:
        kind = config.get("model_type", "unknown")
        raise ConfigError(
            f"--speculative-model {folder}: {config.path.name} has no medusa_num_heads, and its model type is {kind}; "
            "only Medusa heads are supported so far. Leave the flag out for n-gram lookup"
        )
    num_blocks, path = config.get("medusa_num_layers", 1), folder / WEIGHTS_NAME
    if not path.is_file():
        raise ConfigError(
            f"--speculative-model {folder} holds no {WEIGHTS_NAME}; convert medusa_lm_head.pt to safetensors"
        )
    checkpoint = SafetensorsCheckpoint((path,))

    def read(name: str, *shape: int) -> Tensor:
        if name not in checkpoint.names():
            raise ConfigError(f"{path} lacks the tensor {name}")
        if checkpoint.shape(name) != shape:
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(checkpoint.shape(name))}, the model needs {list(shape)}; use "
                "heads that were made for this model"
            )
        tensor = torch.empty(shape, dtype=dtype)
        checkpoint.read(name, None, tensor)
        return tensor

    try:
        return [
            Head(
                [
                    (
                        read(f"{i}.{j}.linear.weight", hidden_size, hidden_size),
                        read(f"{i}.{j}.linear.bias", hidden_size),
                    )
                    for j in range(num_blocks)
                ],
                read(f"{i}.{num_blocks}.weight", vocab_size, hidden_size),
            )
            for i in range(num_heads)
        ]
    finally:
        checkpoint.close()


class MedusaDrafter:
    """Drafts of the first rank, which sends them to the others. Implements `Drafter`."""

    is_sent = True
    reads_outputs = True

    def __init__(self, heads: Sequence[Head]) -> None:
        self._heads = heads
        self.num_bytes = sum(head.num_bytes for head in heads)
        # By row: the residency and the known tokens for which an output is the last one, and that output [hidden].
        self._last: dict[int, tuple[int, int, Tensor]] = {}

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        """Empty for a sequence whose last output is unknown, as after preemption, until it has sampled."""
        drafts = [np.zeros(0, np.int32) for _ in rows]
        places, outputs = [], []
        for place, row in enumerate(rows.tolist()):
            residency, end, output = self._last.get(row, (0, 0, None))
            if output is not None and (residency, end) == (table.residency[row], table.known[row]):
                places.append(place)
                outputs.append(output)
        if places:
            stacked = torch.stack(outputs)
            heads = self._heads[: int(most[places].max())]
            tokens = torch.stack([head(stacked) for head in heads], 1).numpy().astype(np.int32)
            for place, draft in zip(places, tokens, strict=True):
                drafts[place] = draft[: most[place]]
        return drafts

    def observe(self, table: SequenceTable, rows: Rows, ends: Rows, outputs: Tensor) -> None:
        for row, end, output in zip(rows.tolist(), ends.tolist(), outputs, strict=True):
            self._last[row] = (int(table.residency[row]), end, output)

    def clear(self) -> None:
        self._last.clear()
