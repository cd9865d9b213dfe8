"""Assignment of tokens to images, for models whose images are attended to (`vision/states.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock_server.engine.host_batch import HostBatch, HostCrossAttentionImages, Rows
from penstock_server.vision.encoder import PlacedImage


def cross_attention_images(
    batch: HostBatch, images: Sequence[Sequence[PlacedImage]], computed: Rows
) -> HostCrossAttentionImages | None:
    """What the tokens of a step see, which advances each sequence from `computed` tokens on. images, computed
    [sequences]. None: no token sees an image."""
    seen = [
        (placed.group, placed.num_seen, range(max(begin, placed.offset) + shift, min(end, stop) + shift))
        for of_sequence, begin, end, shift in zip(
            images,
            computed.tolist(),
            batch.context_lens.tolist(),
            (batch.query_starts[:-1] - computed).tolist(),
            strict=True,
        )
        # An image is seen up to the next one.
        for placed, stop in zip(of_sequence, [*(placed.offset for placed in of_sequence[1:]), end], strict=False)
        if placed.group is not None and max(begin, placed.offset) < min(end, stop)
    ]
    if not seen:
        return None
    groups = list(dict.fromkeys(group for group, _, _ in seen))
    source_lens = np.array([num_seen for _, num_seen, _ in seen], np.int32)
    counts = np.array([len(rows) for _, _, rows in seen])
    rows = np.concatenate([np.arange(rows.start, rows.stop) for _, _, rows in seen])
    context_lens = np.maximum(source_lens, counts).astype(np.int32)  # attention wants all queries in a context
    block_tokens = groups[0].pool.block_tokens
    tables = np.zeros((len(seen), -(-int(context_lens.max()) // block_tokens)), np.int32)
    for table, (group, num_seen, _) in zip(tables, seen, strict=True):
        num_blocks = -(-num_seen // block_tokens)
        table[:num_blocks] = group.blocks[:num_blocks]
    of_rows = HostBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=context_lens,
        block_tables=tables,
        sample_rows=batch.sample_rows[:0],
        max_query_tokens=int(counts.max()),
        max_context_tokens=int(context_lens.max()),
        source_lens=source_lens,
    )
    written = [(group, group.take_states()) for group in groups if group.unwritten]
    slots = [group.slots for group, _ in written]
    return HostCrossAttentionImages(
        rows,
        of_rows,
        [image for _, images in written for image in images],
        np.concatenate(slots) if slots else np.zeros(0, np.int64),
    )
