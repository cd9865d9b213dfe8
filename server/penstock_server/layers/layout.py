"""How a model's parameters are stored and split: the table that the checkpoint is held against."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.layers.linear import Dense, LinearWeights, SchemeOf, dense_everywhere
from penstock_server.layers.shard import Shard
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Loader, Parameter


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """This rank's shard, and the scheme of each linear layer."""

    shard: Shard
    scheme_of: SchemeOf = dense_everywhere

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        bias: bool = False,
        part: Part | None = None,
        is_wide: bool = False,
        is_dense: bool = False,
        layer: str = "",
        is_reordered: bool = False,
    ) -> dict[str, Parameter]:
        """The parameters of a linear layer. shape: [out_features, in_features] over all ranks; part: what this rank
        holds of the weight; the others as in `Parameter`."""
        bias_part = part if part is not None and part.dim == 0 else None
        return self.scheme_of(name).parameters(
            name,
            Parameter(shape, part, is_wide, is_dense=is_dense, layer=layer, is_reordered=is_reordered),
            Parameter(shape[:1], bias_part, is_wide) if bias else None,
        )

    def into_hidden(
        self, name: str, in_features: int, columns: range, *, bias: bool = False, is_wide: bool = False
    ) -> dict[str, Parameter]:
        """The parameters of a `RowParallelLinear`. columns: this rank's part of the input features."""
        part = Part(0, self.shard.hidden.mine) if self.shard.exact else Part(1, columns)
        return self.linear(name, (self.shard.hidden_size, in_features), bias=bias, part=part, is_wide=is_wide)

    def load(self, loader: Loader, *names: str) -> LinearWeights:
        """This rank's part of a linear layer; of several layers with the same input, fused along their outputs."""
        is_dense = loader.parameters[f"{names[0]}.weight"].is_dense
        return (Dense() if is_dense else self.scheme_of(names[0])).load(loader, *names)
