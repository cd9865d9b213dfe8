"""The builder of every natively supported `model_type`: from `config.json` to the spec and the checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock_server.models import (
    apertus,
    baichuan,
    bailing_hybrid,
    bamba,
    bart,
    bert,
    bloom,
    cohere,
    dbrx,
    deepseek,
    dots,
    ernie,
    exaone,
    falcon,
    falcon_h1,
    gemma,
    glm,
    gpt2,
    gpt_neo,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    helium,
    hunyuan,
    internlm,
    jais2,
    jamba,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba,
    mamba2,
    mimo,
    minimax,
    minimax_m2,
    mllama,
    modernbert,
    moe,
    mpt,
    nanochat,
    nemotron,
    nemotron_h,
    nomic_bert,
    olmo,
    olmo_hybrid,
    opt,
    persimmon,
    phi,
    qwen3_next,
    stablelm,
    starcoder2,
    t5,
    vision,
)
from penstock_server.models.config import Config
from penstock_server.models.context import scalings
from penstock_server.models.pooling import read_pooling
from penstock_server.models.spec import ModelSpec, NameMap
from penstock_server.vision.family import FAMILIES

ARCHITECTURES: dict[str, Callable[[Config], tuple[ModelSpec, NameMap]]] = {
    "RefinedWeb": falcon.refined_web,
    "RefinedWebModel": falcon.refined_web,
    "apertus": apertus.apertus,
    "arcee": llama.arcee,
    "baichuan": baichuan.baichuan,
    "bailing_hybrid": bailing_hybrid.bailing_hybrid,
    "bamba": bamba.bamba,
    "bart": bart.bart,
    "bloom": bloom.bloom,
    "chatglm": glm.chatglm,
    "codegen": gptj.codegen,
    "cohere": cohere.cohere,
    "cohere2": cohere.cohere2,
    "cohere2_moe": cohere.cohere2_moe,
    "cwm": llama.cwm,
    "dbrx": dbrx.dbrx,
    "deepseek": deepseek.deepseek,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "dots1": dots.dots1,
    "ernie4_5": llama.ernie4_5,
    "ernie4_5_moe": ernie.ernie4_5_moe,
    "exaone": exaone.exaone,
    "exaone4": exaone.exaone4,
    "exaone_moe": exaone.exaone_moe,
    "falcon": falcon.falcon,
    "falcon_h1": falcon_h1.falcon_h1,
    "falcon_mamba": mamba.falcon_mamba,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "glm": glm.glm,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    "glm4_moe_lite": glm.glm4_moe_lite,
    "gpt2": gpt2.gpt2,
    "gpt_bigcode": gpt2.gpt_bigcode,
    "gpt_neo": gpt_neo.gpt_neo,
    "gpt_neox": gpt_neox.gpt_neox,
    "gpt_oss": gpt_oss.gpt_oss,
    "gptj": gptj.gptj,
    "granite": granite.granite,
    "granitemoe": moe.granitemoe,
    "granitemoehybrid": moe.granitemoehybrid,
    "granitemoeshared": moe.granitemoeshared,
    "helium": helium.helium,
    "hunyuan_v1_dense": hunyuan.hunyuan,
    "hunyuan_v1_moe": hunyuan.hunyuan_moe,
    "hy_v3": hunyuan.hy_v3,
    "internlm": internlm.internlm,
    "internlm2": internlm.internlm2,
    "internlm3": internlm.internlm3,
    "jais2": jais2.jais2,
    "jamba": jamba.jamba,
    "kimi_k2": deepseek.kimi_k2,
    "kimi_linear": kimi_linear.kimi_linear,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "llama": llama.llama,
    "llama4_text": llama4.llama4,
    "m2m_100": bart.m2m_100,
    "mamba": mamba.mamba,
    "mamba2": mamba2.mamba2,
    "mbart": bart.mbart,
    "mimo_v2_flash": mimo.mimo_v2_flash,
    "minimax": minimax.minimax,
    "minimax_m2": minimax_m2.minimax_m2,
    "ministral": llama.ministral,
    "ministral3": llama.ministral3,
    "mistral": llama.mistral,
    "mixformer-sequential": phi.phi_msft,
    "mixtral": moe.mixtral,
    "mllama_text_model": mllama.mllama_text,
    "mpt": mpt.mpt,
    "mt5": t5.mt5,
    "nanochat": nanochat.nanochat,
    "nemotron": nemotron.nemotron,
    "nemotron_h": nemotron_h.nemotron_h,
    "olmo": olmo.olmo,
    "olmo2": olmo.olmo2,
    "olmo3": olmo.olmo3,
    "olmo_hybrid": olmo_hybrid.olmo_hybrid,
    "olmoe": moe.olmoe,
    "opt": opt.opt,
    "pegasus": bart.pegasus,
    "persimmon": persimmon.persimmon,
    "phi": phi.phi,
    "phi-msft": phi.phi_msft,
    "phi3": phi.phi3,
    "phimoe": moe.phimoe,
    "qwen2": llama.qwen2,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3": llama.qwen3,
    "qwen3_5_moe_text": qwen3_next.qwen3_5_moe_text,
    "qwen3_5_text": qwen3_next.qwen3_5_text,
    "qwen3_moe": moe.qwen3_moe,
    "qwen3_next": qwen3_next.qwen3_next,
    "seed_oss": llama.seed_oss,
    "smollm3": llama.smollm3,
    "solar_open": dots.solar_open,
    "stablelm": stablelm.stablelm,
    "starcoder2": starcoder2.starcoder2,
    "t5": t5.t5,
    "umt5": t5.umt5,
}


# Encoders without a decoder, whose outputs are pooled.
ENCODERS: dict[str, Callable[[Config], tuple[ModelSpec, NameMap]]] = {
    "bert": bert.bert,
    "modernbert": modernbert.modernbert,
    "nomic_bert": nomic_bert.nomic_bert,
    "roberta": bert.roberta,
    "xlm-roberta": bert.roberta,
}


# Their rope has no parameters in the configuration.
_UNSCALED = ("codegen", "gptj")


def read_spec(folder: Path) -> tuple[ModelSpec, NameMap]:
    """Raises ConfigError if the folder's architecture, or an option of it, is not supported."""
    config = Config.read(folder)
    model_type = config.require("model_type", str)
    build = ARCHITECTURES.get(model_type) or ENCODERS.get(model_type)
    if model_type in FAMILIES:
        build = partial(vision.build, text_models=ARCHITECTURES)
    if build is None:
        supported = ", ".join(sorted({*ARCHITECTURES, *ENCODERS, *FAMILIES}))
        raise config.refuse(f"model type {model_type!r} is not supported; supported: {supported}")
    spec, names = build(config)
    if model_type not in FAMILIES:
        _check_scaling(config, spec)
    pooling = read_pooling(folder)
    if pooling is not None:
        spec, names = spec.pooled(pooling), names.pooled()
    storage = config.get("expert_storage", "")  # our own key, in folders that were made from GGUF files
    return (spec.with_expert_storage(storage) if storage else spec), names


def _check_scaling(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError for a scaling that would have no effect."""
    named = scalings(config)
    has_rope = any(part.rope is not None for layer in spec.layers for part in layer.memories)
    if named and (not has_rope or spec.architecture in _UNSCALED):
        kinds = ", ".join(sorted(map(repr, named)))
        raise config.refuse(f"rope scaling {kinds} has no effect on a model of type {spec.architecture!r}; remove it")
