"""The activation functions of MLPs in plain torch, by their names in `config.json`."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.kernels.ops import Elementwise


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


def xielu(alpha_p: Tensor, alpha_n: Tensor) -> Elementwise:
    """xIELU: quadratic above zero, exponential below, with learned factors [1] (https://arxiv.org/abs/2411.13010)."""
    beta, almost_zero = 0.5, alpha_p.new_full((), -1e-6)
    above, below = F.softplus(alpha_p), beta + F.softplus(alpha_n)

    def activation(x: Tensor) -> Tensor:
        # Near zero, the difference would consist of rounding errors.
        negative = (torch.expm1(x.minimum(almost_zero)) - x) * below
        return torch.where(x > 0, above * x * x, negative) + beta * x

    return activation


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Elementwise] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "linear": _identity,
}
