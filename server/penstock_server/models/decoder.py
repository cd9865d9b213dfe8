"""The one decoder that runs every architecture: embedding, layers, norm, head. What differs is in its `ModelSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import embedding

from penstock_server.attention.interface import Attention, AttentionShape, StepBatch
from penstock_server.kernels.ops import Ops
from penstock_server.layers.attention import AttentionBlock
from penstock_server.layers.linear import Layout
from penstock_server.layers.mlp import GatedMlp
from penstock_server.layers.native_stack import NativeStack, StackLayer
from penstock_server.layers.rope import rope_tables
from penstock_server.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from penstock_server.models.shard import Shard
from penstock_server.models.spec import ModelSpec
from penstock_server.parallel import RankGroup
from penstock_server.weights.loader import Loader
from penstock_server.weights.memory import return_freed_memory


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor  # [hidden]
    attention: AttentionBlock
    mlp_norm: Tensor  # [hidden]
    mlp: GatedMlp

    def for_stack(self) -> StackLayer:
        return StackLayer(
            attention_norm=self.attention_norm,
            qkv=self.attention.qkv,
            output=self.attention.output.linear,
            mlp_norm=self.mlp_norm,
            gate_up=self.mlp.gate_up,
            down=self.mlp.down.linear,
        )


class Decoder:
    """A loaded model on one rank. Implements `CausalModel`."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        shape: AttentionShape,
        ops: Ops,
        attention: Attention,
        loader: Loader,
        group: RankGroup,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.attention = attention
        self.architecture = spec.architecture
        self.attention_name = attention.name
        self.vocab_size = spec.vocab_size
        self.num_layers = spec.num_layers
        self.max_position_tokens = spec.max_position_tokens
        self.kv_bytes_per_block = attention.bytes_per_block() * spec.num_layers
        self.load_phases: list[tuple[str, float]] = []
        self.caches: list[Tensor] = []

        # The largest tensors first: what their packing frees is there for the small ones.
        if spec.tied_head:
            head, lookup = ops.pack_tied(loader.read("embedding.weight"))
        else:
            head = ops.pack_linear(loader.read("head.weight"), None)
            lookup = partial(embedding, weight=loader.read("embedding.weight"))
        self.head = VocabularyHead(head, shard.vocab.widths(), group)
        self.embedding = VocabularyEmbedding(lookup, shard.vocab.mine, group)
        rope = rope_tables(spec.rope, spec.max_position_tokens, loader.device)
        hidden_widths = shard.hidden.widths()
        from_heads = Layout(group, shard.exact, shard.heads.widths(spec.head_dim), hidden_widths)
        from_mlp = Layout(group, shard.exact, shard.intermediate.widths(), hidden_widths)
        self.layers: list[Layer] = []
        for i in range(spec.num_layers):
            layer = Layer(
                attention_norm=loader.read(f"layers.{i}.attention_norm.weight"),
                attention=AttentionBlock.load(loader, f"layers.{i}.attention", shape, ops, attention, rope, from_heads),
                mlp_norm=loader.read(f"layers.{i}.mlp_norm.weight"),
                mlp=GatedMlp.load(loader, f"layers.{i}.mlp", ops, from_mlp),
            )
            self.layers.append(layer)
            return_freed_memory()
        self.norm = loader.read("norm.weight")
        stack_layers = [layer.for_stack() for layer in self.layers]
        self.stack = NativeStack.of(attention, stack_layers, self.norm, rope, spec.norm_eps, group)
        loader.finish()
        self.weight_bytes = loader.loaded_bytes

    def allocate_cache(self, num_blocks: int) -> None:
        # The old pool goes first: both together may not fit.
        self.caches = []
        self.caches = self.attention.allocate(num_blocks, self.num_layers)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.attention.copy_blocks(self.caches, pairs)

    def logits(self, outputs: Tensor) -> Tensor | None:
        return self.head(outputs)

    def forward(self, batch: StepBatch) -> Tensor:
        """The normed output of the last layer at the wanted rows [samples, hidden]."""
        ops, eps = self.ops, self.spec.norm_eps
        residual = self.embedding(batch.token_ids)  # [tokens, hidden], updated in place from layer to layer
        if self.stack is not None:
            return self.stack.run(residual, self.caches, batch)
        x = ops.rms_norm(residual, self.layers[0].attention_norm, eps)
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            queries = layer.attention.store(x, cache, batch)
            is_last = index + 1 == self.num_layers
            if is_last and batch.sample_rows.shape[0] == 0:
                return x[:0]
            x = layer.attention.attend(queries, cache, batch)
            if is_last and batch.sample_rows.shape[0] < x.shape[0]:
                # Behind the last layer's attention only the rows whose outputs are wanted matter.
                x, residual = x[batch.sample_rows], residual[batch.sample_rows]
            x = layer.attention.project(x)
            x = layer.mlp(ops.add_rms_norm(x, residual, layer.mlp_norm, eps))
            next_norm = self.norm if is_last else self.layers[index + 1].attention_norm
            x = ops.add_rms_norm(x, residual, next_norm, eps)
        return x
