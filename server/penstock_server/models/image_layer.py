"""A layer that attends to the states of images (Mllama): cross-attention and MLP, each behind a gate. Rows that see no
image bypass it.

COMPAT: as in the publisher's code. In transformers, tokens before the first image attend to all images and their
padding, and bypass the MLP alone; their keys would depend on what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from penstock_server.device.attention.interface import CrossAttentionImages
from penstock_server.layers.context import BuildContext
from penstock_server.layers.cross_attention import CrossAttentionBlock
from penstock_server.layers.interpreter import Interpreter
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.mlp import Mlp
from penstock_server.layers.norm import load_norm, norm_parameters
from penstock_server.layers.operation import Add, Norm, Program, Visit
from penstock_server.layers.step import StepContext
from penstock_server.models.spec import LayerSpec, ModelSpec
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.vision.states import ImageKvPool
from penstock_server.weights.loader import Parameter

_PARTS = ("attention", "mlp")


class ImageLayers:
    """By the layer that each is in front of. Their keys and values are in caches of a pool of their own."""

    def __init__(self, spec: ModelSpec, context: BuildContext) -> None:
        self._layers = {
            place: ImageLayer.load(layer, f"image_layers.{number}", context)
            for number, (place, layer) in enumerate(spec.image_layers)
        }
        self._caches: dict[int, Tensor] = {}
        self._token = context.loader.read_if_there("image_token.weight")

    def read(self, images: ImageEncoder, spec: ModelSpec, context: BuildContext) -> int:
        """Allocates the pool of the images' keys and values. Returns its bytes on a GPU."""
        images.token_embedding = self._token
        attentions = {place: layer.attention.attention for place, layer in self._layers.items()}
        block_bytes = sum(attention.bytes_per_block() for attention in attentions.values())
        num_blocks = images.num_pool_blocks(block_bytes, spec.max_image_states, context.block_tokens)
        num_blocks = context.shard.group.minimum_of_all(num_blocks)
        self._caches = {place: attention.allocate(num_blocks) for place, attention in attentions.items()}
        specs, value_bytes = [layer.plain_attention for _, layer in spec.image_layers], context.loader.dtype.itemsize
        state_bytes = sum(2 * each.num_kv_heads * each.head_dim for each in specs) * value_bytes
        projected_bytes = sum(layer.attention.num_kv_values for layer in self._layers.values()) * value_bytes
        sizes = num_blocks, context.block_tokens, block_bytes, state_bytes, projected_bytes
        images.pool = ImageKvPool(*sizes, self._project)
        if context.loader.device.type == "cpu":
            images.later_bytes = images.pool.num_bytes
            return 0
        return images.pool.num_bytes

    def append_to(self, program: Program, index: int) -> None:
        """Appends the layer in front of the one with this index, if there is one."""
        if index in self._layers:
            program.append(Visit("residual", "residual", partial(self._run, index)))

    def _run(self, index: int, residual: Tensor, step: StepContext) -> None:
        if step.batch.seen is not None and step.seen is not None:
            self._layers[index].run(index, residual, self._caches[index], step.batch.seen, step.seen)

    def _project(self, states: Tensor) -> dict[int, Tensor]:
        """Keys and values by image layer, see `ImageKvPool.project`."""
        return {place: layer.project_kv(states) for place, layer in self._layers.items()}


@dataclass(frozen=True, slots=True)
class ImageLayer:
    attention: CrossAttentionBlock
    interpreter: Interpreter  # runs the layer for the rows that see images

    @staticmethod
    def parameters(spec: LayerSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        table = CrossAttentionBlock.parameters(spec.plain_attention, f"{prefix}.attention", layout)
        table |= Mlp.parameters(spec.plain_mlp, f"{prefix}.mlp", layout)
        for part in _PARTS:
            table |= norm_parameters(f"{prefix}.{part}_norm", spec.norm, (layout.shard.hidden_size,))
            table[f"{prefix}.{part}_gate"] = Parameter((1,))
        return table

    @classmethod
    def load(cls, spec: LayerSpec, prefix: str, context: BuildContext) -> ImageLayer:
        context = replace(context, adapter_sites=None)
        loader = context.loader
        attention = CrossAttentionBlock.load(spec.plain_attention, f"{prefix}.attention", context)
        mlp = Mlp.load(spec.plain_mlp, f"{prefix}.mlp", context)
        norms = [load_norm(loader, context.ops, f"{prefix}.{part}_norm", spec.norm) for part in _PARTS]
        gates = [float(loader.read(f"{prefix}.{part}_gate").tanh()) for part in _PARTS]
        program = Program(context.shard.hidden_size)
        program.append(Norm("residual", "normed", norms[0]))
        attention.output.append_to(program, attention.append_to(program, "normed"), "projected")
        program.append(Add("projected", "residual", factor=gates[0]))
        program.append(Norm("residual", "normed", norms[1]))
        mlp.append_to(program, "normed", "projected")
        program.append(Add("projected", "residual", factor=gates[1]))
        program.output(None)
        return cls(attention, Interpreter(program, context.ops))

    def project_kv(self, states: Tensor) -> Tensor:
        """The keys and values of an image's states [states, hidden], as in `WrittenImage`."""
        return self.attention.project_kv(states)

    def run(self, place: int, residual: Tensor, cache: Tensor, seen: CrossAttentionImages, step: StepContext) -> None:
        """Changes the rows of the residual [tokens, hidden] that see images. place: this layer's. cache: of this layer,
        in the pool of images. step: of `seen.batch`."""
        first = 0
        for image in seen.written:
            kv = self.project_kv(image.states) if image.kv is None else image.kv[place]
            self.attention.write(kv, cache, seen.slots[first : first + len(kv)])
            first += len(kv)
        residual[seen.rows] = self.interpreter.run(residual[seen.rows], [cache], step)
