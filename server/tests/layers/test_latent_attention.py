"""Paged latent attention against the modules of transformers, which compute keys and values for every head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from native_builds import native_ops
from penstock_server.device.attention import ModelAttention, choose_attention
from penstock_server.device.attention.interface import Attention, StepBatch
from penstock_server.device.ops import Ops
from penstock_server.device.reference.ops import TorchOps
from penstock_server.device.triton import device as triton_device
from penstock_server.errors import ConfigError
from penstock_server.layers.context import BuildContext
from penstock_server.layers.interpreter import Interpreter
from penstock_server.layers.latent_attention import LatentAttentionBlock, LatentAttentionSpec
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.operation import Program
from penstock_server.layers.rope import RopeSpec, yarn_magnitude
from penstock_server.layers.shard import Shard
from penstock_server.layers.step import StepContext
from penstock_server.parallel import RankGroup
from penstock_server.weights.loader import Loader
from penstock_server.weights.location import Location
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from rank_threads import run_ranks
from test_attention import BLOCK_TOKENS, make_batch
from tested_device import has_triton_interpreter
from torch import Tensor

CPU = torch.device("cpu")
HIDDEN, HEADS, MAX_TOKENS = 40, 5, 128
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
}
SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
NAMES = {
    "q": "q_proj",
    "q_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "output": "o_proj",
}
ROPE = RopeSpec("default", 10000.0, 4, interleaved=True)
YARN_ROPE = RopeSpec(
    "yarn",
    10000.0,
    4,
    factor=4.0,
    original_max_tokens=32,
    magnitude=yarn_magnitude(4.0, 0.707) / yarn_magnitude(4.0, 1.2),
    interleaved=True,
)
# name → (configuration class, differences from the base configuration, our spec)
CASES: dict[str, tuple[str, dict[str, Any], LatentAttentionSpec]] = {
    "v2-lite": ("DeepseekV2Config", {"q_lora_rank": None}, LatentAttentionSpec(HEADS, **SIZES, rope=ROPE)),
    "v2": (
        "DeepseekV2Config",
        {"q_lora_rank": 24, "attention_bias": True},
        LatentAttentionSpec(HEADS, **SIZES, rope=ROPE, q_lora_rank=24, has_bias=True),
    ),
    "v2-yarn": (
        "DeepseekV2Config",
        {"q_lora_rank": 24, "rope_parameters": YARN},
        LatentAttentionSpec(HEADS, **SIZES, rope=YARN_ROPE, q_lora_rank=24, mscale=yarn_magnitude(4.0, 1.2)),
    ),
    "v3": ("DeepseekV3Config", {"q_lora_rank": 24}, LatentAttentionSpec(HEADS, **SIZES, rope=ROPE, q_lora_rank=24)),
    "v3-yarn": (
        "DeepseekV3Config",
        {"q_lora_rank": 24, "rope_parameters": YARN},
        LatentAttentionSpec(HEADS, **SIZES, rope=YARN_ROPE, q_lora_rank=24, mscale=yarn_magnitude(4.0, 1.2)),
    ),
    "v3-halves": (
        "DeepseekV3Config",
        {"q_lora_rank": None, "rope_interleave": False},
        LatentAttentionSpec(HEADS, **SIZES, rope=replace(ROPE, interleaved=False)),
    ),
}
SPANS = [(0, 9), (5, 1), (3, 6), (17, 1)]


@dataclass(frozen=True)
class Names:
    ignored: tuple[str, ...] = (".*",)

    def locate(self, parameter: str) -> Location:
        _, stem, suffix = parameter.split(".")
        return Location(f"model.layers.0.self_attn.{NAMES[stem]}.{suffix}")


def make_model(name: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    class_name, differences, _ = CASES[name]
    config = getattr(transformers, class_name)(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_TOKENS,
        n_routed_experts=8,
        **SIZES,
        **differences,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "layernorm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    return model.to(dtype).eval()


@torch.inference_mode()
def expected(model: transformers.PreTrainedModel, x: Tensor) -> Tensor:
    """The attention module's output for a whole sequence [tokens, hidden]."""
    tokens = x.shape[0]
    positions = torch.arange(tokens)[None]
    mask = torch.full((tokens, tokens), float("-inf")).triu(1).to(x.dtype)[None, None]
    rope = model.model.rotary_emb(x[None], positions)
    return model.model.layers[0].self_attn(
        hidden_states=x[None], attention_mask=mask, position_embeddings=rope, past_key_values=None
    )[0][0]


def load(
    path: Path, name: str, group: RankGroup, exact: bool, ops: Ops, dtype: torch.dtype, attention: str = ""
) -> Loaded:
    spec, layout = CASES[name][2], WeightLayout(Shard.of(HIDDEN, 64, group, exact))
    table = LatentAttentionBlock.parameters(spec, "attention", layout)
    loader = Loader(SafetensorsCheckpoint((path,)), table, Names(), dtype, CPU)
    context = BuildContext(loader, ops, layout, ModelAttention(CPU, dtype, name=attention), MAX_TOKENS, BLOCK_TOKENS)
    block = LatentAttentionBlock.load(spec, "attention", context)
    loader.finish()
    program = Program(HIDDEN)
    block.output.append_to(program, block.append_to(program, "residual"), "output")
    return Loaded(block.attention, Interpreter(program, ops))


