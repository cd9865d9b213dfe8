"""Architectures with quantized weights: like the model with the dequantized weights, in less memory, and the same bits
on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import FACTORS, save_gguf
from model_driver import ModelDriver
from penstock_server.inspection.layout import lay_out
from penstock_server.inspection.reference import find_model
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.folder import gguf_folder
from quantized_checkpoints import Quantize, awq, bits_and_bytes, compressed, float8, gptq, hqq, save_quantized
from rank_threads import run_ranks
from test_quantized_checkpoints import CASES as CHECKPOINTS
from tiny_models import prompts

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# Every token goes to all experts, so that no rounding sends it to another one.
EXPERTS = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": None}
# Sizes of whole blocks of the types in FACTORS.
WIDE = {"hidden_size": 256, "intermediate_size": 256}
DEEPSEEK = {
    **SIZES,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
}
# Llamas with experts as DeepSeek V3 has them.
SIGMOID = {
    **GROUPED,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
}
ALL_OF_FOUR = {"num_experts": 4, "num_experts_per_tok": 4}
KIMI = {
    **{key: value for key, value in DEEPSEEK.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
    "num_local_experts": 4,
    "topk_group": 1,
    "n_group": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_heads": 4,
    "pad_token_id": None,
    "linear_head_dim": 32,
}
KIMI_METADATA = {
    "attention.head_count_kv": [0, 1],
    "attention.key_length": 64,
    "attention.value_length": 32,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 32,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
    "kda.head_dim": 32,
    "ssm.conv_kernel": 4,
}
# Value heads of a whole group each, so that ranks and formats cut between them.
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 128,
    "mamba_expand": 8,
    "mamba_n_heads": 32,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
}
MAMBA_METADATA = {
    "attention.head_count_kv": [0, 2],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 512,
    "rope.scaling.finetuned": False,
    "expert_count": None,
}
JAMBA = {
    "num_experts": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_dt_rank": 32,
    "mamba_d_state": 16,
    "rms_norm_eps": 0.1,
}
JAMBA_METADATA = {
    "attention.head_count_kv": [0, 2],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 128,
}
SHORT_CONV_METADATA = {
    "attention.head_count_kv": [0, 2],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "shortconv.l_cache": 3,
}
MINISTRAL3_METADATA = {
    "attention.temperature_scale": 0.1,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 16384,
    "rope.scaling.yarn_log_multiplier": 1.0,
}
SHORT_CONV = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}


@dataclass(frozen=True)
class Architecture:
    config: str
    values: dict[str, Any]
    gguf: str = ""  # its name in GGUF files; empty: it is not tested in them
    num_ranks: int = 2
    metadata: dict[str, Any] = field(default_factory=dict)  # in the architecture's section of GGUF files
    rounding: float = 0.08  # the largest error of the logits, as a share of them


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig", GROUPED, "llama"),
    "qwen2": Architecture("Qwen2Config", GROUPED, "qwen2"),
    "gemma2": Architecture("Gemma2Config", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}, "gemma2"),
    "mixtral": Architecture("MixtralConfig", EXPERTS, "llama"),
    "mixtral-cut": Architecture(
        "MixtralConfig", EXPERTS | {"num_local_experts": 2, "num_experts_per_tok": 2}, "llama", 3
    ),
    "deepseek-v2": Architecture("DeepseekV2Config", DEEPSEEK),
    "gpt-neox": Architecture("GPTNeoXConfig", SIZES, "gptneox"),
    "qwen3-5": Architecture("Qwen3_5TextConfig", GROUPED | DELTA, "qwen35", 3, rounding=0.12),
    "granitehybrid": Architecture(
        "GraniteMoeHybridConfig", GROUPED | MAMBA, "granitehybrid", 3, MAMBA_METADATA, rounding=0.12
    ),
    "lfm2": Architecture("Lfm2Config", GROUPED | SHORT_CONV, "lfm2", metadata=SHORT_CONV_METADATA, rounding=0.12),
    "jamba": Architecture("JambaConfig", GROUPED | JAMBA, "jamba", 3, JAMBA_METADATA, rounding=0.12),
    "kimi-linear": Architecture("KimiLinearConfig", KIMI, "kimi-linear", 2, KIMI_METADATA, rounding=0.12),
    "llama-wide": Architecture("LlamaConfig", GROUPED | WIDE, "llama"),
    "mixtral-wide": Architecture("MixtralConfig", EXPERTS | WIDE, "llama"),
}
# New combinations of layers that others have. Each has one format of either kind of file.
COMBINED = {
    "cohere2-moe": Architecture("Cohere2MoeConfig", GROUPED | ALL_OF_FOUR | {"head_dim": 16, "num_shared_experts": 1}),
    "dots1": Architecture("Dots1Config", SIGMOID | {"n_shared_experts": 1}, "dots1"),
    "ernie4-5-moe": Architecture(
        "Ernie4_5_MoeConfig",
        GROUPED | {"moe_num_experts": 4, "moe_k": 4, "moe_num_shared_experts": 1, "moe_intermediate_size": 64},
        "ernie4_5-moe",
        metadata={"expert_shared_count": 1, "leading_dense_block_count": 1},
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeConfig",
        GROUPED | ALL_OF_FOUR | {"moe_intermediate_size": 64},
        "exaone-moe",
        metadata={"expert_shared_count": 1},
    ),
    "glm4-moe-lite": Architecture(
        "Glm4MoeLiteConfig",
        {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"} | {"q_lora_rank": 32},
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1Config", GROUPED | {"num_experts": 4, "moe_topk": 4, "head_dim": 16}, "hunyuan-moe"
    ),
    "hy-v3": Architecture("HYV3Config", GROUPED | ALL_OF_FOUR | {"head_dim": 16, "moe_intermediate_size": 64}),
    "mimo-v2-flash": Architecture("MiMoV2FlashConfig", SIGMOID | {"head_dim": 24, "v_head_dim": 16}),
    "minimax-m2": Architecture(
        "MiniMaxM2Config", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 16}, "minimax-m2"
    ),
    "nanochat": Architecture("NanoChatConfig", GROUPED),
    "solar-open": Architecture("SolarOpenConfig", SIGMOID | {"n_shared_experts": 1, "head_dim": 16}),
    "ministral3": Architecture(
        "Ministral3Config", GROUPED | {"head_dim": 16}, "mistral3", metadata=MINISTRAL3_METADATA
    ),
    "glm4-moe": Architecture("Glm4MoeConfig", SIGMOID | {"n_shared_experts": 1, "use_qk_norm": True}, "glm4moe"),
}
ARCHITECTURES |= COMBINED
FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        gptq(4, 32, symmetric=False, in_order=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "w4a16": compressed(4, "group", 32, symmetric=True),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bits_and_bytes("int8")),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("nf4")),
    "hqq": ({"quant_method": "hqq"}, hqq(4, 32)),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, float8("block")),
}
# The slow tests have every other format that one architecture is tested with. Its "dynamic" names this one's layers.
MORE_FORMATS = {name: case for name, case in CHECKPOINTS.items() if name not in {*FORMATS, "gptq dynamic"}}
# These architectures differ from others in what the formats do not touch: here they have one format of each layout.
FEW = ("qwen2", "mixtral-cut", "gpt-neox", "granitehybrid", "jamba", "kimi-linear", "lfm2", "qwen3-5")
FORMATS_OF_FEW = ("gptq", "nf4", "fp8 in blocks", "Q4_0")
FLAGS, GGUF, MORE_GGUF = ("eetq", "fp8 at load"), ("Q4_0", "Q5_1", "MXFP4"), ("Q4_1", "Q5_0", "Q8_0")
MORE_OF_WIDE = ("Q2_K", "Q3_K", "Q5_K", "IQ4_NL")


def kinds_of(name: str) -> tuple[str, ...]:
    if name.endswith("-wide"):
        return tuple(FACTORS)
    if name in COMBINED:
        return ("gptq", "Q4_0") if ARCHITECTURES[name].gguf else ("gptq",)
    return (*FORMATS, *MORE_FORMATS, *FLAGS, *((*GGUF, *MORE_GGUF) if ARCHITECTURES[name].gguf else ()))


def is_slow(name: str, kind: str) -> bool:
    return kind in {*MORE_FORMATS, *MORE_GGUF, *MORE_OF_WIDE} or (name in FEW and kind not in FORMATS_OF_FEW)


CASES = [
    pytest.param(name, kind, marks=pytest.mark.slow if is_slow(name, kind) else ())
    for name in ARCHITECTURES
    for kind in kinds_of(name)
    if (name, kind) != ("deepseek-v2", "awq gemv_fast")  # its groups of 64 are wider than the latent
]


def make_model(name: str) -> transformers.PreTrainedModel:
    """All tensors are random, and keep the scale of activations."""
    case = ARCHITECTURES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, case.config)(**case.values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3))
            else:
                parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
    return model.eval()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes the checkpoint of an architecture in a format, or returns it if it is made already."""
    models = {name: make_model(name) for name in ARCHITECTURES}
    made: dict[tuple[str, str], Path] = {}

    def folder(name: str, kind: str) -> Path:
        if (name, kind) not in made:
            path = tmp_path_factory.mktemp("quantized")
            if kind in {*GGUF, *MORE_GGUF, *FACTORS}:
                case = ARCHITECTURES[name]
                metadata = {f"{case.gguf}.{key}": value for key, value in case.metadata.items()}
                path = gguf_folder(save_gguf(models[name], path / "model.gguf", case.gguf, kind, **metadata))
            elif kind in FLAGS:
                models[name].save_pretrained(path)
            else:
                path, _ = save_quantized(models[name], path, *{**FORMATS, **MORE_FORMATS}[kind])
            made[name, kind] = path
        return made[name, kind]

    return folder


