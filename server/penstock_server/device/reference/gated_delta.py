"""Gated delta networks in plain torch, which computes the rows of a chunk together. Native kernels compute the
same, row after row."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock_server.device.gated_delta import GatedDelta
from penstock_server.device.state import CHUNK_TOKENS, RING_TOKENS, StateRows

L2_EPSILON = 1e-6  # the one of transformers, which has no setting for it


class TorchGatedDelta:
    """Implements `PackedGatedDelta`."""

    def __init__(self, net: GatedDelta) -> None:
        self.net = net

    def __call__(self, mixed: Tensor, rates: Tensor, slots: Tensor, of: StateRows) -> Tensor:
        outputs = mixed.new_empty((len(mixed), self.net.widths[2]))
        starts, ends, of_sequences = of.query_starts.tolist(), of.context_lens.tolist(), of.slots.tolist()
        for sequence, slot in enumerate(of_sequences):
            first, stop = starts[sequence], starts[sequence + 1]
            while first < stop:
                position = ends[sequence] - (stop - first)
                rows = slice(first, min(stop, first + CHUNK_TOKENS - position % CHUNK_TOKENS))
                outputs[rows] = self._advance(mixed[rows].float(), rates[rows].float(), slots[slot], position)
                first = rows.stop
        return outputs

    def _advance(self, mixed: Tensor, rates: Tensor, slot: Tensor, position: int) -> Tensor:
        """The outputs [rows, heads * value_dim] of rows of one chunk, the first of which has this position."""
        net, layout = self.net, self.net.layout
        states = layout.states(slot[None])[0].view(2, net.num_heads, net.key_dim, net.value_dim)
        ring = layout.rows(slot[None])[0]
        chunk, within = divmod(position, CHUNK_TOKENS)
        end = within + len(mixed)
        rows = ring[chunk % 2 * CHUNK_TOKENS :][:end]  # the rows of this chunk
        new = rows[within:]
        queries, keys, values, gates = mixed.split(net.widths, 1)
        new[:, : layout.inputs] = mixed[:, : layout.inputs]
        places = torch.arange(position - layout.window, position + len(mixed), device=ring.device)
        inputs = ring[places % RING_TOKENS, : layout.inputs].where((places >= 0)[:, None], 0.0)
        inputs = F.silu(F.conv1d(inputs.T, net.conv[:, None], groups=layout.inputs).T)
        queries, keys, values = inputs.split(net.widths[:3], 1)
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

        group = net.num_heads // net.num_key_heads
        q = _unit(queries.unflatten(1, (-1, net.key_dim))).repeat_interleave(group, 1) * net.key_dim**-0.5
        k = kept_keys.repeat_interleave(group, 1)
        beta = strengths.sigmoid().T[..., None]  # [heads, rows, 1]
        left = _decays_between(kept_decays.squeeze(2))  # [heads, end, end]
        start = kept_decays[:, :, 0].cumprod(0).T[..., None]  # [heads, end, 1]
        state = states[chunk % 2] if chunk else torch.zeros_like(states[0])

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
        if end == CHUNK_TOKENS:
            weighted = left[:, -1:].transpose(1, 2) * u
            states[(chunk + 1) % 2] = start[:, -1:] * state + k.permute(1, 2, 0) @ weighted
        outputs = outputs.transpose(0, 1)
        normed = outputs * torch.rsqrt(outputs.square().mean(-1, keepdim=True) + net.eps) * net.norm
        return normed.flatten(1) * F.silu(gates)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def _decays_between(decays: Tensor) -> Tensor:
    """decays [rows, heads] → [heads, rows p, rows j]: the product of those behind row j up to row p; 0 for j > p."""
    steps = decays.T[:, :, None].expand(-1, -1, len(decays))
    is_behind = torch.ones_like(steps[0]).tril(-1).bool()
    return torch.where(is_behind, steps, 1.0).cumprod(1).tril()
