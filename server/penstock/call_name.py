"""vLLM's names in calls and parameters that this package does not have: without effect, or refused with what to use.

A value that means what the server does anyway is accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_BEAMS = "this server samples, and has no beam search; use n"
_WITHOUT_EFFECT = {
    "sampling parameter": {
        "detokenize",
        "flat_logprobs",
        "output_kind",
        "skip_clone",
        "skip_reading_prefix_cache",
        "spaces_between_special_tokens",
    },
    "argument": {"chat_template_content_format", "tokenization_kwargs"},
}
_INSTEAD = {
    "sampling parameter": {
        "best_of": "use n, with logprobs, and choose among the outputs",
        "early_stopping": _BEAMS,
        "extra_args": "this server has no such extensions",
        "length_penalty": _BEAMS,
        "logits_processors": "use logit_bias, allowed_token_ids, bad_words or a constraint such as regex",
        "logprob_token_ids": "use logprobs=N",
        "repetition_detection": "use repetition_penalty",
        "use_beam_search": _BEAMS,
    },
    "argument": {
        "mm_processor_kwargs": "images are processed as the model's files say",
        "pooling_params": "use dimensions= and normalize=",
        "priority": "use SamplingParams(priority=…), where higher is earlier",
        "prompt_adapter_request": "use lora_request",
        "request_id": "results have the order of the prompts; AsyncLLM.stream yields the chunks of one generation",
        "truncate_prompt_tokens": "use SamplingParams(truncate_prompt_tokens=…), or shorter texts",
    },
}
METHODS = {
    "apply_model": "the model runs in the server's processes",
    "beam_search": f"generate: {_BEAMS}",
    "classify": "embed, for a model that makes vectors",
    "collective_rpc": "the model runs in the server's processes",
    "encode": "embed",
    "get_metrics": "the server `penstock` and its route /metrics",
    "llm_engine": "the methods of LLM, or AsyncLLM",
    "reset_prefix_cache": "a mapping with prompt and cache_salt: prompts of different salts share no cached prefix",
    "reward": "the server `penstock` and its route /rerank",
    "score": "the server `penstock` and its route /rerank",
    "set_tokenizer": "LLM(tokenizer_config_path=…), or prompts as token ids",
    "sleep": "close, and a new LLM",
    "start_profile": "a profiler of the server's processes",
    "stop_profile": "a profiler of the server's processes",
    "wake_up": "close, and a new LLM",
}
"""vLLM's methods of `LLM` that this package lacks, with what to use instead."""


def check(kind: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError for names that are not `known`, unless they have no effect. kind: `argument` or `sampling
    parameter`."""
    for name, value in given.items():
        if name in known or name in _WITHOUT_EFFECT[kind] or _is_neutral(name, value):
            continue
        if instead := _INSTEAD[kind].get(name):
            raise TypeError(f"{name} is no {kind} here: {instead}")
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
        hint = f"did you mean {', '.join(near)}?" if near else f"they are {', '.join(sorted(known))}"
        raise TypeError(f"unknown {kind} {name}; {hint}")


def _is_neutral(name: str, value: Any) -> bool:
    if not any(name in names for names in _INSTEAD.values()):
        return False
    is_empty = isinstance(value, (dict, list, tuple)) and not value
    return value is None or value is False or is_empty or (name, value) in _NEUTRAL


_NEUTRAL = (("best_of", 1), ("length_penalty", 1))
