"""Checks a fallback model at load: two texts, in chunks and in one batch, against each text alone without a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock_server.device.attention.interface import StepBatch
from penstock_server.errors import ConfigError
from penstock_server.models.interface import CausalModel, LoadOptions

# Norm of the difference, relative to the logits' norm. A hidden state or a shifted position makes it about 1.
_TOLERANCE = 1e-3
_ROUNDED_TOLERANCE = 0.1  # in 16-bit dtypes, where rounding sends some tokens to other experts
_LENGTHS = (9, 7)
_STEPS = (((0, 4), (0, 0)), ((4, 6), (0, 3)), ((6, 9), (3, 7)))  # for each text the range of positions


def check_logits(model: CausalModel, own_logits: Callable[[Tensor], Tensor], options: LoadOptions) -> None:
    """Raises ConfigError if the model's memory is more than attention over our cache. Leaves a cache of some blocks.

    own_logits: [tokens] → [tokens, vocab] without the cache.
    """
    texts = [
        (torch.arange(length, device=options.device) * 7 + 11 * (index + 1)) % model.traits.vocab_size
        for index, length in enumerate(_LENGTHS)
    ]
    expected = torch.cat([own_logits(text) for text in texts]).float()
    blocks = -(-max(_LENGTHS) // options.block_tokens)
    model.allocate_cache(blocks * len(texts))
    found: list[list[Tensor]] = [[] for _ in texts]
    for step in _STEPS:
        batch = _batch(texts, step, blocks, options)
        logits = model.logits(model.forward(batch))
        for rows, part in zip(found, logits.split([stop - start for start, stop in step]), strict=True):
            rows.append(part)
    given = torch.cat([row for rows in found for row in rows]).float()
    difference = float((given - expected).norm() / expected.norm())
    tolerance = _TOLERANCE if options.dtype == torch.float32 else _ROUNDED_TOLERANCE
    if not difference <= tolerance:
        raise ConfigError(
            f"its logits for a text depend on chunks and on other texts in the batch (they differ by {difference:.2g} "
            f"of their norm, at most {tolerance:g} is allowed), so it keeps more than keys and values"
        )


def _batch(texts: list[Tensor], step: tuple[tuple[int, int], ...], blocks: int, options: LoadOptions) -> StepBatch:
    """A step that samples every row. Each text has `blocks` blocks."""
    device, parts = options.device, [part for part in enumerate(step) if part[1][0] < part[1][1]]
    positions = torch.cat([torch.arange(start, stop, device=device) for _, (start, stop) in parts])
    counts = [stop - start for _, (start, stop) in parts]
    owners = torch.tensor([owner for owner, _ in parts], device=device)
    bases = torch.repeat_interleave(owners, torch.tensor(counts, device=device)) * blocks * options.block_tokens
    tables = owners[:, None] * blocks + torch.arange(blocks, device=device)
    return StepBatch(
        token_ids=torch.cat([texts[owner][start:stop] for owner, (start, stop) in parts]),
        positions=positions,
        slots=bases + positions,
        query_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device),
        context_lens=torch.tensor([stop for _, (_, stop) in parts], dtype=torch.int32, device=device),
        block_tables=tables.int().contiguous(),
        sample_rows=torch.arange(len(positions), device=device),
        max_query_tokens=max(counts),
        max_context_tokens=max(stop for _, (_, stop) in parts),
    )
