"""The embedded model in transformers, loaded once for all tests that compare with it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


@functools.cache
def model_folder() -> Path:
    """The folder of the prepared embedded model."""
    line = subprocess.run(
        [sys.executable, "-m", "penstock_server.prepare"], capture_output=True, text=True, check=True
    ).stdout
    return Path(json.loads(line)["folder"])


@functools.cache
def reference() -> tuple[Any, Any]:
    """(model, tokenizer) from the GGUF file that the server uses: the weights are rounded to bf16, as the server's are,
    and all else is float32, which torch multiplies ten times as fast on CPUs that have no instruction for bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.bfloat16)
    # `model.float()` refuses a model that was read from GGUF, although its weights are no longer quantized.
    return torch.nn.Module.float(model).eval(), AutoTokenizer.from_pretrained(folder)
