"""Our paged attention, plugged into transformers' attention interface.

A forward pass calls attention in the same order every time, so a call's place in that order is its layer. The first
pass, `record`, finds out what the layers are; every later one writes keys and values into the cache and attends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock_server.attention import choose_attention
from penstock_server.attention.interface import Attention, AttentionShape, Sight, StepBatch
from penstock_server.errors import ConfigError

# Two names: masks are made, as marks of what a layer sees, only while recording.
RECORDING, PAGED = "penstock_recording", "penstock_paged"
_MARK_SHAPE = (1, 1, 1, 1)
_FULL_TOKENS = 64


class Pager:
    """The attention layers of one model, and what the current step is."""

    def __init__(self, device: torch.device, dtype: torch.dtype, block_tokens: int) -> None:
        self.device = device
        self.dtype = dtype
        self.block_tokens = block_tokens
        self.attentions: list[Attention] = []
        self._known: dict[AttentionShape, Attention] = {}
        self._step: tuple[StepBatch, list[Tensor]] | None = None  # None while recording
        self._next = 0

    def plug_in(self, model: nn.Module) -> None:
        """Registers the interface with transformers, where several models share it, and joins the modules to it."""
        interface = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
        for name in (RECORDING, PAGED):
            type(interface).register(name, _attention)
        type(masks).register(RECORDING, _mark)
        for module in model.modules():
            module.__dict__["pager"] = self

    def record(self, run: Callable[[], Any]) -> None:
        """Learns the layers from a forward pass, of which nothing is used. Raises ConfigError when there are none."""
        self._step = None
        run()
        if not self.attentions:
            raise ConfigError("the model never calls transformers' attention interface")

    def step(self, batch: StepBatch, caches: list[Tensor], run: Callable[[], Any]) -> Any:
        """What a forward pass over this batch returns."""
        self._step, self._next = (batch, caches), 0
        result = run()
        assert self._next == len(self.attentions), "attention was not called once a layer"
        return result

    def attend(self, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """heads: queries, keys, values [1, heads, tokens, dim] → [1, tokens, heads, value_dim], in queries' dtype."""
        queries, keys, values = heads
        if self._step is None:
            self.attentions.append(self._choose(heads, mask, options))
            return queries.new_zeros((1, queries.shape[2], queries.shape[1], values.shape[3]))
        index, self._next = self._next, self._next + 1
        batch, caches = self._step
        attention, cache = self.attentions[index], caches[index]
        attention.write(cache, self._rows(keys), self._rows(values), batch.slots)
        return attention.attend(self._rows(queries), cache, batch, options.get("s_aux"))[None].to(queries.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """[1, heads, tokens, dim] → [tokens, heads, dim] in the cache's dtype"""
        return x[0].transpose(0, 1).to(self.dtype).contiguous()

    def _choose(self, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]) -> Attention:
        queries, keys, values = heads
        scale, dim, value_dim = options.get("scaling"), queries.shape[3], values.shape[3]
        shape = AttentionShape(
            num_heads=queries.shape[1],
            num_kv_heads=keys.shape[1],
            head_dim=dim,
            scale=dim**-0.5 if scale is None else float(scale),
            block_tokens=self.block_tokens,
            value_dim=None if value_dim == dim else value_dim,
            sight=_sight(mask, options.get("sliding_window")),
            soft_cap=options.get("softcap"),
        )
        if shape not in self._known:
            self._known[shape] = choose_attention(shape, self.device, self.dtype)
        return self._known[shape]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls."""
    pager: Pager = module.pager
    return pager.attend((query, key, value), attention_mask, options), None


def _mark(
    mask_function: Callable[..., Tensor], local_size: int | None = None, device: Any = None, **others: Any
) -> Tensor:
    """In place of a mask, one number that says what it shows: 0: all before; n: the last n; -n: the own chunk of n.

    Raises ConfigError when it shows anything else: it is tried for one query that both kinds of n show differently.
    """
    query = _FULL_TOKENS if local_size is None else 2 * local_size
    zero, places = torch.tensor(0, device=device), torch.arange(query + 2, device=device)
    seen = mask_function(zero, zero, torch.tensor(query, device=device), places)
    sights = (
        {0: Sight()} if local_size is None else {local_size: Sight(local_size), -local_size: Sight(None, local_size)}
    )
    for mark, sight in sights.items():
        first, stop = sight.interval(torch.tensor([query], device=device), 0)
        if torch.equal(seen, (places >= first) & (places < stop)):
            return torch.full(_MARK_SHAPE, mark, dtype=torch.int64, device=device)
    raise ConfigError("the model's attention mask is neither causal, nor a sliding window, nor chunks")


def _sight(mask: Tensor | None, window: int | None) -> Sight:
    if mask is None:
        return Sight(window)
    if mask.shape != _MARK_SHAPE or mask.dtype != torch.int64:
        raise ConfigError("the model makes attention masks of its own")
    mark = int(mask)
    return Sight(mark if mark > 0 else None, -mark if mark < 0 else None)
