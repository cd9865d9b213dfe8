"""The one decoder that runs every architecture: embedding, layers, norm, head or pooler, and an encoder if there is
one. Everything that differs between architectures is in the `ModelSpec`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from penstock_server.device.attention import ModelAttention
from penstock_server.device.attention.interface import Attention, StepAdapters, StepBatch, window_tokens
from penstock_server.device.ops import Lookup, Ops, PackedLinear, PackedNorm
from penstock_server.host.heap import return_free_pages
from penstock_server.layers.context import BuildContext
from penstock_server.layers.embedding import Embedding
from penstock_server.layers.executor import executor_of
from penstock_server.layers.linear import DenseWeights
from penstock_server.layers.norm import load_norm
from penstock_server.layers.operation import Program, Visit
from penstock_server.layers.rope import RopeSpec, limit_tables
from penstock_server.layers.step import StepContext
from penstock_server.layers.vocabulary import VocabularyHead, soft_cap
from penstock_server.models.adapter import Adapters
from penstock_server.models.encoder import Encoder
from penstock_server.models.image_layer import ImageLayers
from penstock_server.models.interface import ModelTraits, States
from penstock_server.models.layer import Layer
from penstock_server.models.mtp import MtpLayer
from penstock_server.models.pooler import Pooler
from penstock_server.models.spec import HeadSpec, ModelSpec
from penstock_server.models.states import DecoderStates
from penstock_server.parallel import RankGroup
from penstock_server.vision.encoder import ImageEncoder


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


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a model runs with."""

    ops: Ops
    attention: ModelAttention
    group: RankGroup
    device: torch.device
    dtype: torch.dtype
    ropes: Mapping[RopeSpec, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LastStage:
    """What follows the last layer. All of it is None in the stages before."""

    norm: PackedNorm | None
    project: PackedLinear | None
    head: VocabularyHead | None
    pooler: Pooler | None


@dataclass(slots=True)
class Taps:
    """What drafters read of a model, and the drafting layer of its checkpoint."""

    mtp: MtpLayer | None
    observer: Observer | None = None
    output_pool: Tensor | None = None  # [slots, hidden] gets the outputs of all tokens


class Decoder:
    """A loaded model on one rank. Implements `CausalModel`."""

    def __init__(
        self,
        spec: ModelSpec,
        context: BuildContext,
        layers: range | None = None,
        load_images: Callable[[], ImageEncoder] | None = None,
    ) -> None:
        """layers: those of this rank's stage; None: all. load_images: None if the model reads none. Raises
        NotNativeError if native kernels cannot add adapters."""
        layers, loader, group = layers or range(spec.num_layers), context.loader, context.shard.group
        stage = group.stage
        self.spec = spec
        self.runtime = Runtime(context.ops, context.attention, group, loader.device, loader.dtype, context.ropes)

        # The largest tensors first: the memory that is freed after packing them is reused for the smaller ones.
        head, lookup = None, None
        if stage.is_last and spec.pooling is None:
            head, lookup = _load_head(spec.head, context, embeds=stage.is_first)
        elif stage.is_first:
            lookup = context.weights("embedding").lookup(context.ops)
        self.embedding = None
        if stage.is_first:
            assert lookup is not None, "the first stage has the token table"
            self.embedding = Embedding.load(spec.embedding, lookup, context)
        self.layers: list[Layer] = []
        for number in layers:
            self.layers.append(Layer.load(spec.layers[number], f"layers.{number}", context))
            return_free_pages()
        self.encoder = None
        if spec.encoder is not None:
            assert lookup is not None, "a model with an encoder has one stage"
            self.encoder = Encoder(spec.encoder, lookup, context)
        norm = None
        if stage.is_last and spec.final_norm is not None:
            norm = load_norm(loader, context.ops, "norm", spec.final_norm)
        is_projected = spec.embedding.size not in (None, spec.hidden_size)
        project = context.linear("project_out") if stage.is_last and is_projected else None
        self.last = LastStage(norm, project, head, Pooler.load(spec, loader))
        self._image_layers = ImageLayers(spec, context)
        self.taps = Taps(None if spec.mtp is None else MtpLayer(spec.mtp, spec.mtp_prefix, context))
        loader.finish()
        self.weight_bytes = loader.loaded_bytes
        self.images = None if load_images is None else load_images()
        if self.images is not None:
            self.weight_bytes += self.images.weight_bytes
            if spec.image_layers:
                self.weight_bytes += self._image_layers.read(self.images, spec, context)
        sites = context.adapter_sites
        self.adapters = None if sites is None else Adapters(sites, loader.dtype)
        if self.adapters is not None:
            self.weight_bytes += self.adapters.own_bytes
        parts = [part for layer in self.layers for part in layer.memories]
        kinds = [layout for layer in self.layers for layout in layer.caches]
        layouts = {index: layout for index, layout in enumerate(kinds) if layout is not None}
        self.caches: list[Tensor] = [torch.empty(0)] * len(kinds)
        self.states: States | None = DecoderStates(layouts, self.caches, loader.device) if layouts else None
        window = window_tokens([part.attention for part in parts if part.attention is not None])
        is_recordable = context.attention.is_recordable and context.ops.name == "triton" and stage.size == 1
        self.traits = ModelTraits(
            architecture=spec.architecture,
            attention_name=context.attention.name or "no",
            vocab_size=spec.vocab_size,
            num_layers=len(layers),
            hidden_size=spec.hidden_size,
            default_position_tokens=spec.default_position_tokens or spec.max_position_tokens,
            max_source_tokens=spec.max_source_tokens,
            decoder_prefix=() if spec.encoder is None else spec.encoder.decoder_prefix,
            window_tokens=0 if spec.is_encoder else _widest(window, group),
            is_recordable=is_recordable and not layouts,
            # Without a name, no layer attends, as in Mamba 2.
            is_row_independent=context.ops.name == "native" and context.attention.name in ("native", ""),
        )
        self.executor = executor_of(self._program(), context.ops, "layers", adapts=sites is not None)

    @property
    def max_position_tokens(self) -> int:
        return self.spec.max_position_tokens

    @property
    def kv_bytes_per_block(self) -> int:
        return sum(attention.bytes_per_block() for attention in self._cached)

    @property
    def pooler(self) -> Pooler | None:
        return self.last.pooler

    def observe(self, observer: Observer) -> None:
        """Shows the inputs of layers to the observer from now on."""
        self.taps.observer = observer
        self.executor = executor_of(self._program(), self.runtime.ops, "")

    def allocate_cache(self, num_blocks: int) -> None:
        kinds = [layout for layer in self.layers for layout in layer.caches]
        places = [index for index, layout in enumerate(kinds) if layout is None]
        for index in places:  # first: the old and the new pool may not fit together
            self.caches[index] = torch.empty(0)
        caches = [attention.allocate(num_blocks) for attention in self._cached]
        for index, cache in zip(places, caches * len(places) if self.spec.is_encoder else caches, strict=False):
            self.caches[index] = cache

    @property
    def _cached(self) -> list[Attention]:
        """The attention of the layers that have a cache. An encoder reads its keys and values only in the step that
        writes them, so its layers take turns in one cache."""
        layers = self.layers[:1] if self.spec.is_encoder else self.layers
        parts = [part for layer in layers for part in layer.memories]
        return [part.attention for part in parts if part.attention is not None]

    def sample(self) -> Decoder:
        if self.encoder is not None:
            return self
        # Layers with one spec and one size have the same shapes and formats.
        kinds = {(layer.spec, layer.num_bytes): index for index, layer in enumerate(self.layers)}
        last_of_kind = set(kinds.values())
        # A layer that differs on one rank runs on all, because they communicate in each.
        minimum = self.runtime.group.minimum
        indices = [index for index in range(len(self.layers)) if minimum(-(index in last_of_kind))]
        sample = copy.copy(self)
        sample.traits = replace(self.traits, num_layers=len(indices))
        sample.layers = [self.layers[index] for index in indices]
        layer_of = [index for index, layer in enumerate(self.layers) for _ in layer.caches]
        sample.caches = [cache for index, cache in zip(layer_of, self.caches, strict=True) if index in indices]
        sample.executor = executor_of(sample._program(), self.runtime.ops, "")
        return sample

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        for spec, tables in self.runtime.ropes.items():
            limit_tables(spec, tables, max_sequence_tokens)
        if self.images is not None:
            self.images.max_tokens = max_sequence_tokens

    def logits(self, outputs: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        assert self.last.head is not None, "its outputs are pooled"
        return self.last.head(outputs, adapters)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        assert self.last.head is not None, "its outputs are pooled"
        return self.last.head.rows(token_ids, self.spec.hidden_size, self.runtime.dtype, self.runtime.device)

    def context(self, batch: StepBatch) -> StepContext:
        adders = None if self.adapters is None else self.adapters.adders
        return StepContext.of(batch, self.runtime.attention, adders)

    def forward(self, batch: StepBatch) -> Tensor:
        if self.encoder is not None and batch.sources is not None:
            self.encoder.read(self.context(batch.sources), self.layers, self.caches)
            if not len(batch.token_ids):
                return batch.token_ids.new_empty((0, self.spec.hidden_size), dtype=self.runtime.dtype)
        batch = self.positioned(batch)
        stage, step, output_pool = self.runtime.group.stage, self.context(batch), self.taps.output_pool
        residual = self._received(batch) if self.embedding is None else self.embedding(step)
        if batch.image_places is not None and batch.image_embeddings is not None:
            residual[batch.image_places] = batch.image_embeddings[:, : self.spec.hidden_size]
        if output_pool is None and stage.is_last:
            x = self._run_layers(residual, step)
        else:
            every_row = torch.arange(len(residual), device=residual.device)
            x = self._run_layers(residual, replace(step, batch=replace(batch, sample_rows=every_row)))
            if not stage.is_last:
                stage.send(x)
                return x
            if output_pool is not None:
                output_pool[batch.slots] = x
            x = x[batch.sample_rows]
        return x if self.last.project is None else self.last.project(x)

    def _received(self, batch: StepBatch) -> Tensor:
        """The residual [tokens, hidden] that the stage before sends."""
        shape = (len(batch.token_ids), self.spec.hidden_size)
        runtime = self.runtime
        return runtime.group.stage.receive(torch.empty(shape, dtype=runtime.dtype, device=runtime.device))

    def _run_layers(self, residual: Tensor, step: StepContext) -> Tensor:
        """The normed residual of the sampled rows [samples, hidden]; before the last stage, not normed. residual: the
        input of the first layer [tokens, hidden], overwritten."""
        images = step.batch.image_embeddings
        has_features = images is not None and images.shape[1] > self.spec.hidden_size
        visits = self.taps.observer is not None or step.seen is not None or has_features
        return self.executor.run(residual, self.caches, step, visits=visits)

    def _program(self) -> Program:
        """Layers and final norm, and what else reads and changes the residual between them."""
        program, observer = Program(self.spec.hidden_size), self.taps.observer
        for index, layer in enumerate(self.layers):
            if observer is not None and index in observer.layers:
                program.append(Visit("residual", "residual", partial(_show, observer, index)))
            if index in self.spec.featured_layers:
                place = self.spec.featured_layers.index(index)
                program.append(Visit("residual", "residual", partial(self._add_features, place)))
            self._image_layers.append_to(program, index)
            layer.append_to(program, is_last=index + 1 == len(self.layers))
        program.output(self.last.norm)
        return program

    def _add_features(self, place: int, residual: Tensor, step: StepContext) -> None:
        """Adds what image tokens get in front of the featured layer with this place."""
        images, first = step.batch.image_embeddings, (place + 1) * self.spec.hidden_size
        if images is not None and images.shape[1] > first:
            residual[step.batch.image_places] += images[:, first : first + self.spec.hidden_size]

    def positioned(self, batch: StepBatch) -> StepBatch:
        """The batch in which the positions of image tokens are rows at the end of the rope tables. Each row has the
        cosines and sines of the token's three positions, for their shares of the frequencies."""
        if batch.image_positions is None or batch.image_places is None:
            return batch
        device, num_tokens, first = batch.positions.device, len(batch.image_places), self.max_position_tokens
        for spec, tables in self.runtime.ropes.items():
            rows = batch.image_positions[:, torch.tensor(spec.axes, device=device)]
            for table in tables:
                table[first : first + num_tokens] = table.gather(0, rows)
        positions = batch.positions.clone()
        positions[batch.image_places] = torch.arange(first, first + num_tokens, device=device)
        return replace(batch, positions=positions)


def _show(observer: Observer, index: int, residual: Tensor, step: StepContext) -> None:
    observer.see(index, residual, step.batch.slots)


def _widest(window: int, group: RankGroup) -> int:
    """The window of all stages. 0: a layer of some stage attends to all tokens."""
    return 0 if group.minimum_of_all(window) == 0 else -group.minimum_of_all(-window)


def _load_head(spec: HeadSpec, context: BuildContext, *, embeds: bool) -> tuple[VocabularyHead, Lookup | None]:
    """The output head, and the token embedding if this rank `embeds`, which may share its weight."""
    ops, shard = context.ops, context.shard
    lookup: Lookup | None = None
    logits_bias = context.loader.read("head.logits_bias")[0] if spec.logits_bias else None
    if spec.tied:
        linear, lookup = context.weights("embedding").pack_tied(ops)
        logits_bias = context.loader.read("head.bias") if spec.bias else logits_bias
    else:
        weights = context.weights("head")
        if spec.is_normalized:
            weight, bias = weights.dense()
            weights = DenseWeights(normalize(weight.float()).to(weight.dtype), bias)
        linear = weights.pack(ops)
        if embeds:
            lookup = context.weights("embedding").lookup(ops)
    cap = None if spec.soft_cap is None else soft_cap(ops, spec.soft_cap)
    sites, site = context.adapter_sites, None
    if sites is not None and not spec.is_normalized:
        site = sites.add_head("embedding" if spec.tied else "head")
    add_adapters = None if sites is None or site is None else sites.adders[site]
    widths, group = shard.vocab.widths(), shard.group
    return VocabularyHead(linear, widths, group, spec.multiplier, cap, logits_bias, add_adapters), lookup
