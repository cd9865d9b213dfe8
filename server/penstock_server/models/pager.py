"""Connects our paged attention to transformers' attention interface.

A forward pass calls attention in the same order every time, so the index of a call identifies its layer. The first
pass, `record`, finds out what attention each layer has; every later pass writes keys and values to the cache and
attends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock_server.device.attention import ModelAttention
from penstock_server.device.attention.interface import Attention, AttentionMask, AttentionShape, StepBatch
from penstock_server.errors import ConfigError
from penstock_server.layers.step import StepContext

# Two implementations for transformers: it makes masks only while recording, where each is a code of what it shows.
RECORDING, PAGED = "penstock_recording", "penstock_paged"
_CODE_SHAPE = (1, 1, 1, 1)
_CAUSAL_QUERY = 64  # the position of the query that a causal mask is tried with


class Pager:
    """The attention layers of one model, and the current step."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, block_tokens: int, attention: str = "", cpu_isa: str = ""
    ) -> None:
        """attention: name of the implementation; empty: the fastest. cpu_isa: as of `find_build`."""
        self.dtype = dtype
        self.block_tokens = block_tokens
        self.attention = ModelAttention(device, dtype, name=attention, cpu_isa=cpu_isa)
        self.layers: list[Attention] = []
        self.shapes: list[AttentionShape] = []  # shapes of the layers
        self._step: tuple[StepContext, list[Tensor]] | None = None  # with its caches; None while recording
        self._next = 0  # index of the next attention call

    def plug_in(self, model: nn.Module) -> None:
        """Registers the implementations with transformers, for all models, and attaches this pager to the modules of
        this model."""
        interface = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
        for name in (RECORDING, PAGED):
            type(interface).register(name, _attention)
        type(masks).register(RECORDING, _encode_mask)
        for module in model.modules():
            module.__dict__["pager"] = self

    def record(self, run: Callable[[], Any]) -> None:
        """Finds the layers in a forward pass, whose result is meaningless. Raises ConfigError if there are none."""
        self._step = None
        run()
        if not self.layers:
            raise ConfigError("the model never calls transformers' attention interface")

    def step(self, batch: StepBatch, caches: list[Tensor], run: Callable[[], Any]) -> Any:
        """The result of a forward pass over this batch."""
        self._step, self._next = (StepContext.of(batch, self.attention), caches), 0
        result = run()
        assert self._next == len(self.layers), "the number of attention calls has changed"
        return result

    def attend(self, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """heads: queries, keys, values [1, heads, tokens, dim] → [1, tokens, heads, value_dim] in the queries'
        dtype."""
        queries, keys, values = heads
        if self._step is None:
            self.shapes.append(self._shape(heads, mask, options))
            self.layers.append(self.attention.for_shape(self.shapes[-1]))
            return queries.new_zeros((1, queries.shape[2], queries.shape[1], values.shape[3]))
        index, self._next = self._next, self._next + 1
        step, caches = self._step
        attention, cache = self.layers[index], caches[index]
        attention.write_kv(cache, self._rows(keys), self._rows(values), step.batch.slots)
        metadata = step.metadata[attention.name]
        return attention.attend(self._rows(queries), cache, metadata, options.get("s_aux"))[None].to(queries.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """[1, heads, tokens, dim] → [tokens, heads, dim] in the cache's dtype"""
        return x[0].transpose(0, 1).to(self.dtype).contiguous()

    def _shape(
        self, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]
    ) -> AttentionShape:
        queries, keys, values = heads
        scale, dim, value_dim = options.get("scaling"), queries.shape[3], values.shape[3]
        return AttentionShape(
            num_heads=queries.shape[1],
            num_kv_heads=keys.shape[1],
            head_dim=dim,
            scale=dim**-0.5 if scale is None else float(scale),
            block_tokens=self.block_tokens,
            value_dim=None if value_dim == dim else value_dim,
            mask=_decode_mask(mask, options.get("sliding_window")),
            soft_cap=options.get("softcap"),
            has_sinks=options.get("s_aux") is not None,
        )


@contextmanager
def unpacked() -> Iterator[None]:
    """Lets transformers make masks on the device meta: it does not look for several texts in the positions there, which
    have no values."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    find = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls for attention."""
    pager: Pager = module.pager
    return pager.attend((query, key, value), attention_mask, options), None


def _encode_mask(
    mask_function: Callable[..., Tensor], local_size: int | None = None, device: Any = None, **others: Any
) -> Tensor:
    """The function that transformers calls for a mask. It returns a code instead: 0 for causal, n for a sliding window
    of n, -n for chunks of n.

    Raises ConfigError for any other mask. It evaluates the mask for one query, where the three differ.
    """
    device = torch.device("cpu") if device is not None and torch.device(device).type == "meta" else device
    query = _CAUSAL_QUERY if local_size is None else 2 * local_size
    zero, positions = torch.tensor(0, device=device), torch.arange(query + 2, device=device)
    shown = mask_function(zero, zero, torch.tensor(query, device=device), positions)
    masks = {0: AttentionMask()}
    if local_size is not None:
        masks = {local_size: AttentionMask(window=local_size), -local_size: AttentionMask(chunk=local_size)}
    for code, mask in masks.items():
        first, stop = mask.interval(torch.tensor([query], device=device), 0)
        if torch.equal(shown, (positions >= first) & (positions < stop)):
            return torch.full(_CODE_SHAPE, code, dtype=torch.int64, device=device)
    raise ConfigError("the model's attention mask is neither causal, nor a sliding window, nor chunks")


def _decode_mask(mask: Tensor | None, window: int | None) -> AttentionMask:
    if mask is None:
        return AttentionMask(window)
    if mask.shape != _CODE_SHAPE or mask.dtype != torch.int64:
        raise ConfigError("the model makes attention masks of its own")
    code = int(mask)
    return AttentionMask(code if code > 0 else None, -code if code < 0 else None)
