"""The vision tower and its projector, as transformers runs them, without the text model."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock_server.device.native.build import find_build
from penstock_server.errors import ConfigError
from penstock_server.vision.family import Arrays, ImageFamily, image_token_id
from penstock_server.weights.format import transformers_renamings
from penstock_server.weights.loader import shortened

# The instruction sets of CPUs that multiply 16-bit types.
_MULTIPLYING = {torch.bfloat16: ("amx", "avx512-bf16"), torch.float16: ("amx",)}


def tower_dtype(dtype: torch.dtype, device: torch.device, cpu_isa: str = "") -> torch.dtype:
    """What the tower of a model in this data type computes in. On a CPU, it follows from the instruction set of the
    native kernels, as of `find_build`, so that it is the same with one `--cpu-isa`.

    PERF: without instructions for them, torch takes several times as long for products of bfloat16 or float16 as for
    those of float32 (docs/adr/images.md).
    """
    if device.type != "cpu":
        return dtype
    build = find_build(device, dtype, cpu_isa)
    return dtype if build is not None and build.isa.name in _MULTIPLYING.get(dtype, ()) else torch.float32


class VisionTower:
    """Computes an image's embeddings. Every rank has all of it."""

    def __init__(
        self, model: Any, family: ImageFamily, dtype: torch.dtype, computed_in: torch.dtype, device: torch.device
    ) -> None:
        """model: of transformers, in the dtype that it computes in; its text model is dropped. dtype: of the
        embeddings."""
        if family.writer:
            model = model.get_submodule(family.writer)
        else:
            delattr(getattr(model, "model", model), family.text_model)
            if hasattr(model, "lm_head"):
                del model.lm_head
        self._model = model.eval().requires_grad_(False).to(device)
        self._family = family
        self._dtype = dtype
        self.computed_in = computed_in
        self.device = device
        self.num_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])

    @classmethod
    def load(
        cls, folder: Path, config: Any, family: ImageFamily, dtype: torch.dtype, device: torch.device, cpu_isa: str = ""
    ) -> VisionTower:
        """config: of transformers. dtype: of the embeddings. cpu_isa: as of `tower_dtype`. Raises ConfigError if the
        checkpoint lacks a tensor or has others than it should."""
        from transformers import AutoModelForMultimodalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # it would report every tensor of the text model
        # No text: its tensors have no place in this model, and are not read.
        config = copy.deepcopy(config)
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
        if getattr(text, "layer_types", None):
            text.layer_types = []
        config.tie_word_embeddings = text.tie_word_embeddings = False
        if hasattr(config, "audio_config"):
            config.audio_config.num_blocks = 0
        computed_in = tower_dtype(dtype, device, cpu_isa)
        model, info = AutoModelForMultimodalLM.from_pretrained(
            folder,
            config=config,
            dtype=computed_in,
            local_files_only=True,
            use_safetensors=True,
            weights_only=True,
            ignore_mismatched_sizes=True,
            key_mapping=transformers_renamings(folder) or None,
            output_loading_info=True,
        )
        of_tower = re.compile("|".join(family.tower))
        for key, what in (("missing", "lacks"), ("mismatched", "has other shapes of"), ("unexpected", "has unknown")):
            found = [name if isinstance(name, str) else name[0] for name in info[f"{key}_keys"]]
            if names := [name for name in found if of_tower.fullmatch(name)]:
                raise ConfigError(f"{folder}: the checkpoint {what} tensors of the vision tower: {shortened(names)}")
        return cls(model, family, dtype, computed_in, device)

    def __call__(self, arrays: Arrays) -> Tensor:
        """What the image processor made of one image → its embeddings [image tokens, hidden]; with features for n
        layers [image tokens, (1 + n) * hidden]; of attended images, their states [states, hidden]."""
        inputs = {}
        for name in self._family.inputs:
            if name in arrays:
                tensor = torch.from_numpy(arrays[name]).to(self.device)
                inputs[name] = tensor.to(self.computed_in) if tensor.is_floating_point() else tensor
        if self._family.uses_cross_attention:
            return self._states(inputs).to(self._dtype)
        if self._family.writer:
            return self._written(inputs, int(arrays["num_image_tokens"].item()))
        made = self._model.get_image_features(**inputs)
        if self._family.has_layer_features:
            features = {layer: _joined(part) for layer, part in made.deepstack_features}
            features.setdefault(0, torch.zeros_like(next(iter(features.values()))))
            return torch.cat([features[layer] for layer in sorted(features)], dim=1).to(self._dtype)
        embeddings = made.get("pooler_output")
        if embeddings is None:  # Llama 4 projects them apart
            embeddings = self._model.multi_modal_projector(made.last_hidden_state)
        parts = (embeddings, *made.get("deepstack_features", ()))
        return torch.cat([_joined(part) for part in parts], dim=1).to(self._dtype)

    def _written(self, inputs: dict[str, Tensor], num_tokens: int) -> Tensor:
        """[image tokens, hidden], written over those of a prompt that has no other tokens."""
        config = self._model.config
        ids = torch.full((1, num_tokens), image_token_id(config), device=self.device)
        blank = torch.zeros((1, num_tokens, config.hidden_size), dtype=self.computed_in, device=self.device)
        written: Tensor = self._model(ids, blank, **inputs)[0]
        return written.to(self._dtype)

    def _states(self, inputs: dict[str, Tensor]) -> Tensor:
        """[tiles * patches, hidden], without the tiles that only fill the input."""
        (of_tiles,) = self._model.model.vision_model(**inputs).last_hidden_state.flatten(0, 1)
        num_tiles = int(inputs["aspect_ratio_mask"].sum())
        projected: Tensor = self._model.model.multi_modal_projector(of_tiles[:num_tiles].flatten(0, 1))
        return projected


def _joined(features: Any) -> Tensor:
    """[image tokens, hidden], from one tensor or one for each part of the image."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).contiguous()
