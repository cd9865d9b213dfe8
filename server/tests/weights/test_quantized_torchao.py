"""Models that torchao quantized and transformers saved: they have the logits of the weights that the library
dequantizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from native_builds import BUILD
from penstock_server.device.quantized import QuantFormat
from penstock_server.errors import ConfigError
from penstock_server.parallel import RankGroup
from penstock_server.weights.quantization.checkpoint import QuantizedCheckpoint
from penstock_server.weights.quantization.stored import Affine
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from rank_threads import run_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from test_quantized_checkpoints import SIZES
from test_quantized_models import logits
from tiny_models import make_model
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
)
from torchao.quantization.granularity import PerAxis, PerGroup, PerTensor
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

pytestmark = pytest.mark.usefixtures("one_thread")

LAYER = "model.layers.0.mlp.down_proj"
CONFIGS: dict[str, Any] = {
    "int8": Int8WeightOnlyConfig(),
    "int8 in groups": Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8, one scale": Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8 inputs": Int8DynamicActivationInt8WeightConfig(),
    "intx 4 bits": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "intx 3 bits, asymmetric": IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
    ),
    "intx 1 bit": IntxWeightOnlyConfig(weight_dtype=torch.int1, granularity=PerAxis(0)),
    "float8": Float8WeightOnlyConfig(),
}


def int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The library needs a GPU's kernels to quantize to this class, so that its tensors are made here."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale).bfloat16()
    codes = ((groups - zero[:, :, None]) / scale[:, :, None]).round().clamp(-8, 7)
    exact = (codes * scale.float()[:, :, None] + zero.float()[:, :, None]).flatten(1)
    codes = codes.flatten(1).to(torch.int8)
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    return Int4Tensor(packed, scale.T.contiguous(), zero.T.contiguous(), [1, 32], weight.shape), exact


def float8_inputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The library wants a GPU for the configuration, but not for the class."""
    of_inputs = QuantizeTensorToFloat8Kwargs(granularity=PerTensor())
    quantized = Float8Tensor.from_hp(weight, granularity=PerTensor(), act_quant_kwargs=of_inputs)
    return quantized, quantized.dequantize()


MADE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int4": int4,
    "float8 inputs, one scale": float8_inputs,
}
CASES = (*CONFIGS, *MADE)


def save(name: str, folder: Path) -> tuple[Path, Path]:
    """Returns the folders of the checkpoint and of the weights that it stands for."""
    make_model("qwen2", **SIZES).save_pretrained(folder / "original")
    stored, dense = folder / "stored", folder / "dense"
    read = transformers.AutoModelForCausalLM.from_pretrained
    original = read(folder / "original", dtype=torch.float32)
    original.save_pretrained(dense)
    if name in CONFIGS:
        options = transformers.TorchAoConfig(CONFIGS[name])
        model = read(folder / "original", quantization_config=options, dtype=torch.float32, device_map="cpu")
        model.save_pretrained(stored)
        weights = model.state_dict()
        exact = {name: getattr(weight, "dequantize", weight.clone)().contiguous() for name, weight in weights.items()}
    else:
        original.save_pretrained(stored)
        tensors = exact = original.state_dict()
        made = {key: MADE[name](weight) for key, weight in tensors.items() if "_proj.weight" in key}
        exact = exact | {key: weight for key, (_, weight) in made.items()}
        tensors, metadata = flatten_tensor_state_dict(
            tensors | {key: quantized for key, (quantized, _) in made.items()}
        )
        save_file(tensors, stored / "model.safetensors", metadata)
        config = json.loads((stored / "config.json").read_text())
        (stored / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "torchao"}}))
    save_file(exact, dense / "model.safetensors")
    return stored, dense


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def folders(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp("torchao"))
        return made[name]

    return folders


