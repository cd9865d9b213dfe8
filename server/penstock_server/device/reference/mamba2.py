"""Mamba 2 in plain torch, which computes the rows of a chunk together. Native kernels compute the same, row after
row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.mamba2 import Mamba2, num_blocks
from penstock_server.device.reference.gated_delta import decays_between
from penstock_server.device.state import CHUNK_TOKENS, RING_TOKENS, StateRows


class TorchMamba2:
    """Implements `PackedRecurrence`."""

    def __init__(self, net: Mamba2) -> None:
        self.net = net
        device, of_group = net.decay.device, net.num_heads // net.num_groups
        self._num_blocks = num_blocks(net.num_heads, net.num_groups)
        heads = torch.arange(net.num_heads, device=device)
        self._block_of = heads // of_group * self._num_blocks + heads % of_group // net.block_heads
        weights = torch.cat([net.conv, net.conv_bias[:, None]], 1)
        self._conv = self._in_blocks(weights.T).T.contiguous()  # [channels of the ring, width + 1]

    def __call__(self, inputs: Sequence[Tensor], slots: Tensor, of: StateRows) -> Tensor:
        (mixed,) = inputs
        outputs = mixed.new_empty((len(mixed), self.net.output_width))
        starts, ends, of_sequences = of.query_starts.tolist(), of.context_lens.tolist(), of.slots.tolist()
        for sequence, slot in enumerate(of_sequences):
            first, stop = starts[sequence], starts[sequence + 1]
            while first < stop:
                position = ends[sequence] - (stop - first)
                rows = slice(first, min(stop, first + CHUNK_TOKENS - position % CHUNK_TOKENS))
                outputs[rows] = self._advance(mixed[rows].float(), slots[slot], position)
                first = rows.stop
        return outputs

    def _advance(self, mixed: Tensor, slot: Tensor, position: int) -> Tensor:
        """The outputs [rows, heads * head_dim] of rows of one chunk, the first of which has this position."""
        net, layout = self.net, self.net.layout
        states = layout.states(slot[None])[0].view(2, net.num_heads, net.state_dim, net.head_dim)
        ring = layout.rows(slot[None])[0]
        chunk, within = divmod(position, CHUNK_TOKENS)
        end = within + len(mixed)
        rows = ring[chunk % 2 * CHUNK_TOKENS :][:end]  # the rows of this chunk
        values, keys = net.widths[0], net.num_groups * self._num_blocks * net.state_dim
        gates, dt = mixed[:, len(net.conv) :].split(net.widths[3:], 1)
        rows[within:, : layout.inputs] = self._in_blocks(mixed[:, : len(net.conv)])
        places = torch.arange(position - layout.window, position + len(mixed), device=ring.device)
        inputs = ring[places % RING_TOKENS, : layout.inputs].where((places >= 0)[:, None], 0.0)
        weights, bias = self._conv[:, None, :-1], self._conv[:, -1]
        x, b, c = F.silu(F.conv1d(inputs.T, weights, bias, groups=layout.inputs).T).split([values, keys, keys], 1)
        kept_b, kept_u, kept_decays = rows[:, layout.inputs :].split([keys, values, net.num_heads], 1)
        x = x.unflatten(1, (net.num_heads, net.head_dim))
        dt = F.softplus(dt * net.dt_factor + net.dt_bias).clamp(*net.dt_limits)
        kept_b[within:], kept_u[within:] = b, (dt[..., None] * x).flatten(1)
        kept_decays[within:] = (-net.decay * dt).exp()

        def of_heads(of_blocks: Tensor) -> Tensor:  # [rows, blocks * state_dim] → [heads, rows, state_dim]
            return of_blocks.unflatten(1, (-1, net.state_dim))[:, self._block_of].transpose(0, 1)

        every_b, every_c = of_heads(kept_b), of_heads(c)
        u = kept_u.unflatten(1, (net.num_heads, net.head_dim)).transpose(0, 1)  # [heads, end, head_dim]
        left = decays_between(kept_decays)  # [heads, end, end]
        start = kept_decays.cumprod(0).T[..., None]  # [heads, end, 1]
        state = states[chunk % 2] if chunk else torch.zeros_like(states[0])
        weights = left[:, within:] * (every_c @ every_b.transpose(1, 2))
        outputs = start[:, within:] * (every_c @ state) + weights @ u
        if end == CHUNK_TOKENS:
            weighted = left[:, -1:].transpose(1, 2) * u
            states[(chunk + 1) % 2] = start[:, -1:] * state + every_b.transpose(1, 2) @ weighted
        outputs = outputs.transpose(0, 1) + net.skip[:, None] * x
        return outputs.flatten(1) * F.silu(gates * net.gate_factor)

    def _in_blocks(self, channels: Tensor) -> Tensor:
        """[rows, x, B, C] → the same with B and C for each block."""
        x, b, c = channels.split(self.net.widths[:3], 1)
        wide = [
            each.unflatten(1, (-1, self.net.state_dim)).repeat_interleave(self._num_blocks, 1).flatten(1)
            for each in (b, c)
        ]
        return torch.cat([x, *wide], 1)
