"""The one decoder that runs every architecture: embedding, layers, norm, head or pooler, and an encoder if there is
one. Everything that differs between architectures is in the `ModelSpec`."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from penstock_server.attention.interface import Attention, StepAdapters, StepBatch, window_tokens
from penstock_server.host.heap import return_free_pages
from penstock_server.kernels.native_ops import NativeOps
from penstock_server.kernels.ops import Lookup
from penstock_server.layers.adapter import AdapterSites
from penstock_server.layers.context import BuildContext
from penstock_server.layers.embedding import Embedding
from penstock_server.layers.executor import NativeExecutor, executor_of
from penstock_server.layers.linear import DenseWeights
from penstock_server.layers.native_compiler import NotNativeError
from penstock_server.layers.norm import load_norm
from penstock_server.layers.operation import Program, Visit
from penstock_server.layers.rope import limit_tables
from penstock_server.layers.step import StepContext
from penstock_server.layers.vocabulary import VocabularyHead, soft_cap
from penstock_server.models.adapter import Adapters, refusal
from penstock_server.models.encoder import Encoder
from penstock_server.models.image_layer import ImageLayer
from penstock_server.models.layer import Layer
from penstock_server.models.mtp import MtpLayer
from penstock_server.models.pooler import Pooler
from penstock_server.models.spec import HeadSpec, LayerSpec, ModelSpec
from penstock_server.models.states import DecoderStates
from penstock_server.parallel import RankGroup
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.vision.states import ImageKvPool


class Observer(Protocol):
    """Reads the inputs of layers."""

    @property
    def layers(self) -> Collection[int]:
        """Indices of the layers whose input this observer reads."""
        ...

    def see(self, layer: int, residual: Tensor, slots: Tensor) -> None:
        """residual [tokens, hidden]: the layer's input, which must not be changed. slots [tokens]: of the step's tokens
        in the KV pool."""
        ...


class Decoder:
    """A loaded model on one rank. Implements `CausalModel`."""

    def __init__(self, spec: ModelSpec, context: BuildContext, layers: range | None = None) -> None:
        """layers: those of this rank's stage; None: all."""
        layers = layers or range(spec.num_layers)
        stage = context.shard.group.stage
        self.spec = spec
        self.architecture = spec.architecture
        self.vocab_size = spec.vocab_size
        self.num_layers = len(layers)
        self.hidden_size = spec.hidden_size
        self.max_position_tokens = spec.max_position_tokens
        self.default_position_tokens = spec.default_position_tokens or spec.max_position_tokens
        self.max_source_tokens = spec.max_source_tokens
        self.decoder_prefix = () if spec.encoder is None else spec.encoder.decoder_prefix
        self.load_phases: list[tuple[str, float]] = []

        # The largest tensors first: the memory that is freed after packing them is reused for the smaller ones.
        self.head: VocabularyHead | None = None
        lookup: Lookup | None = None
        if stage.is_last and spec.pooling is None:
            self.head, lookup = _load_head(spec.head, context, embeds=stage.is_first)
        elif stage.is_first:
            lookup = context.weights("embedding").lookup(context.ops)
        self.embedding = None
        if stage.is_first:
            assert lookup is not None, "the first stage has the token table"
            self.embedding = Embedding.load(spec.embedding, lookup, context)
        self.layers: list[Layer] = []
        # Layers with one spec and one size have the same shapes and formats. The index is the last one of the kind.
        self._kinds: dict[tuple[LayerSpec, int], int] = {}
        for index, number in enumerate(layers):
            layer, bytes_before = spec.layers[number], context.loader.loaded_bytes
            self.layers.append(Layer.load(layer, f"layers.{number}", context))
            self._kinds[layer, context.loader.loaded_bytes - bytes_before] = index
            return_free_pages()
        self.encoder = None
        if spec.encoder is not None:
            assert lookup is not None, "a model with an encoder has one stage"
            self.encoder = Encoder(spec.encoder, lookup, context)
        self.norm = None
        if stage.is_last and spec.final_norm is not None:
            self.norm = load_norm(context.loader, context.ops, "norm", spec.final_norm)
        is_projected = spec.embedding.size not in (None, spec.hidden_size)
        self.project = context.linear("project_out") if stage.is_last and is_projected else None
        self.pooler = Pooler.load(spec, context.loader)
        # By the layer that each is in front of. Their keys and values are in caches of a pool of their own.
        self.image_layers = {
            place: ImageLayer.load(layer, f"image_layers.{number}", context)
            for number, (place, layer) in enumerate(spec.image_layers)
        }
        self.image_caches: dict[int, Tensor] = {}
        self.image_token = context.loader.read_if_there("image_token.weight")
        self.adapters: Adapters | None = None
        self.images: ImageEncoder | None = None
        self.observer: Observer | None = None
        self.mtp = None if spec.mtp is None else MtpLayer(spec.mtp, spec.mtp_prefix, context)
        self.output_pool: Tensor | None = None  # [slots, hidden] gets the outputs of all tokens
        context.loader.finish()
        self.caches: list[Tensor] = [torch.empty(0)] * self.num_layers
        parts = [layer.attention for layer in self.layers]
        layouts = {index: part.state for index, part in enumerate(parts) if part.state is not None}
        self.states = DecoderStates(layouts, self.caches, context.loader.device) if layouts else None
        self.attentions = [part.attention for part in parts if part.attention is not None]
        self.window_tokens = 0 if spec.is_encoder else _widest(window_tokens(self.attentions), context.shard.group)
        self.attention_name = context.attention.name
        self.is_row_independent = context.ops.name == "native" and self.attention_name == "native"
        self.is_recordable = context.attention.is_recordable and context.ops.name == "triton" and stage.size == 1
        self.is_recordable = self.is_recordable and self.states is None
        self.kv_bytes_per_block = sum(attention.bytes_per_block() for attention in self._cached)
        self.weight_bytes = context.loader.loaded_bytes
        self.attention = context.attention
        self.block_tokens = context.block_tokens
        self.dtype = context.loader.dtype
        self._device = context.loader.device
        self._ropes = context.ropes
        self._group = context.shard.group
        self._ops = context.ops
        self.executor = executor_of(self._program(), context.ops, "layers")

    def accept_adapters(self, sites: AdapterSites) -> None:
        """Lets sequences have adapters. Raises ConfigError if this model's layers cannot have any."""
        if self.spec.is_encoder:
            raise refusal("it is an encoder")
        if self._ops.adds_adapters:
            self.adapters = Adapters.on_device(sites, self.dtype, self._device)
        elif isinstance(self._ops, NativeOps):
            try:
                self.executor = NativeExecutor(self._program(), self._ops.build, adapts=True)
            except NotNativeError as reason:
                raise refusal(f"native kernels have no {reason}", sites.own) from reason
            self.adapters = Adapters.native(sites, self._ops.build)
        else:
            raise refusal(f"{self._ops.name} operators have no kernel for them", sites.own)
        self.weight_bytes += self.adapters.own_bytes

    def observe(self, observer: Observer) -> None:
        """Shows the inputs of layers to the observer from now on."""
        self.observer = observer
        self.executor = executor_of(self._program(), self._ops, "")

    def read_images(self, images: ImageEncoder) -> None:
        """Lets sequences have images."""
        self.images = images
        self.weight_bytes += images.weight_bytes
        if self.image_layers:
            images.token_embedding = self.image_token
            attentions = {place: layer.attention.attention for place, layer in self.image_layers.items()}
            block_bytes = sum(attention.bytes_per_block() for attention in attentions.values())
            num_blocks = images.num_pool_blocks(block_bytes, self.spec.max_image_states, self.block_tokens)
            num_blocks = self._group.minimum_of_all(num_blocks)
            self.image_caches = {place: attention.allocate(num_blocks) for place, attention in attentions.items()}
            specs = [layer.plain_attention for _, layer in self.spec.image_layers]
            state_bytes = sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * self.dtype.itemsize
            num_values = sum(layer.attention.num_kv_values for layer in self.image_layers.values())
            projected_bytes = num_values * self.dtype.itemsize
            images.pool = ImageKvPool(
                num_blocks, self.block_tokens, block_bytes, state_bytes, projected_bytes, self._project_images
            )
            if self._device.type == "cpu":
                images.later_bytes = images.pool.num_bytes
            else:
                self.weight_bytes += images.pool.num_bytes  # so that there is room for a standby group's

    def allocate_cache(self, num_blocks: int) -> None:
        places = [index for index, layer in enumerate(self.layers) if layer.attention.state is None]
        for index in places:  # first: the old and the new pool may not fit together
            self.caches[index] = torch.empty(0)
        caches = [attention.allocate(num_blocks) for attention in self._cached]
        for index, cache in zip(places, caches * len(places) if self.spec.is_encoder else caches, strict=False):
            self.caches[index] = cache

    @property
    def _cached(self) -> list[Attention]:
        """The attention of the layers that have a cache. An encoder reads its keys and values only in the step that
        writes them, so its layers take turns in one cache."""
        return self.attentions[:1] if self.spec.is_encoder else self.attentions

    def sample(self) -> Decoder:
        if self.encoder is not None:
            return self
        last_of_kind = set(self._kinds.values())
        # A layer that differs on one rank runs on all, because they communicate in each.
        indices = [index for index in range(self.num_layers) if self._group.minimum(-(index in last_of_kind))]
        sample = copy.copy(self)
        sample.num_layers = len(indices)
        sample.layers = [self.layers[index] for index in indices]
        sample.caches = [self.caches[index] for index in indices]
        sample.executor = executor_of(sample._program(), self._ops, "")
        return sample

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        for spec, tables in self._ropes.items():
            limit_tables(spec, tables, max_sequence_tokens)
        if self.images is not None:
            self.images.max_tokens = max_sequence_tokens

    def logits(self, outputs: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        assert self.head is not None, "its outputs are pooled"
        return self.head(outputs, adapters)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        assert self.head is not None, "its outputs are pooled"
        return self.head.rows(token_ids, self.hidden_size, self.dtype, self._device)

    def forward(self, batch: StepBatch) -> Tensor:
        if self.encoder is not None and batch.sources is not None:
            self.encoder.read(StepContext.of(batch.sources, self.attention), self.layers, self.caches)
            if not len(batch.token_ids):
                return batch.token_ids.new_empty((0, self.spec.hidden_size), dtype=self.dtype)
        if batch.image_positions is not None:
            batch = self._with_image_positions(batch)
        stage = self._group.stage
        step = StepContext.of(batch, self.attention)
        residual = self._received(batch) if self.embedding is None else self.embedding(step)
        if batch.image_places is not None and batch.image_embeddings is not None:
            residual[batch.image_places] = batch.image_embeddings[:, : self.spec.hidden_size]
        if self.output_pool is None and stage.is_last:
            x = self._run_layers(residual, step)
        else:
            every_row = torch.arange(len(residual), device=residual.device)
            x = self._run_layers(residual, replace(step, batch=replace(batch, sample_rows=every_row)))
            if not stage.is_last:
                stage.send(x)
                return x
            if self.output_pool is not None:
                self.output_pool[batch.slots] = x
            x = x[batch.sample_rows]
        return x if self.project is None else self.project(x, step.select(batch.sample_rows))

    def _received(self, batch: StepBatch) -> Tensor:
        """The residual [tokens, hidden] that the stage before sends."""
        shape = (len(batch.token_ids), self.spec.hidden_size)
        return self._group.stage.receive(torch.empty(shape, dtype=self.dtype, device=self._device))

    def _run_layers(self, residual: Tensor, step: StepContext) -> Tensor:
        """The normed residual of the sampled rows [samples, hidden]; before the last stage, not normed. residual: the
        input of the first layer [tokens, hidden], overwritten."""
        images = step.batch.image_embeddings
        has_features = images is not None and images.shape[1] > self.spec.hidden_size
        visits = self.observer is not None or step.seen is not None or has_features
        return self.executor.run(residual, self.caches, step, visits=visits)

    def _program(self) -> Program:
        """Layers and final norm, and what else reads and changes the residual between them."""
        program = Program(self.spec.hidden_size)
        for index, layer in enumerate(self.layers):
            if self.observer is not None and index in self.observer.layers:
                program.append(Visit("residual", "residual", partial(self._show_to_observer, index)))
            if index in self.image_layers:
                program.append(Visit("residual", "residual", partial(self._attend_to_images, index)))
            is_last = index + 1 == self.num_layers
            layer.append_to(program, is_last=is_last)
            if index < self.spec.num_featured_layers and not is_last:
                program.append(Visit("residual", "residual", partial(self._add_features, index)))
        program.output(self.norm)
        return program

    def _show_to_observer(self, index: int, residual: Tensor, step: StepContext) -> None:
        assert self.observer is not None
        self.observer.see(index, residual, step.batch.slots)

    def _attend_to_images(self, index: int, residual: Tensor, step: StepContext) -> None:
        if step.batch.seen is not None and step.seen is not None:
            self.image_layers[index].run(index, residual, self.image_caches[index], step.batch.seen, step.seen)

    def _add_features(self, index: int, residual: Tensor, step: StepContext) -> None:
        """Adds what image tokens get behind this layer."""
        images, first = step.batch.image_embeddings, (index + 1) * self.spec.hidden_size
        if images is not None and images.shape[1] > first:
            residual[step.batch.image_places] += images[:, first : first + self.spec.hidden_size]

    def _project_images(self, states: Tensor) -> dict[int, Tensor]:
        """Keys and values by image layer, see `ImageKvPool.project`."""
        return {place: layer.project_kv(states) for place, layer in self.image_layers.items()}

    def _with_image_positions(self, batch: StepBatch) -> StepBatch:
        """The batch in which the positions of image tokens are rows at the end of the rope tables. Each row has the
        cosines and sines of the token's three positions, for their shares of the frequencies."""
        assert batch.image_positions is not None
        assert batch.image_places is not None
        device, num_tokens, first = batch.positions.device, len(batch.image_places), self.max_position_tokens
        for spec, tables in self._ropes.items():
            rows = batch.image_positions[:, torch.tensor(spec.axes, device=device)]
            for table in tables:
                table[first : first + num_tokens] = table.gather(0, rows)
        positions = batch.positions.clone()
        positions[batch.image_places] = torch.arange(first, first + num_tokens, device=device)
        return replace(batch, positions=positions)


def _widest(window: int, group: RankGroup) -> int:
    """The window of all stages. 0: a layer of some stage attends to all tokens."""
    return 0 if group.minimum_of_all(window) == 0 else -group.minimum_of_all(-window)


def _load_head(spec: HeadSpec, context: BuildContext, *, embeds: bool) -> tuple[VocabularyHead, Lookup | None]:
    """The output head, and the token embedding if this rank `embeds`, which may share its weight."""
    ops, shard = context.ops, context.shard
    lookup: Lookup | None = None
    if spec.tied:
        linear, lookup = context.weights("embedding").pack_tied(ops)
    else:
        weights = context.weights("head")
        if spec.is_normalized:
            weight, bias = weights.dense()
            weights = DenseWeights(normalize(weight.float()).to(weight.dtype), bias)
        linear = weights.pack(ops)
        if embeds:
            lookup = context.weights("embedding").lookup(ops)
    cap = None if spec.soft_cap is None else soft_cap(ops, spec.soft_cap)
    logits_bias = context.loader.read("head.logits_bias")[0] if spec.logits_bias else None
    sites, site = context.adapter_sites, None
    if sites is not None and not spec.is_normalized:
        site = sites.add_head("embedding" if spec.tied else "head")
    add_adapters = context.adds(site)
    widths, group = shard.vocab.widths(), shard.group
    return VocabularyHead(linear, widths, group, spec.multiplier, cap, logits_bias, add_adapters), lookup
