"""Drafts from the multi-token prediction layer of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock_server.device.attention.interface import StepBatch
from penstock_server.engine.batch import with_images
from penstock_server.engine.drafting.pooled import NUM_PADDING_BLOCKS, Drafted
from penstock_server.engine.host_batch import HostBatch
from penstock_server.engine.transfer import upload
from penstock_server.models.decoder import Decoder
from penstock_server.models.mtp import MtpLayer
from penstock_server.vision.encoder import PlacedImage, image_tokens


class MtpHead:
    """The layer with the model's embedding and head, a KV pool, and a pool of the model's outputs. Each further draft
    applies the layer again, to its own output. Implements `Head`."""

    def __init__(self, model: Decoder, layer: MtpLayer, device: torch.device) -> None:
        self._model, self._layer, self._device = model, layer, device
        self._block_tokens = layer.attention.shape.block_tokens
        self.max_position_tokens = model.max_position_tokens
        output_bytes = self._block_tokens * model.traits.hidden_size * model.runtime.dtype.itemsize
        self.weight_bytes = NUM_PADDING_BLOCKS * output_bytes  # the layer's are counted with the model's
        self.kv_bytes_per_block = output_bytes + layer.attention.bytes_per_block()
        self.caches: list[Tensor] = []

    def allocate_cache(self, num_blocks: int) -> None:
        self.caches, self._model.taps.output_pool = [], None  # first: the old and the new pool may not fit together
        size = num_blocks + NUM_PADDING_BLOCKS, self._block_tokens, self._model.traits.hidden_size
        outputs = torch.zeros(size, dtype=self._model.runtime.dtype, device=self._device)
        self._model.taps.output_pool = outputs.flatten(0, 1)
        self.caches = [outputs, self._layer.attention.allocate(num_blocks)]

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        pass  # the rope tables are the model's

    def forward(
        self, batch: HostBatch, step: StepBatch, outputs: Tensor | None, images: Sequence[Sequence[PlacedImage]]
    ) -> Drafted:
        outputs_of_model, cache = self.caches[0].flatten(0, 1), self.caches[1]
        contexts = batch.context_lens.astype(np.int64)
        computed, following = contexts - np.diff(batch.query_starts), None
        if any(images):
            placed = with_images(batch, images, computed).copied_to(self._device)
            step = self._model.positioned(replace(placed, token_ids=step.token_ids))
            following = image_tokens(images, computed + 1, contexts + 1)
        context = self._model.context(step)
        assert self._model.embedding is not None, "the model is not split into stages"
        tokens = self._model.embedding(context)
        if following is not None:
            tokens[upload(following.places, self._device)] = following.embeddings[:, : tokens.shape[1]]
        found = self._layer(tokens, outputs_of_model[step.slots] if outputs is None else outputs, cache, context)
        return Drafted(self._model.logits(found).argmax(1), found)
