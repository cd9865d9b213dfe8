"""Every supported `model_type` of `config.json`, and what builds its spec and knows its checkpoints' names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock_server.models import (
    bloom,
    cohere,
    dbrx,
    deepseek,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    moe,
    mpt,
    olmo,
    opt,
    phi,
    stablelm,
)
from penstock_server.models.config import Config
from penstock_server.models.spec import ModelSpec, NameMap

ARCHITECTURES: dict[str, Callable[[Config], tuple[ModelSpec, NameMap]]] = {
    "bloom": bloom.bloom,
    "cohere": cohere.cohere,
    "dbrx": dbrx.dbrx,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "falcon": falcon.falcon,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gpt2": gpt2.gpt2,
    "gpt_bigcode": gpt2.gpt_bigcode,
    "gpt_neox": gpt_neox.gpt_neox,
    "gpt_oss": gpt_oss.gpt_oss,
    "granitemoe": moe.granitemoe,
    "granitemoeshared": moe.granitemoeshared,
    "gptj": gptj.gptj,
    "llama": llama.llama,
    "mistral": llama.mistral,
    "mixtral": moe.mixtral,
    "mpt": mpt.mpt,
    "olmoe": moe.olmoe,
    "olmo2": olmo.olmo2,
    "opt": opt.opt,
    "phi": phi.phi,
    "phimoe": moe.phimoe,
    "phi3": phi.phi3,
    "qwen2": llama.qwen2,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_moe": moe.qwen3_moe,
    "stablelm": stablelm.stablelm,
}


def read_spec(folder: Path) -> tuple[ModelSpec, NameMap]:
    """Raises ConfigError when the folder's model is of no supported architecture, or asks for something that is not."""
    config = Config.read(folder)
    model_type = config.require("model_type", str)
    build = ARCHITECTURES.get(model_type)
    if build is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise config.refuse(f"model type {model_type!r} is not supported; supported: {supported}")
    quantization = config.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise config.refuse(
            f"the checkpoint is quantized ({method}); supported are weights in float32, float16, bfloat16"
        )
    return build(config)
