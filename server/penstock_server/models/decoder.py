"""The one decoder that runs every architecture: embedding, layers, norm, head. What differs is in its `ModelSpec`, an
encoder before it too."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import embedding, normalize

from penstock_server.attention.interface import StepBatch, window_tokens
from penstock_server.kernels.ops import Weight, whole
from penstock_server.layers.attention import AttentionBlock
from penstock_server.layers.context import BuildContext
from penstock_server.layers.embedding import Embedding
from penstock_server.layers.native_stack import NativeStack
from penstock_server.layers.norm import Norm
from penstock_server.layers.rope import fit_tables
from penstock_server.layers.vocabulary import VocabularyHead, soft_cap
from penstock_server.models.encoder import Encoder, split
from penstock_server.models.layer import Layer, Stream
from penstock_server.models.spec import ModelSpec
from penstock_server.weights.memory import return_freed_memory


class Decoder:
    """A loaded model on one rank. Implements `CausalModel`."""

    def __init__(self, spec: ModelSpec, context: BuildContext) -> None:
        ops, loader, shard = context.ops, context.loader, context.shard
        self.spec = spec
        self.architecture = spec.architecture
        self.vocab_size = spec.vocab_size
        self.num_layers = spec.num_layers
        self.max_position_tokens = spec.max_position_tokens
        self.max_source_tokens = 0 if spec.encoder is None else spec.encoder.max_source_tokens
        self.decoder_prefix = () if spec.encoder is None else spec.encoder.decoder_prefix
        self.load_phases: list[tuple[str, float]] = []
        self.caches: list[Tensor] = []

        # The largest tensors first: what packing them frees, where it needs them whole, is there for the small ones.
        if spec.head.tied:
            head, lookup = ops.pack_tied(loader.unread("embedding.weight"))
        else:
            weight: Weight = loader.unread("head.weight")
            if spec.head.is_normalized:
                weight = normalize(whole(weight).float()).to(weight.dtype)
            head = ops.pack_linear(weight, loader.read_if_there("head.bias"))
            lookup = partial(embedding, weight=loader.read("embedding.weight"))
        bias = loader.read("head.logits_bias")[0] if spec.head.logits_bias else None
        cap = None if spec.head.soft_cap is None else soft_cap(ops, spec.head.soft_cap)
        self.head = VocabularyHead(head, shard.vocab.widths(), shard.group, spec.head.multiplier, cap, bias)
        self.embedding = Embedding.load(spec.embedding, lookup, context)
        self.layers: list[Layer] = []
        for index, layer in enumerate(spec.layers):
            self.layers.append(Layer.load(layer, f"layers.{index}", context))
            return_freed_memory()
        self.encoder = None if spec.encoder is None else Encoder(spec.encoder, lookup, context)
        self.norm = None if spec.final_norm is None else Norm.load(loader, ops, "norm", spec.final_norm)
        project = loader.read_if_there("project_out.weight")
        self.project = None if project is None else ops.pack_linear(project, None)
        self.stack = self._stack(context)
        loader.finish()
        self.attentions = [layer.attention.attention for layer in self.layers]
        self.window_tokens = window_tokens(self.attentions)
        self.attention_name = " and ".join(sorted({attention.name for attention in self.attentions}))
        self.kv_bytes_per_block = sum(attention.bytes_per_block() for attention in self.attentions)
        self.weight_bytes = loader.loaded_bytes
        self._ropes = context.ropes

    def allocate_cache(self, num_blocks: int) -> None:
        # The old pool goes first: both together may not fit.
        self.caches = []
        self.caches = [attention.allocate(num_blocks, 1)[0] for attention in self.attentions]

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        for spec, tables in self._ropes.items():
            fit_tables(spec, tables, max_sequence_tokens)

    def logits(self, outputs: Tensor) -> Tensor | None:
        return self.head(outputs)

    def forward(self, batch: StepBatch) -> Tensor:
        """What the head reads, at the wanted rows [samples, hidden]."""
        if self.encoder is not None:
            sources, answers = split(batch)
            if sources is not None:
                self.encoder.read(sources, self.layers, self.caches)
            if answers is None:
                return self.caches[0].new_empty((0, self.spec.hidden_size))
            batch = answers
        residual = self.embedding(batch)
        if self.stack is not None:
            return self.stack.run(residual, self.caches, batch)
        stream = Stream(residual)
        is_thinned = batch.sample_rows.shape[0] < residual.shape[0]
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            is_last = index + 1 == self.num_layers
            layer.run(stream, cache, batch, batch.sample_rows if is_last and is_thinned else None)
        x = stream.enter(self.norm)
        return x if self.project is None else self.project(x)

    def _stack(self, context: BuildContext) -> NativeStack | None:
        """All layers as one native call, where they are layers that it knows."""
        norm, layers = self.spec.final_norm, self.spec.layers
        if norm is None or {layer.norm for layer in layers} != {norm} or not all(layer.fits_stack for layer in layers):
            return None
        first = self.layers[0].attention
        share_attention = all(layer.attention.attention is first.attention for layer in self.layers)
        share_rope = len({layer.attention.rope for layer in layers}) == 1
        if not (share_attention and share_rope) or self.project is not None:
            return None
        assert isinstance(first, AttentionBlock)
        assert first.rope is not None
        assert self.norm is not None
        assert self.norm.weight is not None
        stack_layers = [layer.for_stack() for layer in self.layers]
        return NativeStack.of(
            first.attention, stack_layers, self.norm.weight, first.rope, norm.eps, context.shard.group
        )
