"""Mamba in plain torch, which computes the decays of a chunk together and its states row after row."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.mamba import MambaConv, MambaScan, num_parts, padded
from penstock_server.device.reference.chunk import Chunk


def convolve(net: MambaConv, inputs: list[Tensor], chunk: Chunk) -> Tensor:
    """The outputs [rows, channels] of rows of one chunk."""
    chunk.rows[chunk.within :, : net.channels] = inputs[0][:, : net.channels]
    return F.silu(chunk.convolved(net.conv) + net.bias)


def scan(net: MambaScan, inputs: list[Tensor], chunk: Chunk) -> Tensor:
    """The outputs [rows, channels] of rows of one chunk."""
    mixed, x, rates, steps = inputs
    channels, size, within = net.channels, net.state_dim * net.channels, chunk.within
    b, c = rates.chunk(2, 1)
    width = padded(channels)
    kept_dt, kept_u, kept_b = chunk.rows.split([width, width, num_parts(channels) * net.state_dim], 1)
    dt = F.softplus(steps + net.dt_bias)
    kept_dt[within:, :channels], kept_u[within:, :channels] = dt, dt * x
    kept_b[within:] = b.repeat(1, num_parts(channels))

    decays = (-net.decay * kept_dt[:, None, :channels]).exp()  # [rows of the chunk, state_dim, channels]
    added = kept_b[:, : net.state_dim, None] * kept_u[:, None, :channels]
    state, states = chunk.state[:size].view(net.state_dim, channels), []
    for decay, addend in zip(decays, added, strict=True):
        state = torch.addcmul(addend, decay, state)
        states.append(state)
    if chunk.next_state is not None:
        chunk.next_state[:size] = state.flatten()
    outputs = (c[..., None] * torch.stack(states[within:])).sum(1) + net.skip * x
    return outputs * F.silu(mixed[:, channels:])
