"""The torch operators against their definitions, and oneDNN's packed layers against plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from penstock_server.device.activation import ACTIVATIONS
from penstock_server.device.ops import NormVariant
from penstock_server.device.reference.ops import TorchOps, _multiply_heads
from penstock_server.layers import rope as rope_module
from penstock_server.layers.rope import RopeSpec, inverse_frequencies, limit_tables, rope_tables
from penstock_server.models.config import Config
from penstock_server.models.rope_config import read_rope
from transformers import LlamaConfig
from transformers.activations import ACT2CLS, ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

OPS = TorchOps()
VARIANT = NormVariant(1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_linear_is_linear(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    weight, offset = torch.randn(50, 31, dtype=dtype), torch.randn(50, dtype=dtype) if bias else None
    x = torch.randn(rows, 31, dtype=dtype)
    packed = OPS.pack_linear(weight, offset)
    assert (packed.out_features, packed.in_features) == (50, 31)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(packed(x).double(), expected, atol=5 * tolerance, rtol=tolerance)


@torch.inference_mode()
def test_gate_up_is_silu_of_the_first_half_times_the_second() -> None:
    weight, x = torch.randn(12, 5), torch.randn(3, 5)
    layer = OPS.pack_gate_up(weight, None)
    assert (layer.out_features, layer.in_features) == (6, 5)
    expected = torch.nn.functional.silu(x @ weight[:6].T) * (x @ weight[6:].T)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rms_norm_rounds_as_llama_does(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(24, eps=1e-5).to(dtype)
    norm.weight.uniform_(0.5, 2)
    x, residual = torch.randn(6, 24, dtype=dtype), torch.randn(6, 24, dtype=dtype)
    assert torch.equal(OPS.norm(x, norm.weight, None, VARIANT), norm(x))
    total = residual + x
    assert torch.equal(OPS.norm(x, norm.weight, None, VARIANT, residual), norm(total))
    assert torch.equal(residual, total)


@torch.inference_mode()
def test_rotation_is_that_of_transformers_and_in_place() -> None:
    tokens, heads, kv_heads, dim = 5, 4, 2, 8
    positions = torch.tensor([3, 0, 17, 9, 4])
    cos, sin = rope_tables(RopeSpec("default", 10000.0, dim), 32, torch.device("cpu"))
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim)
    before = fused.clone()
    queries, keys, values = fused.split([heads, kv_heads, kv_heads], dim=1)
    wide_cos, wide_sin = (torch.cat([table, table], -1)[positions][None] for table in (cos, sin))
    expected = apply_rotary_pos_emb(
        queries.clone().transpose(0, 1)[None], keys.clone().transpose(0, 1)[None], wide_cos, wide_sin
    )
    OPS.rotate(queries, keys, cos, sin, positions)
    torch.testing.assert_close(queries, expected[0][0].transpose(0, 1))
    torch.testing.assert_close(keys, expected[1][0].transpose(0, 1))
    assert torch.equal(values, before[:, -kv_heads:])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "truncate": False,
            "beta_fast": 20.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("max_tokens", [64, 256])
def test_rope_scalings_are_those_of_transformers(rope: dict[str, Any], max_tokens: int) -> None:
    values = {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(values)
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=max_tokens)
    spec = read_rope(Config({"max_position_embeddings": 256, "rope_parameters": values}, Path("config.json")), 16)
    torch.testing.assert_close(inverse_frequencies(spec, max_tokens), expected, rtol=1e-6, atol=0)
    cos, _ = rope_tables(spec, max_tokens, torch.device("cpu"))
    assert float(cos[0, 0]) == pytest.approx(magnitude)


def test_rows_of_long_tables_are_computed_once_it_is_known_how_many_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cpu = RopeSpec("default", 10000.0, 8), torch.device("cpu")
    whole = rope_tables(spec, 40, cpu)
    monkeypatch.setattr(rope_module, "_FIRST_ROWS", 8)
    monkeypatch.setattr(rope_module, "_PIECE_ROWS", 3)
    tables = rope_tables(spec, 40, cpu)
    assert all(torch.equal(table[:8], expected[:8]) for table, expected in zip(tables, whole, strict=True))
    for num_rows in (5, 20):
        limit_tables(spec, tables, num_rows)
        assert all(torch.equal(table[:num_rows], each[:num_rows]) for table, each in zip(tables, whole, strict=True))


def test_the_product_of_heads_writes_to_its_place() -> None:
    """Absorbed queries may be a part of wider ones."""
    weight, x, wide = torch.randn(3, 8, 5), torch.randn(4, 3, 13), torch.zeros(4, 3, 9)
    _multiply_heads(weight, x[..., 2:10], wide[..., :5])
    torch.testing.assert_close(wide[..., :5], torch.einsum("rhi,hio->rho", x[..., 2:10], weight))
    assert not wide[..., 5:].any()


@pytest.mark.parametrize("name", sorted(set(ACT2CLS) - {"prelu", "xielu"}))
def test_activations_are_those_of_transformers(name: str) -> None:
    """Two of them have learned parameters."""
    x = torch.linspace(-14, 14, 401)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x), atol=1e-3, rtol=1e-3)
