"""LoRA adapters of a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """vLLM's way to name an adapter. The server is told at its start which adapters there are, so `lora_name` is one of
    `LLM(lora_adapters=…)`, and the other fields have no effect."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    base_model_name: str | None = None

    @staticmethod
    def name(given: LoRARequest | str | None) -> str | None:
        """The name of the adapter that a call asks for."""
        return given.lora_name if isinstance(given, LoRARequest) else given
