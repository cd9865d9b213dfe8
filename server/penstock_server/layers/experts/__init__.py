"""Mixture of experts: an MLP of many experts, of which every token uses a few."""

from penstock_server.layers.experts.layer import MixtureOfExperts
from penstock_server.layers.experts.spec import MoeSpec, RoutingSpec

__all__ = ["MixtureOfExperts", "MoeSpec", "RoutingSpec"]
