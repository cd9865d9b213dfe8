"""The activation functions of MLPs in plain torch, by their names in `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.ops import Elementwise


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


def _clipped_gelu(x: Tensor) -> Tensor:
    return F.gelu(x).clamp(-10, 10)


def _laplace(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def _sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


@dataclass(frozen=True, slots=True, eq=False)
class Xielu:
    """xIELU: quadratic above zero, exponential below (https://arxiv.org/abs/2411.13010)."""

    BETA: ClassVar[float] = 0.5
    ALMOST_ZERO: ClassVar[float] = -1e-6

    above: Tensor  # [1] the factor above zero
    below: Tensor  # [1] that below

    @classmethod
    def learned(cls, alpha_p: Tensor, alpha_n: Tensor) -> Xielu:
        """From the parameters in the checkpoint [1]."""
        return cls(F.softplus(alpha_p), cls.BETA + F.softplus(alpha_n))

    def __call__(self, x: Tensor) -> Tensor:
        # Near zero, the difference would consist of rounding errors.
        negative = (torch.expm1(x.clamp(max=self.ALMOST_ZERO)) - x) * self.below
        return torch.where(x > 0, self.above * x * x, negative) + self.BETA * x


@dataclass(frozen=True, slots=True)
class SoftCap:
    """cap * tanh(x / cap) (Gemma 2)"""

    cap: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.cap) * self.cap


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
    # Without kernels of their own.
    "gelu_10": _clipped_gelu,
    "gelu_accurate": _gelu_tanh,
    "hardswish": F.hardswish,
    "laplace": _laplace,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "relu6": F.relu6,
    "sqrtsoftplus": _sqrt_softplus,
}

_NATIVE_NAMES: dict[Elementwise, str] = {
    F.silu: "silu",
    F.gelu: "gelu",
    _gelu_tanh: "tanh gelu",
    _quick_gelu: "quick gelu",
    F.relu: "relu",
    _relu2: "squared relu",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    _identity: "identity",
}


def native_form(function: Elementwise) -> tuple[str, list[float]] | None:
    """The function's name and its parameters in the native kernels; None if they lack it."""
    match function:
        case Xielu(above, below):
            return "xielu", [float(above), float(below)]
        case SoftCap(cap):
            return "soft cap", [cap]
    name = _NATIVE_NAMES.get(function)
    return None if name is None else (name, [])