def computed(folder: Path, group: RankGroup, *chunks: int, dtype: torch.dtype, **options: Any) -> tuple[Tensor, int]:
    found, num_bytes = logits(folder, group, *chunks, dtype=dtype, **options)
    return found if found is not None else torch.empty(0), num_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_the_model_of_the_weights_that_the_library_reads(
    name: str, folder_of: Callable[[str], tuple[Path, Path]]
) -> None:
    stored, dense = folder_of(name)
    expected, dense_bytes = computed(dense, RankGroup(), 23, dtype=torch.float32)
    found, num_bytes = computed(stored, RankGroup(), 23, dtype=torch.float32, dequantize=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert num_bytes == dense_bytes
    if BUILD is None:
        return
    found, num_bytes = computed(stored, RankGroup(), 23, dtype=torch.bfloat16)
    assert (found - expected).norm() < 0.08 * expected.norm()
    assert num_bytes < dense_bytes * 0.4
    assert torch.equal(found, computed(stored, RankGroup(), 7, 16, dtype=torch.bfloat16)[0])
    ranks = run_ranks(2, lambda group: computed(stored, group, 23, dtype=torch.bfloat16))
    assert torch.equal(found, ranks[0][0])


def format_of(folder: Path) -> QuantFormat:
    checkpoint = SafetensorsCheckpoint((folder / "model.safetensors",))
    options = json.loads((folder / "config.json").read_text())["quantization_config"]
    weight = QuantizedCheckpoint(checkpoint, options).weights[f"{LAYER}.weight"]
    assert isinstance(weight, Affine)
    return weight.format


def test_zero_points_and_inputs_of_8_bits_are_kept_only_where_the_checkpoint_has_them(
    folder_of: Callable[[str], tuple[Path, Path]],
) -> None:
    formats = {name: format_of(folder_of(name)[0]) for name in CASES}
    assert {name for name, each in formats.items() if each.has_mins} == {"intx 3 bits, asymmetric", "int4"}
    assert {name for name, each in formats.items() if each.has_narrow_inputs} == {
        "int8 inputs",
        "float8 inputs, one scale",
    }


QDATA, SCALE, ZERO = (f"{LAYER}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
DESCRIPTION = '{"_type": "%s", "_data": {"block_size": %s, "target_dtype": {"_data": "%s"}}}'


@pytest.mark.parametrize(
    ("case", "tensors", "metadata", "message"),
    [
        ("int8", {}, None, f"it has {QDATA}, but no torchao metadata that describes it"),
        ("int8", {}, "{", "is damaged: its torchao metadata of .* is '{'"),
        ("int8", {}, '["Int8Tensor"]', "is damaged: its torchao metadata of "),
        ("int8", {}, DESCRIPTION % ("Int8Tensor", "[0, 128]", ""), r"block_size of .* is \[0, 128\], must be two siz"),
        ("int8", {}, DESCRIPTION % ("Int8Tensor", "[1, 32]", ""), rf"{SCALE} has shape \[64, 1\], .* \[64, 4\]"),
        ("int8", {}, DESCRIPTION % ("Int8Tensor", "[2, 128]", ""), "blocks of 2 rows and 128 columns are not suppo"),
        ("int8", {}, DESCRIPTION % ("MXTensor", "32", ""), "is a torchao MXTensor, which is not supported; supported"),
        (
            "int8",
            {},
            DESCRIPTION % ("Int4TilePackedTo4dTensor", "[1, 32]", ""),
            r"Int4TilePackedTo4dTensor, which is not supported \(it is packed .* plain is not\); .*; serve the",
        ),
        ("int8", {SCALE: None}, "", f"it has {QDATA}, but not {SCALE}"),
        ("int8", {SCALE: torch.full((64, 1), float("nan"))}, "", f"tensor {LAYER}._weight_scale holds NaN"),
        ("int8", {f"{LAYER}._weight_act_pre_scale": torch.ones(128)}, "", r"\(act_pre_scale\), not supported; serve"),
        ("intx 4 bits", {QDATA: torch.full((64, 128), 9, dtype=torch.int8)}, "", f"{QDATA} is damaged: .* than 4 bits"),
        ("intx 4 bits", {ZERO: torch.zeros(64, dtype=torch.int8)}, "", f"{ZERO} has shape"),
        (
            "intx 4 bits",
            {},
            DESCRIPTION % ("IntxUnpackedToInt8Tensor", "[1, 32]", "int9"),
            "the target_dtype of .* is {'_data': 'int9'}",
        ),
        ("int4", {SCALE: torch.ones(3, 64)}, "", f"{SCALE} has shape"),
        ("float8", {SCALE: torch.ones(64)}, "", f"{SCALE} has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_damaged_and_other_weights_are_refused(
    case: str,
    tensors: dict[str, Tensor | None],
    metadata: str | None,
    message: str,
    folder_of: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    """metadata: of the layer; None: none; empty: as it was."""
    stored, _ = folder_of(case)
    (tmp_path / "config.json").write_bytes((stored / "config.json").read_bytes())
    with safe_open(stored / "model.safetensors", "pt") as file:
        all_tensors = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
        described = file.metadata()
    if metadata is None:
        del described[f"{LAYER}.weight"]
    elif metadata:
        described[f"{LAYER}.weight"] = metadata
    kept = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", described)
    with pytest.raises(ConfigError, match=message):
        logits(tmp_path, RankGroup(), 1, dtype=torch.bfloat16 if BUILD is not None else torch.float32)
