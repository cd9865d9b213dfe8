"""Quantized weights and 8-bit keys and values in every build of the native kernels that this machine runs: near the
weights and numbers that they stand for, and the same bits alone, in a batch and in one call for all layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import save_gguf
from model_driver import ModelDriver, interpret, is_native
from native_builds import CPU, all_builds
from penstock_server.device.attention.fp8 import FP8_DTYPES, KvScales
from penstock_server.device.attention.interface import AttentionShape
from penstock_server.device.native.attention import NativeAttention
from penstock_server.device.native.build import NativeBuild
from penstock_server.device.native.ops import NativeOps
from penstock_server.device.quantized import QuantFormat
from penstock_server.device.reference.attention import ReferenceAttention
from penstock_server.layers.quantized import QuantizedWeights
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.block import FORMATS
from penstock_server.weights.gguf.folder import gguf_folder
from quantized_checkpoints import Quantize, bits_and_bytes, float8, gptq, save_quantized
from quantized_matrices import random_matrix
from test_native_builds import one_sequence
from test_quantized_models import make_model as make_architecture
from tiny_models import make_model, prompts

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("one_thread")]

# Codes of every width, with every kind of scale and of zero; both tables of 8 bits and 8-bit floats.
LAYERS: dict[str, QuantFormat] = {
    **{type_.name: format_ for type_, format_ in FORMATS.items()},
    "8 bits with zero points": QuantFormat(8, 64, 128, has_mins=True, number="float16", zeros="uint8"),
    "4 bits with zero points": QuantFormat(4, 32, 8, has_mins=True, number="bfloat16", zeros="uint4"),
    "float8": QuantFormat(8, 96, number="float32", code="e4m3fn"),
    "float8 of more range": QuantFormat(8, 32, number="float32", code="e5m2"),
}
BUILDS = pytest.mark.parametrize("build", all_builds(), ids=str)


@BUILDS
@torch.inference_mode()
def test_products_in_every_format_are_near_the_dense_ones_and_independent_of_the_batch(build: NativeBuild) -> None:
    x = torch.randn(67, 512, generator=torch.Generator().manual_seed(1)).to(build.dtype)
    size = x.double().norm(dim=1, keepdim=True)
    for bits, limit in ((8, 3e-3), (16, 1e-3)):
        ops = NativeOps(build, activation_bits=bits)
        for name, format_ in LAYERS.items():
            layer = partial(weights, random_matrix(format_, 70, 512), dtype=build.dtype)
            dense = layer().dense()[0].double()
            packed = layer().pack(ops)
            found = packed(x)
            error = (found.double() - x.double() @ dense.T).abs() / (size * dense.norm(dim=1))
            assert error.max() < limit, f"{name} with inputs of {bits} bits"
            for rows in (slice(0, 1), slice(3, 20), slice(66, 67), slice(0, 65)):
                assert torch.equal(packed(x[rows]), found[rows]), f"{name} with inputs of {bits} bits"


def weights(matrix: Any, dtype: torch.dtype) -> QuantizedWeights:
    return QuantizedWeights((matrix,), None, dtype, CPU)


@BUILDS
@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
def test_attention_over_8_bits_is_that_of_the_numbers_that_they_stand_for(
    build: NativeBuild, kv_dtype: torch.dtype
) -> None:
    shape, scales = AttentionShape(4, 2, 64, 64**-0.5, 16), KvScales(0.25, 0.5)
    generator = torch.Generator().manual_seed(5)
    queries, keys, values = (torch.randn(140, heads, 64, generator=generator).to(build.dtype) for heads in (4, 2, 2))
    native = NativeAttention(shape, build, kv_dtype)
    reference = ReferenceAttention(shape, CPU, torch.float32, kv_dtype)
    found = []
    for chunks in ([range(140)], [range(33), range(33, 34), range(34, 139), range(139, 140)]):
        cache, outputs = native.allocate(40), []
        for chunk in chunks:
            batch, rows = one_sequence(chunk, []), slice(chunk.start, chunk.stop)
            native.write_kv(cache, keys[rows], values[rows], batch.slots, None, scales)
            outputs.append(native.attend(queries[rows], cache, native.prepare(batch), scales=scales))
        found.append(torch.cat(outputs))
    assert torch.equal(*found)
    batch, cache = one_sequence(range(140), []), reference.allocate(40)
    reference.write_kv(cache, keys.float(), values.float(), batch.slots, None, scales)
    expected = reference.attend(queries.float(), cache, reference.prepare(batch), scales=scales)
    limit = 4 * torch.finfo(build.dtype).eps if build.dtype != torch.float32 else 2**-18
    torch.testing.assert_close(found[0].float(), expected, rtol=limit, atol=limit)


SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        gptq(4, 32, symmetric=False),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("nf4")),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, float8("block")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one tiny model by format."""
    model, folder = make_model("llama", **SIZES), tmp_path_factory.mktemp("models")
    found = {name: save_quantized(model, folder / name, *case)[0] for name, case in CHECKPOINTS.items()}
    for kind in ("Q4_0", "Q5_1"):
        found[kind] = gguf_folder(save_gguf(model, folder / f"{kind}.gguf", kind=kind))
    found["experts"] = gguf_folder(save_gguf(make_architecture("mixtral"), folder / "experts.gguf", kind="Q4_1"))
    return found


def loaded(folder: Path, build: NativeBuild, **options: Any) -> Decoder:
    cpu_isa = build.isa.name
    model = load_model(LoadOptions(folder, build.dtype, CPU, 16, cpu_isa=cpu_isa, **options), RankGroup())
    assert isinstance(model, Decoder)
    return model


def in_a_batch(model: Decoder) -> torch.Tensor:
    """The logits of two texts, computed together and in chunks."""
    driver = ModelDriver(model, 16)
    first, second = (driver.sequence(text) for text in prompts(3, [23, 30], 131))
    steps = [[(first, 9), (second, 29)], [(first, 13), (second, 1)], [(first, 1)]]
    rows = [driver.step(advances, every_row=True).float() for advances in steps]
    return torch.cat([rows[0][:9], rows[1][:13], rows[2], rows[0][9:], rows[1][13:]])


def alone(model: Decoder) -> torch.Tensor:
    """The same logits of one text after the other."""
    driver = ModelDriver(model, 16)
    texts = [driver.sequence(text) for text in prompts(3, [23, 30], 131)]
    return torch.cat([driver.step([(text, len(text.token_ids))], every_row=True).float() for text in texts])


@BUILDS
@pytest.mark.parametrize("kind", [*CHECKPOINTS, "Q4_0", "Q5_1", "experts"])
def test_a_model_has_the_same_bits_in_one_call_and_layer_by_layer_alone_and_in_a_batch(
    build: NativeBuild, kind: str, folders: dict[str, Path]
) -> None:
    model = loaded(folders[kind], build, kv_dtype=torch.float8_e4m3fn)
    assert is_native(model)
    found = in_a_batch(model)
    assert torch.equal(found, alone(model))
    interpret(model)
    assert torch.equal(found, in_a_batch(model))
    dense = in_a_batch(loaded(folders[kind], build, dequantize=True))
    assert (found - dense).norm() < 0.15 * dense.norm()  # most of it is the rounding of keys and values
