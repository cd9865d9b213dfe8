"""Programs refuse what does not fit together, and are rewritten only where the result is the same."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from penstock_server.device.attention.interface import Attention, AttentionShape, HeadNorms
from penstock_server.device.ops import NormVariant
from penstock_server.device.reference.ops import TorchOps
from penstock_server.layers.interpreter import AddAndNorm, TransformAndWrite, rewritten
from penstock_server.layers.operation import (
    Add,
    Clamp,
    Copy,
    Multiply,
    Norm,
    NormHeads,
    Operation,
    Program,
    Register,
    Rotate,
    ScaleQueries,
    Select,
    Visit,
    Write,
)


class Fused:
    """An attention of two heads of 4 that transforms queries and keys as it writes."""

    transforms = True
    shape = AttentionShape(2, 1, 4, 0.5, 16)


ATTENTION = cast(Attention, Fused())
TABLE = torch.ones(8, 2)
NORM = TorchOps().pack_norm(torch.ones(32), None, NormVariant(1e-6))


def multiply(source: Register, target: Register, in_features: int, out_features: int) -> Multiply:
    linear = TorchOps().pack_linear(torch.zeros(out_features, in_features), None)
    return Multiply(source, target, linear)


def head_norms(*, follows_rotation: bool = False, is_fused: bool = True) -> NormHeads:
    weights = torch.ones(4)
    fused = HeadNorms(weights, None, weights, None, 1e-6, False, False, follows_rotation=follows_rotation)
    return NormHeads("qkv", "qkv", (NORM, NORM), (2, 1), 4, fused if is_fused else None)


CLAMP = Clamp("qkv", "qkv", 2.0)
ROTATE = Rotate("qkv", "qkv", ATTENTION, TABLE, TABLE, False)
SCALE = ScaleQueries("qkv", "qkv", ATTENTION, torch.ones(2), 4)
WRITE = Write("qkv", "qkv", ATTENTION, None)
PRODUCT = multiply("residual", "qkv", 32, 16)
SELECT = Select("residual", "residual", ())
WRONG: dict[str, tuple[str, list[Operation]]] = {
    "a register without value": ("Norm reads normed, which is not written", [Norm("normed", "output", NORM)]),
    "a product of another width": (
        "residual has 32 columns, Multiply needs 31",
        [multiply("residual", "qkv", 31, 16)],
    ),
    "a sum of other widths": ("qkv has 16 columns, residual 32", [PRODUCT, Add("qkv", "residual")]),
    "heads of another width": (
        "qkv has 15 columns, Write needs 16",
        [multiply("residual", "qkv", 32, 15), WRITE],
    ),
    "a residual of another width": (
        "the residual has 32 columns, not 16",
        [multiply("residual", "residual", 32, 16)],
    ),
    "a register that was not kept": ("Norm reads qkv", [PRODUCT, SELECT, Norm("qkv", "qkv", NORM)]),
    "a visitor of some rows": (
        "Visit needs all rows",
        [SELECT, Visit("residual", "residual", lambda residual, step: None)],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_refuses_operations_that_do_not_fit(name: str) -> None:
    message, operations = WRONG[name]
    program = Program(32)
    for operation in operations[:-1]:
        program.append(operation)
    with pytest.raises(ValueError, match=message):
        program.append(operations[-1])


@pytest.mark.parametrize(
    ("before", "num_apart", "joined"),
    [
        ([], 0, {}),
        ([ROTATE], 0, {"rotate"}),
        ([CLAMP, head_norms(), ROTATE], 0, {"clamp", "norms", "rotate"}),
        ([CLAMP, ROTATE, head_norms(follows_rotation=True)], 0, {"clamp", "norms", "rotate"}),
        ([CLAMP, head_norms()], 0, {"clamp", "norms"}),
        ([CLAMP, head_norms(is_fused=False), ROTATE], 2, {"rotate"}),
        ([CLAMP, ROTATE, head_norms(is_fused=False)], 3, {}),
        ([CLAMP, SCALE], 2, {}),
        ([ROTATE, CLAMP], 1, {"clamp"}),
        ([ROTATE, ROTATE], 1, {"rotate"}),
        ([head_norms(), head_norms()], 1, {"norms"}),
        ([ROTATE, head_norms()], 1, {"norms"}),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, list) else None,
)
def test_what_an_attention_can_do_joins_its_write(before: list[Operation], num_apart: int, joined: Any) -> None:
    product, *apart, write = rewritten([PRODUCT, *before, WRITE])
    assert product is PRODUCT
    assert apart == before[:num_apart]
    assert isinstance(write, TransformAndWrite)
    assert write.write is WRITE
    parts = {"clamp": write.clamp, "norms": write.norms, "rotate": write.rotate}
    assert {name for name, part in parts.items() if part is not None} == set(joined)
    assert {id(part) for part in parts.values() if part is not None} == {id(each) for each in before[num_apart:]}


def test_a_norm_joins_the_addition_before_it() -> None:
    add, norm = Add("projected", "residual"), Norm("residual", "normed", NORM)
    product, joined = rewritten([PRODUCT, add, norm])
    assert isinstance(joined, AddAndNorm)
    assert (product, joined.add, joined.norm, joined.target) == (PRODUCT, add, NORM, "normed")
    visit = Visit("residual", "residual", lambda residual, step: None)
    for apart in ([add, visit, norm], [add, Copy("residual", "output")], [Add("sum", "projected"), norm]):
        assert rewritten(apart) == apart
