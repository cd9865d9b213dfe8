"""Mamba 2 in plain torch, which computes the rows of a chunk together."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.mamba2 import Mamba2, num_blocks
from penstock_server.device.reference.chunk import Chunk, decays_between


def advance(net: Mamba2, inputs: list[Tensor], chunk: Chunk) -> Tensor:
    """The outputs [rows, heads * head_dim] of rows of one chunk."""
    layout, within, rows = net.layout, chunk.within, chunk.rows
    (mixed,) = inputs
    *_, gates, dt = mixed.split(net.widths, 1)
    given = mixed[:, net.columns]
    if net.conv is not None and net.conv_bias is not None:
        rows[within:, : layout.inputs] = given
        given = chunk.convolved(net.conv) + net.conv_bias
    values, keys = net.widths[0], (len(net.columns) - net.widths[0]) // 2
    x, b, c = F.silu(given).split([values, keys, keys], 1)
    kept_b, kept_u, kept_decays = rows[:, layout.inputs :].split([keys, values, net.num_heads], 1)
    x = x.unflatten(1, (net.num_heads, net.head_dim))
    if net.has_dt:
        dt = F.softplus(dt * net.dt_factor + net.dt_bias).clamp(*net.dt_limits)
    else:
        dt = mixed.new_ones((len(mixed), net.num_heads))
    kept_b[within:], kept_u[within:] = b, (dt[..., None] * x).flatten(1)
    kept_decays[within:] = (-net.decay * dt).exp()

    heads, of_group = torch.arange(net.num_heads, device=mixed.device), net.num_heads // net.num_groups
    blocks = heads // of_group * num_blocks(net.num_heads, net.num_groups) + heads % of_group // net.block_heads
    every_b, every_c = (each.unflatten(1, (-1, net.state_dim))[:, blocks].transpose(0, 1) for each in (kept_b, c))
    u = kept_u.unflatten(1, (net.num_heads, net.head_dim)).transpose(0, 1)  # [heads, end, head_dim]
    left = decays_between(kept_decays)  # [heads, end, end]
    start = kept_decays.cumprod(0).T[..., None]  # [heads, end, 1]
    state = chunk.state.view(net.num_heads, net.state_dim, net.head_dim)
    weights = left[:, within:] * (every_c @ every_b.transpose(1, 2))
    outputs = start[:, within:] * (every_c @ state) + weights @ u
    if chunk.next_state is not None:
        weighted = left[:, -1:].transpose(1, 2) * u
        chunk.next_state.copy_((start[:, -1:] * state + every_b.transpose(1, 2) @ weighted).flatten())
    outputs = outputs.transpose(0, 1) + net.skip[:, None] * x
    return outputs.flatten(1) * F.silu(gates * net.gate_factor) if net.has_gates else outputs.flatten(1)
