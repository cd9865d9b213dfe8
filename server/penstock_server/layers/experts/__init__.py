"""Mixture of experts: an MLP of many experts, of which every token uses a few."""

from penstock_server.layers.experts.layer import MixtureOfExperts
from penstock_server.layers.experts.parameters import moe_parameters
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import MoeSpec, RoutingSpec

__all__ = ["ExpertShard", "MixtureOfExperts", "MoeSpec", "RoutingSpec", "moe_parameters"]