@dataclass(frozen=True)
class Loaded:
    attention: Attention
    interpreter: Interpreter  # from the block's input to its output


def run(block: Loaded, texts: list[Tensor]) -> list[Tensor]:
    """The outputs of each text's new tokens by SPANS, after a step that cached its earlier tokens."""
    batch = make_batch(SPANS)
    num_blocks = int(batch.block_tables.max()) + 1
    cache, interpreter = block.attention.allocate(num_blocks), block.interpreter

    def context(batch: StepBatch) -> StepContext:
        return StepContext(batch, {block.attention.name: block.attention.prepare(batch)})

    for row, (text, (seen, _)) in enumerate(zip(texts, SPANS, strict=True)):
        if seen:
            earlier = make_batch([(0, seen)])
            blocks = batch.block_tables[row]
            slots = torch.tensor(
                [int(blocks[p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(seen)]
            )
            earlier.slots.copy_(slots)
            interpreter.run(text[:seen], [cache], context(earlier))
    new = torch.cat([text[seen:] for text, (seen, _) in zip(texts, SPANS, strict=True)])
    step = context(batch)
    return list(interpreter.run(new, [cache], step).split([count for _, count in SPANS]))


def make_texts(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(seen + new, HIDDEN, generator=generator).to(dtype) for seen, new in SPANS]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_latent_attention_is_that_of_transformers(
    name: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    model = make_model(name, dtype)
    model.save_pretrained(tmp_path)
    texts = make_texts(dtype)
    block = load(tmp_path / "model.safetensors", name, RankGroup(), True, TorchOps(), dtype)
    for got, text, (seen, _) in zip(run(block, texts), texts, SPANS, strict=True):
        want = expected(model, text)[seen:]
        scale = float(want.float().std())
        assert scale > 0.2
        torch.testing.assert_close(got / scale, want / scale, atol=3 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["v2-lite", "v2", "v3-yarn"])
def test_several_ranks_give_what_one_gives(name: str, size: int, exact: bool, tmp_path: Path) -> None:
    model = make_model(name, torch.float32)
    model.save_pretrained(tmp_path)
    texts, path = make_texts(torch.float32), tmp_path / "model.safetensors"

    def run_rank(group: RankGroup) -> Tensor:
        return torch.cat(run(load(path, name, group, exact, TorchOps(), torch.float32), texts))

    with torch.inference_mode():
        want = run_rank(RankGroup())
    for got in run_ranks(size, run_rank):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


@pytest.mark.native
@torch.inference_mode()
def test_native_operators_compute_the_same(tmp_path: Path) -> None:
    model = make_model("v3-yarn", torch.bfloat16)
    model.save_pretrained(tmp_path)
    texts, path = make_texts(torch.bfloat16), tmp_path / "model.safetensors"
    plain, native = (
        torch.cat(run(load(path, "v3-yarn", RankGroup(), True, ops, torch.bfloat16), texts))
        for ops in (TorchOps(), native_ops())
    )
    torch.testing.assert_close(native, plain, atol=6e-2, rtol=2e-2)


@pytest.mark.skipif(not has_triton_interpreter(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["v2-lite", "v2", "v3-yarn"])
@torch.inference_mode()
def test_kernels_of_gpus_compute_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latents' norms, rotation and KV write are one kernel, and queries are rotated as the attention reads them."""
    from penstock_server.device.triton.ops import TritonOps

    monkeypatch.setattr(triton_device, "unavailable_reason", lambda device: None)
    make_model(name, torch.float32).save_pretrained(tmp_path)
    texts, path = make_texts(torch.float32), tmp_path / "model.safetensors"
    plain = load(path, name, RankGroup(), True, TorchOps(), torch.float32)
    fused = load(path, name, RankGroup(), True, TritonOps(CPU, torch.float32), torch.float32, "triton")
    assert fused.attention.latent is not None
    torch.testing.assert_close(torch.cat(run(fused, texts)), torch.cat(run(plain, texts)), atol=2e-5, rtol=1e-5)


def test_the_cache_holds_only_the_latent() -> None:
    spec = LatentAttentionSpec(
        128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope=ROPE
    )
    attention = choose_attention(spec.attention_shape(range(64), 16), CPU, torch.bfloat16)
    assert attention.bytes_per_block() == 16 * (512 + 64) * 2
    cache = attention.allocate(num_blocks=3)
    assert cache.nbytes == 3 * attention.bytes_per_block()
    shard = Shard.of(48, 64, RankGroup())
    assert LatentAttentionBlock.kv_elements_per_token(spec, shard) * 16 * 2 == attention.bytes_per_block()


def test_the_scale_is_that_of_unabsorbed_queries() -> None:
    spec = LatentAttentionSpec(
        4, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope=ROPE
    )
    assert spec.attention_shape(range(4), 16).scale == 192**-0.5
    assert (yarn_magnitude(1.0, 1.0), yarn_magnitude(40.0, 0.0)) == (1.0, 1.0)
    assert yarn_magnitude(40.0, 1.0) == pytest.approx(1.36888794)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1, not 0"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1 or null, not 0"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even, not 3"),
    ],
)
def test_invalid_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LatentAttentionSpec(HEADS, **{**SIZES, **changes}, rope=ROPE)
