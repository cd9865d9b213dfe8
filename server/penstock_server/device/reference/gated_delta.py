"""Gated delta networks in plain torch, which computes the rows of a chunk together."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.gated_delta import GatedDelta
from penstock_server.device.reference.chunk import Chunk, decays_between

L2_EPSILON = 1e-6  # the one of transformers, which has no setting for it


def advance(net: GatedDelta, inputs: list[Tensor], chunk: Chunk) -> Tensor:
    """The outputs [rows, heads * value_dim] of rows of one chunk."""
    layout, within, rows = net.layout, chunk.within, chunk.rows
    mixed, rates = inputs
    gates = mixed[:, layout.inputs :]
    rows[within:, : layout.inputs] = mixed[:, : layout.inputs]
    queries, keys, values = F.silu(chunk.convolved(net.conv)).split(net.widths[:3], 1)
    kept_keys, kept_values, kept_decays = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            rows[:, layout.inputs :].split([*net.widths[1:3], net.num_heads], 1),
            (net.key_dim, net.value_dim, 1),
            strict=True,
        )
    )
    kept_keys[within:] = _unit(keys.unflatten(1, (-1, net.key_dim)))
    strengths, decays = rates.chunk(2, 1)
    kept_decays[within:] = (-net.decay * F.softplus(decays + net.decay_bias)).exp()[..., None]

    q = _unit(queries.unflatten(1, (-1, net.key_dim)))[:, net.key_heads] * net.key_dim**-0.5
    k = kept_keys[:, net.key_heads]
    beta = net.strength * strengths.sigmoid().T[..., None]  # [heads, rows, 1]
    left = decays_between(kept_decays.squeeze(2))  # [heads, end, end]
    start = kept_decays[:, :, 0].cumprod(0).T[..., None]  # [heads, end, 1]
    state = chunk.state.view(net.num_heads, net.key_dim, net.value_dim)

    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        """What vectors [rows, heads, key_dim] of new rows read of the state, and their weights of the chunk's
        rows."""
        x = x.transpose(0, 1)
        weights = left[:, within:] * (x @ k.permute(1, 2, 0))
        return start[:, within:] * (x @ state), weights

    of_state, weights = read(k[within:])
    known = kept_values[:within].transpose(0, 1)
    wanted = values.unflatten(1, (-1, net.value_dim)).transpose(0, 1) - of_state - weights[..., :within] @ known
    corrected = torch.linalg.solve_triangular(
        (beta * weights[..., within:]).tril(-1), beta * wanted, upper=False, unitriangular=True
    )
    kept_values[within:] = corrected.transpose(0, 1)
    u = kept_values.transpose(0, 1)
    of_state, weights = read(q)
    outputs = of_state + weights @ u
    if chunk.next_state is not None:
        weighted = left[:, -1:].transpose(1, 2) * u
        chunk.next_state.copy_((start[:, -1:] * state + k.permute(1, 2, 0) @ weighted).flatten())
    outputs = outputs.transpose(0, 1)
    normed = outputs * torch.rsqrt(outputs.square().mean(-1, keepdim=True) + net.eps) * net.norm
    return normed.flatten(1) * F.silu(gates)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)
