"""vLLM's names of `LLM`'s settings: translated where the meaning is the same, or refused with what to use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.errors import SettingError
from penstock.setting_name import translated


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"tensor_parallel_size": 2}, {"num_shard": 2}),
        (
            {"max_model_len": 4096, "gpu_memory_utilization": 0.8},
            {"max_total_tokens": 4096, "cuda_memory_fraction": 0.8},
        ),
        ({"dtype": "auto"}, {"dtype": None}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"quantization": None, "max_num_seqs": 8}, {"max_batch_size": 8}),
        ({"enforce_eager": True, "swap_space": 4, "disable_log_stats": True, "block_size": 16}, {}),
        ({"cpu_offload_gb": 0, "enable_lora": False, "tokenizer_mode": "auto", "task": "generate"}, {}),
        ({"tokenizer": "a/model"}, {}),
        ({"reasoning_parser": "qwen3", "max_cpu_loras": 2, "max_lora_rank": 8}, {"max_lora_rank": 8}),
        ({"max_logprobs": 30, "model_impl": "auto", "enable_prompt_embeds": False}, {"max_top_n_tokens": 30}),
        ({"num_shard": 2, "max_batch_size": 8}, {"num_shard": 2, "max_batch_size": 8}),
    ],
)
def test_settings_of_vllm_are_settings_here(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translated("a/model", given) == ours


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpu_offload_gb": 4}, "cpu_offload_gb is not a setting of LLM: weights stay where the model runs"),
        ({"enable_lora": True}, "enable_lora is not a setting of LLM: name the adapters"),
        ({"tokenizer": "another"}, "tokenizer is not a setting of LLM"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode is 'mistral', and can only be 'auto', 'hf' here"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is not a setting of LLM: give prompts as texts"),
        ({"logits_processors": ["a.B"]}, "logits_processors is not a setting of LLM: clients cannot bring code"),
        ({"num_gpu_blocks_override": 9}, "num_gpu_blocks_override is not a setting of LLM: use max_batch_total_tokens"),
        ({"num_shard": 1, "tensor_parallel_size": 2}, "tensor_parallel_size is another name of num_shard"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_use(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        translated("a/model", given)
    assert str(refused.value).startswith(message)
