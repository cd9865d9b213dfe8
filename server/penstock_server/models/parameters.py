"""The table of a decoder's parameters: the full shape of each, and which part of it a rank holds."""

from __future__ import annotations

from penstock_server.models.shard import Shard
from penstock_server.models.spec import ModelSpec
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.loader import Parameter


def parameters(spec: ModelSpec, shard: Shard) -> dict[str, Parameter]:
    """Our names, as `NameMap` translates them. A tied head has no parameter of its own."""
    hidden = spec.hidden_size
    vocabulary = Parameter((spec.vocab_size, hidden), Part(0, shard.vocab.mine))
    table = {"embedding.weight": vocabulary, "norm.weight": Parameter((hidden,))}
    if not spec.tied_head:
        table["head.weight"] = vocabulary
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}"
        table[f"{prefix}.attention_norm.weight"] = Parameter((hidden,))
        table[f"{prefix}.mlp_norm.weight"] = Parameter((hidden,))
        _attention(table, f"{prefix}.attention", spec, shard)
        _mlp(table, f"{prefix}.mlp", spec, shard)
    return table


def _attention(table: dict[str, Parameter], prefix: str, spec: ModelSpec, shard: Shard) -> None:
    dim = spec.head_dim
    for name, num_heads, part in (
        ("q", spec.num_heads, shard.heads.mine),
        ("k", spec.num_kv_heads, shard.kv_heads),
        ("v", spec.num_kv_heads, shard.kv_heads),
    ):
        rows = range(part.start * dim, part.stop * dim)
        _linear_by_rows(table, f"{prefix}.{name}", (num_heads * dim, spec.hidden_size), rows, spec.qkv_bias)
    heads = shard.heads.mine
    shape = (spec.hidden_size, spec.num_heads * dim)
    columns = range(heads.start * dim, heads.stop * dim)
    _linear_out(table, f"{prefix}.output", shape, columns, shard, spec.attention_output_bias)


def _mlp(table: dict[str, Parameter], prefix: str, spec: ModelSpec, shard: Shard) -> None:
    for name in ("gate", "up"):
        shape = (spec.intermediate_size, spec.hidden_size)
        _linear_by_rows(table, f"{prefix}.{name}", shape, shard.intermediate.mine, spec.mlp_bias)
    shape = (spec.hidden_size, spec.intermediate_size)
    _linear_out(table, f"{prefix}.down", shape, shard.intermediate.mine, shard, spec.mlp_bias)


def _linear_by_rows(table: dict[str, Parameter], name: str, shape: tuple[int, int], rows: range, bias: bool) -> None:
    table[f"{name}.weight"] = Parameter(shape, Part(0, rows))
    if bias:
        table[f"{name}.bias"] = Parameter(shape[:1], Part(0, rows))


def _linear_out(
    table: dict[str, Parameter], name: str, shape: tuple[int, int], columns: range, shard: Shard, bias: bool
) -> None:
    """A projection from a split dimension to the hidden one; see `Shard.exact`."""
    if shard.exact:
        _linear_by_rows(table, name, shape, shard.hidden.mine, bias)
        return
    table[f"{name}.weight"] = Parameter(shape, Part(1, columns))
    if bias:
        table[f"{name}.bias"] = Parameter(shape[:1])
