"""Drafts from Medusa heads: each head reads the output from which the last token was sampled, and predicts the
token one place further than that of the head before.

Heads have one of TGI's two layouts: `config.json` with `medusa_num_heads` and `medusa_num_layers`, and
`medusa_lm_head.safetensors` with the residual blocks of each head. In the first layout, each head also has a matrix of
the vocabulary. In the second one, all heads share the model's own output matrix, or, if the file has a tensor
`token_ids` (ours; other servers ignore it), the rows of these tokens.

With `token_ids`, heads may also be a chain (Hydra: Ankner et al. 2024, arXiv 2402.05109), a layout of ours: each head
reads what the head before has made, and the row of the token in front of the one that it predicts. So the first head
knows the token that was sampled, and the others know the draft so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from penstock_server.device.native.build import NativeBuild
from penstock_server.device.native.ops import NativeOps
from penstock_server.engine.drafting.interface import Tokens
from penstock_server.engine.host_batch import Rows
from penstock_server.engine.sequence import SequenceTable
from penstock_server.engine.transfer import upload
from penstock_server.errors import ConfigError
from penstock_server.models.config import Config
from penstock_server.models.interface import CausalModel
from penstock_server.parallel import RankGroup
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint

WEIGHTS_NAME = "medusa_lm_head.safetensors"
_LEAST_LOGPROB = math.log(0.15)  # that all tokens of a draft are right; drafts end before it is lower
# Bytes of a matrix from which threads share it: waking threads costs more than they save for smaller ones. PERF: with
# two heads of 2.4 MB, a step took 0.1 to 0.5 ms longer on two threads (Zen 4).
_PARALLEL_BYTES = 8 << 20

# [rows, in] → [rows, out]
Layer = Callable[[Tensor], Tensor]
# Logits [rows, tokens] → the greatest of each row [rows] int64, and its logprob [rows]; NaN for a broken row.
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Heads:
    """blocks: of each head, the layers of its residual blocks x + silu(layer(x)). matrices: one for each head, or one
    for all, whose columns are all tokens, or `token_ids`."""

    blocks: Sequence[Sequence[Layer]]
    matrices: Sequence[Layer]
    choose: Choose
    token_ids: Tensor | None = None  # on the host
    num_bytes: int = 0

    def __call__(self, outputs: Tensor, most: Rows, last_tokens: Tokens | None = None) -> list[Tokens]:
        """The draft of each row. outputs: [rows, hidden]; most: [rows], at least 1. No more rows are multiplied by a
        matrix than the drafts may have tokens. last_tokens: has no effect."""
        num_heads = min(int(most.max()), len(self.blocks))
        rows = [np.flatnonzero(most > head) for head in range(num_heads)]
        inputs = [
            _enter(blocks, outputs[torch.from_numpy(picked).to(outputs.device)])
            for blocks, picked in zip(self.blocks, rows, strict=False)
        ]
        if len(self.matrices) < len(self.blocks):
            inputs = [torch.cat(inputs)]
        chosen = [self.choose(matrix(x)) for matrix, x in zip(self.matrices, inputs, strict=False)]
        ids, logprobs = (torch.cat(parts).cpu() for parts in zip(*chosen, strict=True))
        if self.token_ids is not None:
            ids = self.token_ids[ids]
        tokens = np.zeros((len(most), num_heads), np.int32)
        likely = np.full((len(most), num_heads), -np.inf)
        places = np.concatenate(rows), np.repeat(np.arange(num_heads), [len(picked) for picked in rows])
        tokens[places], likely[places] = ids.numpy(), np.nan_to_num(logprobs.float().numpy(), nan=-np.inf)
        counts = (likely.cumsum(1) >= _LEAST_LOGPROB).sum(1)
        return [draft[:count] for draft, count in zip(tokens, counts.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class ChainedHeads:
    """Head k makes x + silu(layers[k]([x, r])) of x, and the matrix makes logits of that. x: the model's output, or
    what the head before has made; r: the row of the last token so far, or zeros if it is none of `token_ids`."""

    layers: Sequence[Layer]  # [rows, 2 hidden] → [rows, hidden]
    matrix: Layer  # [rows, hidden] → [rows, tokens]
    choose: Choose
    token_ids: Tensor  # [tokens] int64, ascending, on the host
    token_rows: Tensor  # [tokens + 1, hidden]: those of the output matrix, and zeros
    num_bytes: int = 0

    def __call__(self, outputs: Tensor, most: Rows, last_tokens: Tokens) -> list[Tokens]:
        """The draft of each row. outputs: [rows, hidden]; most: [rows], at least 1; last_tokens: [rows], which were
        sampled from the outputs. A head reads only rows whose drafts have not ended."""
        drafts: list[list[int]] = [[] for _ in most]
        ids, rows, likely, x = self.token_ids.numpy(), np.arange(len(most)), np.zeros(len(most)), outputs
        places = np.searchsorted(ids, last_tokens)
        places[np.append(ids, -1)[places] != last_tokens] = len(ids)
        for head, layer in enumerate(self.layers):
            x = x + silu(layer(torch.cat((x, self.token_rows[torch.from_numpy(places).to(x.device)]), 1)))
            chosen, logprobs = (part.cpu().numpy() for part in self.choose(self.matrix(x)))
            likely = likely + logprobs
            is_likely = likely >= _LEAST_LOGPROB  # not if it is NaN
            for row, token in zip(rows[is_likely].tolist(), ids[chosen[is_likely]].tolist(), strict=True):
                drafts[row].append(token)
            is_going_on = is_likely & (most[rows] > head + 1)
            if not is_going_on.any():
                break
            places = chosen
            if not is_going_on.all():
                rows, likely, places = rows[is_going_on], likely[is_going_on], chosen[is_going_on]
                x = x[torch.from_numpy(np.flatnonzero(is_going_on)).to(x.device)]
        return [np.array(draft, np.int32) for draft in drafts]


def _enter(blocks: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in blocks:
        x = x + silu(layer(x))
    return x


class _File:
    """The files of heads. Raises ConfigError if they are damaged, were made for another model, or are no heads."""

    def __init__(self, folder: Path) -> None:
        config = Config.read(folder)
        num_heads = config.optional_int("medusa_num_heads")
        if not num_heads or num_heads < 1:
            kind = config.get("model_type", "unknown")
            raise ConfigError(
                f"--speculative-model {folder}: {config.path.name} has no medusa_num_heads, and its model type is "
                f"{kind}: it holds no Medusa heads"
            )
        self.path = folder / WEIGHTS_NAME
        if not self.path.is_file():
            raise ConfigError(
                f"--speculative-model {folder} holds no {WEIGHTS_NAME}; convert medusa_lm_head.pt to safetensors"
            )
        self.num_heads: int = num_heads
        self.num_blocks: int = config.get("medusa_num_layers", 1)
        self._checkpoint = SafetensorsCheckpoint((self.path,))
        self.has = self._checkpoint.names().__contains__

    def read(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        if not self.has(name):
            raise ConfigError(f"{self.path} lacks the tensor {name}")
        if self._checkpoint.shape(name) != shape:
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {list(self._checkpoint.shape(name))}, the model needs "
                f"{list(shape)}; use heads that were made for this model"
            )
        tensor = torch.empty(shape, dtype=dtype)
        self._checkpoint.read(name, None, tensor)
        return tensor

    def is_chain(self, hidden_size: int) -> bool:
        """Whether heads read the last token too."""
        name = "0.0.linear.weight"
        return (
            self.num_blocks == 1 and self.has(name) and self._checkpoint.shape(name) == (hidden_size, 2 * hidden_size)
        )

    def token_ids(self, vocab_size: int) -> Tensor | None:
        if not self.has("token_ids"):
            return None
        ids = self._checkpoint.raw("token_ids")
        is_list = ids.dtype == torch.int64 and ids.dim() == 1 and len(ids) > 0
        if not is_list or ids[0] < 0 or ids[-1] >= vocab_size or (ids[1:] <= ids[:-1]).any():
            raise ConfigError(
                f"{self.path}: tensor token_ids must be an ascending list of int64 from 0 to {vocab_size - 1}, it is "
                f"of type {ids.dtype} and shape {list(ids.shape)}; use heads that were made for this model"
            )
        return ids

    def close(self) -> None:
        self._checkpoint.close()


@dataclass(frozen=True, slots=True)
class HeadKernels:
    """What heads are computed with. No bit of an answer depends on it."""

    dtype: torch.dtype
    pack: Callable[[Tensor, Tensor | None], Layer]  # a weight [out, in], and its bias [out]
    choose: Choose

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, native: NativeBuild | None) -> HeadKernels:
        """native: of a CPU."""
        if native is None:
            return cls(dtype, partial(_on_device, device), _most_probable)
        one_thread, all_threads = NativeOps(native, 1), NativeOps(native)

        def pack(weight: Tensor, bias: Tensor | None) -> Layer:
            return (one_thread if weight.nbytes < _PARALLEL_BYTES else all_threads).pack_linear(weight, bias)

        return cls(dtype, pack, one_thread.argmax_logprob)


def _on_device(device: torch.device, weight: Tensor, bias: Tensor | None) -> Layer:
    return partial(linear, weight=weight.to(device), bias=None if bias is None else bias.to(device))


def _most_probable(logits: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, ids = logits.float().log_softmax(-1).max(-1)
    return ids, logprobs


def read_heads(folder: Path, model: CausalModel, kernels: HeadKernels, group: RankGroup) -> Heads | ChainedHeads | None:
    """The heads in a folder; None on ranks after the first. All ranks call it together. Raises ConfigError if the
    heads are damaged, were made for another model, or are no heads."""
    file, dtype, num_bytes = _File(folder), kernels.dtype, 0

    def pack(weight: Tensor, bias: Tensor | None = None) -> Layer:
        nonlocal num_bytes
        num_bytes += weight.nbytes
        return kernels.pack(weight, bias)

    def block(name: str, in_features: int = model.traits.hidden_size) -> Layer:
        weight = file.read(f"{name}.weight", dtype, model.traits.hidden_size, in_features)
        return pack(weight, file.read(f"{name}.bias", dtype, model.traits.hidden_size))

    heads, last = range(file.num_heads), file.num_blocks
    token_ids, rows, matrices = None, None, list[Layer]()
    try:
        is_shared = not any(file.has(f"{i}.{last}.weight") for i in heads)
        if is_shared:
            token_ids = file.token_ids(model.traits.vocab_size)
            if token_ids is None and group.size == 1:
                matrices = [model.logits]
            else:
                rows = model.head_rows(torch.arange(model.traits.vocab_size) if token_ids is None else token_ids)
                matrices = [pack(rows)]
        if group.rank:
            return None
        if token_ids is not None and rows is not None and file.is_chain(model.traits.hidden_size):
            layers = [block(f"{i}.0.linear", 2 * model.traits.hidden_size) for i in heads]
            token_rows = pad(rows, (0, 0, 0, 1))
            num_bytes += token_rows.nbytes
            return ChainedHeads(layers, matrices[0], kernels.choose, token_ids, token_rows, num_bytes)
        blocks = [[block(f"{i}.{j}.linear") for j in range(file.num_blocks)] for i in heads]
        if not is_shared:
            shape = model.traits.vocab_size, model.traits.hidden_size
            matrices = [pack(file.read(f"{i}.{last}.weight", dtype, *shape)) for i in heads]
    finally:
        file.close()
    return Heads(blocks, matrices, kernels.choose, token_ids, num_bytes)


class MedusaDrafter:
    """Drafts of the first rank, which sends them to the others. Implements `Drafter`."""

    is_sent = True
    is_lookup = False
    extends_lookup = True
    reads_outputs = True

    def __init__(self, heads: Heads | ChainedHeads) -> None:
        self._heads = heads
        self.num_bytes = heads.num_bytes
        # By row of the table: the last output [rows, hidden], and for which residency and known tokens it is the last.
        # The steps that measure memory allocate it for all rows.
        self._outputs = torch.empty(0, 0)
        self._residencies, self._ends = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def draft(self, table: SequenceTable, rows: Rows, most: Rows) -> Sequence[Tokens]:
        """Empty for a sequence whose last output is unknown, as after preemption, until it has sampled."""
        drafts = [np.zeros(0, np.int32) for _ in rows]
        self._reserve(table)
        is_last = (self._residencies[rows] == table.residency[rows]) & (self._ends[rows] == table.known[rows])
        places = np.flatnonzero(is_last)
        if len(places):
            asked = rows[places]
            outputs = self._outputs[upload(asked, self._outputs.device)]
            found = self._heads(outputs, most[places], table.token_ids[asked, table.known[asked] - 1])
            for place, draft in zip(places.tolist(), found, strict=True):
                drafts[place] = draft
        return drafts

    @torch.inference_mode()
    def observe(self, table: SequenceTable, rows: Rows, ends: Rows, outputs: Tensor) -> None:
        self._reserve(table)
        if len(self._outputs) < len(self._ends):
            known, self._outputs = self._outputs, outputs.new_empty(len(self._ends), outputs.shape[1])
            if len(known):
                self._outputs[: len(known)] = known
        self._outputs.index_copy_(0, upload(rows, outputs.device), outputs)
        self._residencies[rows], self._ends[rows] = table.residency[rows], ends

    def _reserve(self, table: SequenceTable) -> None:
        """A place for each row of the table, which grows when there are more sequences than expected."""
        if (num_more := len(table.known) - len(self._ends)) > 0:
            self._residencies = np.pad(self._residencies, (0, num_more))
            self._ends = np.pad(self._ends, (0, num_more))

    def clear(self) -> None:
        self._residencies[:] = 0  # no sequence has it
