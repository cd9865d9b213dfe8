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
    mixed, rates = inputs[:2]
    strengths, decays = (rates, inputs[2]) if net.is_apart else rates.split([net.num_heads, len(net.decay_bias)], 1)
    gates = inputs[3] if net.is_apart else mixed[:, layout.inputs :]
    rows[within:, : layout.inputs] = mixed[:, : layout.inputs]
    queries, keys, values = F.silu(chunk.convolved(net.conv)).split(net.widths[:3], 1)
    kept_keys, kept_values, kept_decays = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            rows[:, layout.inputs :].split([*net.widths[1:3], len(net.decay_bias)], 1),
            (net.key_dim, net.value_dim, net.decay_dim),
            strict=True,
        )
    )
    kept_keys[within:] = _unit(keys.unflatten(1, (-1, net.key_dim)))
    decays = (decays + net.decay_bias).unflatten(1, (-1, net.decay_dim))
    rate, floor = net.decay[:, None], net.decay_floor
    kept_decays[within:] = (-rate * F.softplus(decays) if floor is None else floor * (rate * decays).sigmoid()).exp()

    q = _unit(queries.unflatten(1, (-1, net.key_dim)))[:, net.key_heads] * net.key_dim**-0.5
    k = kept_keys[:, net.key_heads]
    beta = net.strength * strengths.sigmoid().T[..., None]  # [heads, rows, 1]
    # [heads, end, end, decay_dim]
    left = decays_between(kept_decays.flatten(1)).unflatten(0, (-1, net.decay_dim)).permute(0, 2, 3, 1)
    start = kept_decays.cumprod(0).transpose(0, 1)  # [heads, end, decay_dim]
    state = chunk.state.view(net.num_heads, net.key_dim, net.value_dim)

    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        """What vectors [rows, heads, key_dim] of new rows read of the state, and their weights of the chunk's
        rows."""
        x = x.transpose(0, 1)
        if net.decay_dim == 1:
            return start[:, within:] * (x @ state), left[:, within:, :, 0] * (x @ k.permute(1, 2, 0))
        weights = torch.einsum("hpd,hpjd,jhd->hpj", x, left[:, within:], k)
        return (start[:, within:] * x) @ state, weights

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
        weighted = left[:, -1] * k.transpose(0, 1)  # [heads, end, key_dim]
        chunk.next_state.copy_((start[:, -1, :, None] * state + weighted.transpose(1, 2) @ u).flatten())
    outputs = outputs.transpose(0, 1)
    normed = outputs * torch.rsqrt(outputs.square().mean(-1, keepdim=True) + net.eps) * net.norm
    return normed.flatten(1) * (gates.sigmoid() if net.has_sigmoid_gates else F.silu(gates))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)
