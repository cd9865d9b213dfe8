"""The ropes of a model of transformers whose frequencies depend on the longest text of a batch.

Cached keys are shared by prompts of any length, so their frequencies are fixed to those for the longest sequence that
is served, as in our decoders (docs/adr/rope-and-context.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock_server.errors import ConfigError

_BATCH_KINDS = ("dynamic", "longrope")
_FIXED = "default"  # the kind whose frequencies transformers leaves as they are


@dataclass(frozen=True, slots=True)
class BatchRope:
    """A rope, or that of one layer type, whose frequencies transformers would change from step to step."""

    module: Any
    kind: str
    layer_type: str | None  # None: the module has one rope for all layers

    def fix(self, max_sequence_tokens: int) -> None:
        """Sets the frequencies to those that transformers uses for a text of this length."""
        compute = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS[self.kind]
        prefix, options = "", {}
        if self.layer_type is not None:
            prefix, options = f"{self.layer_type}_", {"layer_type": self.layer_type}
        old = getattr(self.module, f"{prefix}inv_freq")
        new, magnitude = compute(self.module.config, old.device, seq_len=max_sequence_tokens, **options)
        self.module.register_buffer(f"{prefix}inv_freq", new.to(old.dtype), persistent=False)
        setattr(self.module, f"{prefix}attention_scaling", magnitude)


def take_batch_ropes(model: Any) -> tuple[BatchRope, ...]:
    """The ropes of the model that depend on the batch, which transformers no longer changes from now on. They still
    need `BatchRope.fix`. Raises ConfigError for a rope whose frequencies cannot be set."""
    found = tuple(_batch_ropes(model))
    for rope in found:
        kinds = rope.module.rope_type
        rope.module.rope_type = _FIXED if rope.layer_type is None else {**kinds, rope.layer_type: _FIXED}
    return found


def _batch_ropes(model: Any) -> Iterator[BatchRope]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind not in _BATCH_KINDS:
                continue
            if not hasattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"):
                raise ConfigError(f"its rope scaling {kind!r} depends on the longest text of a batch")
            yield BatchRope(module, kind, layer_type)
