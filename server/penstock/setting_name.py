"""vLLM's names of settings, for code that was written for its `LLM`: what they are called here, or why they are not.

A setting of vLLM that changes no answer has no effect. One that would change what is served is translated, or refused
with what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import SettingError

_RENAMED = {
    "tensor_parallel_size": "num_shard",
    "data_parallel_size": "replicas",
    "max_model_len": "max_total_tokens",
    "gpu_memory_utilization": "cuda_memory_fraction",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_batch_prefill_tokens",
    "enable_prefix_caching": "prefix_caching",
    "quantization": "quantize",
    "max_loras": "max_lora_slots",
    "download_dir": "huggingface_hub_cache",
}
# How the engine works, not what it answers.
_WITHOUT_EFFECT = {
    "block_size",
    "compilation_config",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enforce_eager",
    "max_seq_len_to_capture",
    "swap_space",
}
_INSTEAD = {
    "cpu_offload_gb": "weights stay where the model runs; use more ranks (num_shard) or a quantized checkpoint",
    "enable_lora": "name the adapters: lora_adapters='NAME=FOLDER,…'",
    "hf_overrides": "edit the model folder's config.json; rope_scaling and rope_factor scale positions",
    "hf_token": "set the environment variable HF_TOKEN",
    "skip_tokenizer_init": "the server always reads the tokenizer; give prompts as token ids",
    "speculative_config": "use speculate=N, and speculative_model for a draft model",
    "tokenizer": "the tokenizer is the model folder's own; tokenizer_config_path replaces its configuration",
}
# Values that mean what the server does anyway.
_NEUTRAL = {
    "cpu_offload_gb": (0,),
    "enable_lora": (False,),
    "hf_overrides": ({},),
    "load_format": ("auto", "safetensors"),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed"),
    "tokenizer_mode": ("auto", "hf"),
}
_DTYPES = {"auto": None, "half": "float16", "float": "float32"}


def translated(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under this server's names. Raises SettingError for one of vLLM's that cannot be had, and for two names
    of one setting."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        if name == "tokenizer" and value == model:
            continue
        if name in _INSTEAD:
            raise SettingError(f"{name} is not a setting of LLM: {_INSTEAD[name]}")
        if name in _NEUTRAL:
            allowed = ", ".join(map(repr, _NEUTRAL[name]))
            raise SettingError(f"{name} is {value!r}, and can only be {allowed} here")
        ours = _RENAMED.get(name, name)
        if ours in found:
            raise SettingError(f"{name} is another name of {ours}, which is given too")
        found[ours] = _value(ours, value)
    return found


def _value(name: str, value: Any) -> Any:
    if name == "dtype":
        # torch's types, too: torch.bfloat16.
        text = str(value).removeprefix("torch.")
        return _DTYPES.get(text, text)
    return value
