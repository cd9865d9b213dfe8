"""The multi-token prediction layer of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2): from the model's
output at a position and the token that follows it to the output that predicts the token after that one.

Embedding and head are the model's; the checkpoint's copies of them are not read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock_server.layers.context import BuildContext
from penstock_server.layers.executor import executor_of
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.norm import load_norm, norm_parameters
from penstock_server.layers.operation import Program
from penstock_server.layers.step import StepContext
from penstock_server.models.layer import Layer, layer_parameters
from penstock_server.models.spec import LayerSpec
from penstock_server.weights.loader import Parameter

_NORMS = ("token_norm", "hidden_norm", "norm")


class MtpLayer:
    """A decoder layer over what two norms and a projection make of token and output. On one rank."""

    @staticmethod
    def parameters(spec: LayerSpec, prefix: str, layout: WeightLayout) -> dict[str, Parameter]:
        hidden_size = layout.shard.hidden_size
        table = layer_parameters(spec, prefix, layout)
        table |= layout.linear(f"{prefix}.mtp.project", (hidden_size, 2 * hidden_size))
        for name in _NORMS:
            table |= norm_parameters(f"{prefix}.mtp.{name}", spec.norm, (hidden_size,))
        return table

    def __init__(self, spec: LayerSpec, prefix: str, context: BuildContext) -> None:
        context = replace(context, adapter_sites=None)
        self._token_norm, self._hidden_norm, norm = (
            load_norm(context.loader, context.ops, f"{prefix}.mtp.{name}", spec.norm) for name in _NORMS
        )
        self._project = context.linear(f"{prefix}.mtp.project")
        layer = Layer.load(spec, prefix, context)
        program = Program(context.shard.hidden_size)
        layer.append_to(program, is_last=True)
        program.output(norm)
        self._executor = executor_of(program, context.ops, "multi-token prediction layer")
        attention = layer.attention.attention if layer.attention is not None else None
        assert attention is not None, "a layer that drafts attends"
        self.attention = attention

    def __call__(self, tokens: Tensor, outputs: Tensor, cache: Tensor, step: StepContext) -> Tensor:
        """tokens [tokens, hidden]: the embedding of the token behind each position. outputs [tokens, hidden]: the
        model's there, or this layer's for the position before. Stores keys and values. Returns the normed outputs
        [samples, hidden], as input for the model's head."""
        joined = torch.cat((self._token_norm(tokens), self._hidden_norm(outputs)), dim=1)
        return self._executor.run(self._project(joined), [cache], step)
