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
    "max_logprobs": "max_top_n_tokens",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_batch_prefill_tokens",
    "enable_prefix_caching": "prefix_caching",
    "quantization": "quantize",
    "max_loras": "max_lora_slots",
    "download_dir": "huggingface_hub_cache",
}
# How the engine works, not what it answers.
_WITHOUT_EFFECT = {
    "async_scheduling",
    "block_size",
    "compilation_config",
    "cuda_graph_sizes",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "disable_log_requests",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_auto_tool_choice",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enforce_eager",
    "guided_decoding_backend",
    "max_context_len_to_capture",
    "max_cpu_loras",
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "num_scheduler_steps",
    "preemption_mode",
    "ray_workers_use_nsight",
    "reasoning_parser",
    "structured_outputs_config",
    "swap_space",
    "tokenizer_pool_size",
    "tool_call_parser",
    "use_v2_block_manager",
    "worker_use_ray",
}
_INSTEAD = {
    "cpu_offload_gb": "weights stay where the model runs; use more ranks (num_shard) or a quantized checkpoint",
    "enable_lora": "name the adapters: lora_adapters='NAME=FOLDER,…'",
    "hf_overrides": "edit the model folder's config.json; rope_scaling and rope_factor scale positions",
    "enable_prompt_embeds": "give prompts as texts or token ids",
    "enable_sleep_mode": "close the LLM, and make a new one",
    "hf_token": "set the environment variable HF_TOKEN",
    "limit_mm_per_prompt": "the server's limits of images are settings of their own; see the page of flags",
    "logits_processors": "clients cannot bring code; use parameters such as logit_bias or regex",
    "num_gpu_blocks_override": "use max_batch_total_tokens",
    "num_speculative_tokens": "use speculate=N",
    "override_pooler_config": "pooling is as the model's files say",
    "pooler_config": "pooling is as the model's files say",
    "skip_tokenizer_init": "the server always reads the tokenizer; give prompts as token ids",
    "speculative_config": "use speculate=N, and speculative_model for a draft model",
    "tokenizer": "the tokenizer is the model folder's own; tokenizer_config_path replaces its configuration",
}
# Values that mean what the server does anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none", "embed"),
    "cpu_offload_gb": (0,),
    "device": ("auto",),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "hf_overrides": ({},),
    "load_format": ("auto", "safetensors"),
    "logits_processors": ([],),
    "model_impl": ("auto", "vllm"),
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
