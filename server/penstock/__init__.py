"""Penstock from Python: `LLM` starts the server on a private unix socket and sends it prompts.

Imports neither torch nor the server's own packages: the model runs in the server's processes.
"""

from penstock.async_llm import AsyncLLM
from penstock.batch_file import FileSummary
from penstock.errors import PenstockError, RequestError, SettingError, StartError, StoppedError
from penstock.llm import LLM
from penstock.lora import LoRARequest
from penstock.result import Chunk, Completion, Embedding, Result
from penstock.sampling import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from penstock.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "Embedding",
    "FileSummary",
    "GuidedDecodingParams",
    "LoRARequest",
    "PenstockError",
    "RequestError",
    "Result",
    "SamplingParams",
    "SettingError",
    "StartError",
    "StoppedError",
    "StructuredOutputsParams",
    "Tokenizer",
]

_INSTEAD = {
    "AsyncLLMEngine": "AsyncLLM, whose stream method yields the chunks of a generation",
    "AsyncEngineArgs": "the keyword arguments of AsyncLLM",
    "EngineArgs": "the keyword arguments of LLM",
    "LLMEngine": "LLM, or AsyncLLM",
    "BeamSearchParams": "SamplingParams: this server samples, and has no beam search",
    "PoolingParams": "LLM.embed(prompts, dimensions=…, normalize=…)",
    "TextPrompt": "a dict with prompt",
    "TokensPrompt": "a dict with prompt_token_ids",
}


def __getattr__(name: str) -> object:
    """vLLM's names that this package has not say what to use."""
    if name in _INSTEAD:
        raise ImportError(f"penstock has no {name}; use {_INSTEAD[name]}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
