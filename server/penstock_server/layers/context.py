"""What layers are loaded with: the checkpoint, the operators, this rank's shard, and what layers share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from penstock_server.device.attention import ModelAttention
from penstock_server.device.attention.fp8 import KvScales
from penstock_server.device.ops import Ops, PackedLinear
from penstock_server.layers.adapter import AdapterSites
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.linear import LinearWeights
from penstock_server.layers.relative_bias import RelativeBiasSpec
from penstock_server.layers.rope import RopeSpec, rope_tables
from penstock_server.layers.shard import Shard
from penstock_server.layers.temperature import TemperatureSpec
from penstock_server.weights.kv_scale import read_scales
from penstock_server.weights.loader import Loader


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Layers of one attention shape share its implementation; layers of one rope, relative bias
    or scaling of queries share its tables."""

    loader: Loader
    ops: Ops
    layout: WeightLayout
    attention: ModelAttention
    max_position_tokens: int
    block_tokens: int
    ropes: dict[RopeSpec, tuple[Tensor, Tensor]] = field(default_factory=dict)
    relative_biases: dict[RelativeBiasSpec, Tensor] = field(default_factory=dict)
    temperatures: dict[TemperatureSpec, Tensor] = field(default_factory=dict)
    default_position_tokens: int | None = None  # see `ModelSpec`
    adapter_sites: AdapterSites | None = None  # None: the model is loaded without adapters

    @property
    def shard(self) -> Shard:
        return self.layout.shard

    def weights(self, *names: str) -> LinearWeights:
        """See `WeightLayout.load`."""
        return self.layout.load(self.loader, *names)

    def linear(self, *names: str, gated: bool = False) -> PackedLinear:
        """The same, packed; gated as in `LinearWeights.pack`."""
        return self.weights(*names).pack(self.ops, gated=gated)

    def site(self, *names: str, order: Tensor | None = None) -> int | None:
        """Registers the layers that `linear` loads by these names as a site of adapters, and returns its number. order:
        as of `LinearWeights.reorder`."""
        return None if self.adapter_sites is None else self.adapter_sites.add(*names, order=order)

    def rope(self, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        """Cosines and sines [max positions, rotary_dim / 2] float32. With axes, as many rows follow for the image
        tokens of a step."""
        if spec not in self.ropes:
            num_rows = self.max_position_tokens * (2 if spec.axes else 1)
            longest = self.default_position_tokens or self.max_position_tokens
            self.ropes[spec] = rope_tables(spec, num_rows, self.loader.device, longest)
        return self.ropes[spec]

    def kv_scales(self, keys: str, values: str) -> KvScales | None:
        """The scales of what these projections compute; None: the KV cache is not in fp8."""
        if self.attention.kv_dtype is None:
            return None
        key_weight, value_weight = (self.loader.locator.locate(f"{name}.weight").name for name in (keys, values))
        return KvScales(*read_scales(self.loader.checkpoint, key_weight, value_weight))

    def query_factors(self, spec: TemperatureSpec) -> Tensor:
        """See `TemperatureSpec.factors`."""
        if spec not in self.temperatures:
            self.temperatures[spec] = spec.factors(self.max_position_tokens, self.loader.device)
        return self.temperatures[spec]

    def relative_bias(self, spec: RelativeBiasSpec) -> Tensor:
        """[heads on this rank, distances] float32."""
        if spec not in self.relative_biases:
            self.relative_biases[spec] = spec.load(self.loader)
        return self.relative_biases[spec]
