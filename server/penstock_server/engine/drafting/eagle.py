"""Drafts from an EAGLE-3 head (https://arxiv.org/abs/2503.01840): one decoder layer that reads, for each position, the
inputs of three of the model's layers there and the token that follows, and predicts the token after that one.

Heads have the published layout: `fc` over the three inputs, a layer `midlayer` or `layers.0` of twice the usual input
size, and a vocabulary of its own, whose tokens `d2t` maps to the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from penstock_server.device.attention.interface import StepBatch
from penstock_server.engine.drafting.pooled import NUM_PADDING_BLOCKS, Drafted
from penstock_server.engine.host_batch import HostBatch
from penstock_server.errors import ConfigError
from penstock_server.layers.rope import limit_tables, rope_tables
from penstock_server.models.config import Config
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.models.rope_config import read_rope
from penstock_server.vision.encoder import PlacedImage
from penstock_server.weights.folder import find_weights
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from penstock_server.weights.safetensors_header import read_header

_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_HIDDEN_NORM = "hidden_norm.weight"  # a norm of what the head reads of the model, so no whole model has it
_IGNORED = {"t2d", "d2t", "embed_tokens.weight"}  # the model has the embeddings; d2t is read if vocabularies differ


def is_eagle_head(folder: Path) -> bool:
    """Whether the folder holds an EAGLE-3 head, by the names of its tensors. `architectures` does not tell: heads are
    published as `LlamaForCausalLMEagle3`, as `Eagle3LlamaForCausalLM`, and, by EAGLE's authors, as `LlamaForCausalLM`.
    Raises ConfigError if the folder holds no weights, or damaged ones."""
    files = find_weights(folder)
    if files.kind != "safetensors":
        return False
    names = {name for path in files.paths for name in read_header(path)}
    return any(prefix + _HIDDEN_NORM in names for prefix in _LAYER_PREFIXES)


class EagleHead:
    """The head, its KV pool, and a pool of what it reads of the model. Implements `Head` and `Observer`."""

    def __init__(self, folder: Path, model: Decoder, options: LoadOptions) -> None:
        """options: of the model. Raises ConfigError if the folder's head is damaged, or was made for another model."""
        config, dtype, block_tokens = Config.read(folder), options.dtype, options.block_tokens
        self._block_tokens, self._dtype, self._device = block_tokens, dtype, options.device
        assert model.embedding is not None, "the model is not split into stages"
        hidden, self._embed = model.traits.hidden_size, model.embedding.tokens
        nested = config.values.get("eagle_config")
        of_head = {**config.values, **(nested if isinstance(nested, dict) else {})}
        for option in ("norm_before_residual", "norm_before_fc"):
            if of_head.get(option):
                raise config.refuse(f"{option} is not supported in a head")
        self.layers = _observed_layers(config, of_head, model.traits.num_layers)
        self.num_heads = config.require("num_attention_heads", int)
        self.num_kv_heads = config.get("num_key_value_heads", self.num_heads)
        self.head_dim = config.get("head_dim", hidden // max(1, self.num_heads))
        self._eps = config.get("rms_norm_eps", 1e-6)
        if config.get("hidden_act", "silu") != "silu" or min(self.num_heads, self.num_kv_heads, self.head_dim) < 1:
            raise config.refuse("a head needs attention heads, and silu as hidden_act")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise config.refuse(f"{self.num_heads} heads of {self.head_dim} do not fit {self.num_kv_heads} KV heads")
        self.vocab_size = config.get("draft_vocab_size", model.traits.vocab_size)
        self.max_position_tokens = model.max_position_tokens
        self._rope = read_rope(config, self.head_dim)
        longest = model.traits.default_position_tokens
        self._ropes = rope_tables(self._rope, model.max_position_tokens, self._device, longest)
        read = _Reader(folder, dtype, self._device)
        inner = config.require("intermediate_size", int)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self._fuse = read("fc.weight", hidden, len(self.layers) * hidden)
        self._token_norm = read("midlayer.input_layernorm.weight", hidden)
        self._hidden_norm = read("midlayer.hidden_norm.weight", hidden)
        self._query = read("midlayer.self_attn.q_proj.weight", queries, 2 * hidden)
        self._key = read("midlayer.self_attn.k_proj.weight", keys, 2 * hidden)
        self._value = read("midlayer.self_attn.v_proj.weight", keys, 2 * hidden)
        self._output = read("midlayer.self_attn.o_proj.weight", hidden, queries)
        self._mlp_norm = read("midlayer.post_attention_layernorm.weight", hidden)
        self._gate = read("midlayer.mlp.gate_proj.weight", inner, hidden)
        self._up = read("midlayer.mlp.up_proj.weight", inner, hidden)
        self._down = read("midlayer.mlp.down_proj.weight", hidden, inner)
        self._norm = read("norm.weight", hidden)
        self._head = read("lm_head.weight", self.vocab_size, hidden)
        self._tokens = torch.arange(self.vocab_size, device=self._device)
        if self.vocab_size != model.traits.vocab_size:
            self._tokens = self._tokens + read("d2t", self.vocab_size).long()
        if int(self._tokens.min()) < 0 or int(self._tokens.max()) >= model.traits.vocab_size:
            raise ConfigError(
                f"{folder}: d2t names token {int(self._tokens.max())} of {model.traits.vocab_size} tokens"
            )
        read.finish()
        weights = [value for value in vars(self).values() if isinstance(value, Tensor)]
        self._widths = len(self.layers) * hidden, keys, keys
        self.kv_bytes_per_block = sum(self._widths) * block_tokens * dtype.itemsize
        self.weight_bytes = sum(weight.nbytes for weight in weights) + NUM_PADDING_BLOCKS * self.kv_bytes_per_block
        self.caches: list[Tensor] = []
        self.allocate_cache(0)

    def allocate_cache(self, num_blocks: int) -> None:
        self.caches = []
        sizes = [(num_blocks + NUM_PADDING_BLOCKS, self._block_tokens, width) for width in self._widths]
        self.caches = [torch.zeros(size, dtype=self._dtype, device=self._device) for size in sizes]

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        limit_tables(self._rope, self._ropes, max_sequence_tokens)

    def see(self, layer: int, residual: Tensor, slots: Tensor) -> None:
        columns = self.caches[0].view(-1, len(self.layers), residual.shape[1])
        columns[slots, self.layers.index(layer)] = residual.to(self._dtype)

    def forward(
        self, batch: HostBatch, step: StepBatch, outputs: Tensor | None, images: Sequence[Sequence[PlacedImage]]
    ) -> Drafted:
        """Implements `Head.forward`. Images are tokens like others."""
        residual = linear(self.caches[0].flatten(0, 1)[step.slots], self._fuse) if outputs is None else outputs
        x = torch.cat(
            (self._normed(self._embed(step.token_ids), self._token_norm), self._normed(residual, self._hidden_norm)), 1
        )
        residual = residual + linear(self._attend(batch, step, x), self._output)
        x = self._normed(residual, self._mlp_norm)
        residual = residual + linear(silu(linear(x, self._gate)) * linear(x, self._up), self._down)
        found = residual[step.sample_rows]
        return Drafted(self._tokens[linear(self._normed(found, self._norm), self._head).argmax(1)], found)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._eps)

    def _attend(self, batch: HostBatch, step: StepBatch, x: Tensor) -> Tensor:
        """x [tokens, 2 hidden] → [tokens, heads * head_dim]; stores keys and values. step: the batch as tensors."""
        cos, sin = (table[step.positions][:, None].to(x.dtype) for table in self._ropes)
        queries = _rotated(linear(x, self._query).view(len(x), -1, self.head_dim), cos, sin)
        keys = _rotated(linear(x, self._key).view(len(x), -1, self.head_dim), cos, sin)
        _, key_pool, value_pool = (cache.flatten(0, 1) for cache in self.caches)  # views
        key_pool[step.slots], value_pool[step.slots] = keys.flatten(1), linear(x, self._value)
        attended = torch.empty_like(queries)
        offsets = torch.arange(self._block_tokens, device=self._device)
        for place, context in enumerate(batch.context_lens.tolist()):
            start, end = batch.query_starts[place : place + 2].tolist()
            slots = (step.block_tables[place].long()[:, None] * self._block_tokens + offsets).flatten()[:context]
            is_seen = torch.arange(context, device=self._device) <= step.positions[start:end, None]
            context_keys = key_pool[slots].view(context, -1, self.head_dim).transpose(0, 1)
            context_values = value_pool[slots].view(context, -1, self.head_dim).transpose(0, 1)
            found = scaled_dot_product_attention(
                queries[None, start:end].transpose(1, 2),
                context_keys[None],
                context_values[None],
                attn_mask=is_seen,
                enable_gqa=True,
            )
            attended[start:end] = found[0].transpose(0, 1)
        return attended.flatten(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, head_dim], whose halves are rotated."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _observed_layers(config: Config, options: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers whose inputs the head reads, in the order of `fc`."""
    layers = options.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(layers, list) and all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers)
    if not is_list or len(set(layers)) != len(layers):
        raise config.refuse(f"the head reads layers {layers}, must be different ones of the model's {num_layers}")
    return list(layers)


