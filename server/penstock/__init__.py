"""Penstock from Python: `LLM` starts the server on a private unix socket and sends it prompts.

Imports neither torch nor the server's own packages: the model runs in the server's processes.
"""

from penstock.async_llm import AsyncLLM
from penstock.batch_file import FileSummary
from penstock.errors import PenstockError, RequestError, SettingError, StartError, StoppedError
from penstock.llm import LLM
from penstock.result import Chunk, Completion, Embedding
from penstock.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "Embedding",
    "FileSummary",
    "PenstockError",
    "RequestError",
    "SamplingParams",
    "SettingError",
    "StartError",
    "StoppedError",
]
