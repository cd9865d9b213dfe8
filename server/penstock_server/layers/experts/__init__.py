"""Mixture of experts: an MLP that consists of many experts, a few of which process each token."""

from penstock_server.layers.experts.layer import MixtureOfExperts
from penstock_server.layers.experts.spec import MoeSpec, RoutingSpec

__all__ = ["MixtureOfExperts", "MoeSpec", "RoutingSpec"]