class _Reader:
    """Reads tensors of the given names and shapes; the layer's may have any of the published prefixes. Raises
    ConfigError if one is missing or has another shape."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        files = find_weights(folder)
        self._folder, self._dtype, self._device = folder, dtype, device
        self._checkpoint = SafetensorsCheckpoint(files.paths, files.weight_map)
        self._unread = set(self._checkpoint.names()) - _IGNORED

    def __call__(self, name: str, *shape: int) -> Tensor:
        names = [name.replace(_LAYER_PREFIXES[0], prefix) for prefix in _LAYER_PREFIXES]
        found = next((each for each in names if each in self._checkpoint.names()), None)
        if found is None:
            raise ConfigError(f"{self._folder} lacks the tensor {name}")
        if self._checkpoint.shape(found) != shape:
            raise ConfigError(
                f"{self._folder}: tensor {found} has shape {list(self._checkpoint.shape(found))}, must have "
                f"{list(shape)}; use a head that was made for this model"
            )
        self._unread.discard(found)
        tensor = self._checkpoint.raw(found).to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def finish(self) -> None:
        """Raises ConfigError if a tensor was not read: the head computes something that this one does not."""
        if self._unread:
            name = min(self._unread)
            raise ConfigError(f"{self._folder}: tensor {name} belongs to no part of an EAGLE-3 head that is supported")