def logits(
    folder: Path, group: RankGroup, *chunks: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[torch.Tensor | None, int]:
    """The logits of a text in these chunks [tokens, vocab], on rank 0, and the bytes of the weights. options: of
    `LoadOptions`."""
    model = load_model(LoadOptions(folder, dtype, torch.device("cpu"), 16, **options), group)
    driver = ModelDriver(model, 16, num_blocks=2)
    sequence = driver.sequence(prompts(1, [23], 131)[0])
    found = [driver.step([(sequence, count)], every_row=True) for count in chunks]
    rows = [each for each in found if each is not None]
    return torch.cat(rows).float() if rows else None, model.weight_bytes


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_architecture_is_served_in_every_format(
    name: str, kind: str, folder_of: Callable[[str, str], Path]
) -> None:
    folder, case, flag = folder_of(name, kind), ARCHITECTURES[name], kind.split()[0] if kind in FLAGS else ""
    found, num_bytes = logits(folder, RankGroup(), 23, quantize=flag)
    dense, dense_bytes = logits(folder, RankGroup(), 23, dequantize=True)
    assert found is not None
    assert dense is not None
    # At load, weights lose bits here. 8-bit floats keep four of them, integers seven.
    assert (found - dense).norm() < (0.15 if kind == "fp8 at load" else case.rounding) * dense.norm()
    assert num_bytes < dense_bytes * 0.8
    chunked, _ = logits(folder, RankGroup(), 7, 16, quantize=flag)
    assert torch.equal(found, chunked)
    ranks = run_ranks(case.num_ranks, lambda group: logits(folder, group, 23, quantize=flag))
    assert torch.equal(found, ranks[0][0])
    if kind not in FLAGS:
        assert stated_bytes(folder, 1) == [num_bytes]
        assert stated_bytes(folder, case.num_ranks) == [rank_bytes for _, rank_bytes in ranks]


def test_inputs_have_8_bits_by_default_and_16_are_closer(folder_of: Callable[[str, str], Path]) -> None:
    folder = folder_of("llama", "Q4_0")
    dense, _ = logits(folder, RankGroup(), 23, dtype=torch.float32, dequantize=True)
    found = {bits: logits(folder, RankGroup(), 23, dtype=torch.float32, activation_bits=bits)[0] for bits in (8, 16)}
    by_default, _ = logits(folder, RankGroup(), 23, dtype=torch.float32)
    assert dense is not None
    assert by_default is not None
    assert found[16] is not None
    assert torch.equal(by_default, found[8])
    assert (found[16] - dense).norm() * 10 < (by_default - dense).norm()


def stated_bytes(folder: Path, num_ranks: int) -> list[int]:
    """The bytes of each rank's weights as `penstock check` states them."""
    files = find_model(str(folder))
    layout = lay_out(files, folder, num_ranks, "bfloat16", memory_fraction=0.9)
    assert layout is not None
    return [rank.weight_bytes for rank in layout.ranks]
