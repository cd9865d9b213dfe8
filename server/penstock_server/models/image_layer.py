"""A layer that attends to the states of images (Mllama): cross-attention and MLP, each behind a gate. Rows that see no
image bypass it.

COMPAT: as in the publisher's code. In transformers, tokens before the first image attend to all images and their
padding, and bypass the MLP alone; their keys would depend on what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from penstock_server.attention.interface import CrossAttentionImages
from penstock_server.layers.context import BuildContext
from penstock_server.layers.cross_attention import CrossAttentionBlock
from penstock_server.layers.interpreter import Interpreter
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.mlp import Mlp
from penstock_server.layers.norm import load_norm, norm_parameters
from penstock_server.layers.operation import Add, Norm, Program
from penstock_server.layers.step import StepContext
from penstock_server.models.spec import LayerSpec
from penstock_server.weights.loader import Parameter

_PARTS = ("attention", "mlp")


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
        return self.attention.project_kv(states, None)

    def run(self, place: int, residual: Tensor, cache: Tensor, seen: CrossAttentionImages, step: StepContext) -> None:
        """Changes the rows of the residual [tokens, hidden] that see images. place: this layer's. cache: of this layer,
        in the pool of images. step: of `seen.batch`."""
        first = 0
        for image in seen.written:
            kv = self.project_kv(image.states) if image.kv is None else image.kv[place]
            self.attention.write(kv, cache, seen.slots[first : first + len(kv)])
            first += len(kv)
        residual[seen.rows] = self.interpreter.run(residual[seen.rows], [cache], step)
