"""The table of formats in docs/quantization.md is that of the code. `make docs` writes it
by running this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from penstock_server.weights.gguf.block import FORMATS
from penstock_server.weights.quantization.method import KINDS
from penstock_server.weights.quantization.stored import Kind
from penstock_server.weights.safetensors_file import LOADABLE

PAGE = Path(__file__).parents[3] / "docs" / "quantization.md"
HEADING = "| checkpoint | bits | with native or Triton kernels | elsewhere |\n|---|---|---|---|\n"


def gguf_kinds() -> Iterator[Kind]:
    """The types of GGUF that are kept quantized, and those that the gguf package dequantizes."""
    kept = list(FORMATS)
    tables = [type_ for type_ in kept if FORMATS[type_].table]
    k_types = [type_ for type_ in kept if type_.name.endswith("_K")]
    for types in ([type_ for type_ in kept if type_ not in (*k_types, *tables)], k_types, tables):
        bits_of = tuple({FORMATS[type_].bits: 0 for type_ in types})
        yield Kind(f"[GGUF](gguf.md) {names(types)}", bits_of)
    dense = [type_ for type_ in GGMLQuantizationType if type_ not in kept and is_block(type_)]
    bits = {GGML_QUANT_SIZES[type_][1] * 8 // GGML_QUANT_SIZES[type_][0]: 0 for type_ in dense}
    yield Kind(f"GGUF {names(dense)}", tuple(sorted(bits)), is_kept=False)


def is_block(type_: GGMLQuantizationType) -> bool:
    """Whether the gguf package dequantizes this type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), dtype=np.uint8), type_)
    except NotImplementedError:
        return False
    return type_.name not in LOADABLE


def names(types: list[GGMLQuantizationType]) -> str:
    return ", ".join(type_.name for type_ in types)


def table() -> str:
    rows = []
    for kind in (*gguf_kinds(), *KINDS):
        kept = "stay quantized" if kind.is_kept else "dequantized"
        rows.append(f"| {kind.what} | {', '.join(map(str, kind.bits))} | {kept} | dequantized |")
    what = "any unquantized checkpoint with `--quantize"
    rows.append(f"| {what} eetq`, `bitsandbytes` or `fp8` | 8 | quantized at load | not quantized |")
    rows.append(f"| {what} bitsandbytes-nf4` or `bitsandbytes-fp4` | 4 | quantized at load | not quantized |")
    return HEADING + "\n".join(rows) + "\n"


def parts(page: str) -> tuple[str, str, str]:
    """The text before the table, the table, the text behind it."""
    before, _, rest = page.partition(HEADING)
    body, _, behind = rest.partition("\n\n")
    return before, f"{HEADING}{body}\n", f"\n{behind}"


def test_the_page_lists_the_formats_of_the_code() -> None:
    assert parts(PAGE.read_text(encoding="utf-8"))[1] == table(), "run make docs"


if __name__ == "__main__":
    before, _, behind = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + behind, encoding="utf-8")
