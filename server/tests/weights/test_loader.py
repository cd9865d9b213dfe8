"""Checkpoints that are incomplete or do not match config.json are refused with a message that names the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import BUILD
from penstock_server.engine.device import choose_dtype
from penstock_server.errors import ConfigError
from penstock_server.layers.layout import WeightLayout
from penstock_server.layers.shard import Shard
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.parameters import parameters
from penstock_server.models.registry import read_spec
from penstock_server.models.spec import ModelSpec
from penstock_server.parallel import RankGroup
from penstock_server.weights.checkpoint import Part
from penstock_server.weights.format import open_checkpoint
from penstock_server.weights.loader import Loader, Parameter
from penstock_server.weights.safetensors_file import SafetensorsCheckpoint
from program_environment import program_environment
from safetensors.torch import load_file, save_file
from tiny_models import BASE, make_model, save_model
from torch import Tensor

CPU = torch.device("cpu")
Q_WEIGHT = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(make_model("llama"), tmp_path)


def load(folder: Path) -> None:
    load_model(LoadOptions(folder, torch.float32, CPU, 16), RankGroup())


def layout_of(spec: ModelSpec, group: RankGroup, exact: bool = True) -> WeightLayout:
    return WeightLayout(Shard.of(spec.hidden_size, spec.vocab_size, group, exact))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def damage(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(Q_WEIGHT))
    with pytest.raises(ConfigError, match=f"^the checkpoint lacks 1 of 30 tensors: {Q_WEIGHT}$"):
        load(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update(stray=torch.zeros(1)))
    with pytest.raises(ConfigError, match=r"^the checkpoint holds 1 tensors that the model has no place for: stray$"):
        load(folder)


def test_a_bias_that_the_configuration_lacks_is_refused(folder: Path) -> None:
    name = Q_WEIGHT.replace("weight", "bias")
    rewrite(folder, lambda tensors: tensors.update({name: torch.eye(48)[47].clone()}))
    with pytest.raises(ConfigError, match=f"holds 1 biases of layers that have none .*: {name}; they are not zero"):
        load(folder)


def test_biases_of_zeros_that_the_configuration_lacks_change_nothing(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_WEIGHT.replace("weight", "bias"): torch.zeros(48)}))
    load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.masked_bias",
        "v_head.summary.weight",
        "model.layers.0.mlp.total_ops",
        "total_params",
    ],
)
def test_tensors_that_no_model_computes_with_are_ignored(name: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(folder)


def test_the_second_copy_of_a_tied_head_is_ignored(tmp_path: Path) -> None:
    folder = save_model(make_model("llama-tied"), tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(131, 48)}))
    load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_WEIGHT: torch.zeros(40, 48)}))
    with pytest.raises(ConfigError, match=rf"tensor {Q_WEIGHT} has shape \[40, 48\] in the checkpoint, but"):
        load(folder)


def test_a_tensor_of_integers_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_WEIGHT: torch.zeros(48, 48, dtype=torch.int32)}))
    with pytest.raises(ConfigError, match=f"tensor {Q_WEIGHT} is of type I32, which cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("size", [0, 7, 100, 10_000])
def test_a_truncated_file_is_refused_on_opening(size: int, folder: Path) -> None:
    damage(folder / "model.safetensors", lambda data: data.__delitem__(slice(size, None)))
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated"):
        load(folder)


def test_a_file_without_a_json_header_is_refused(folder: Path) -> None:
    damage(folder / "model.safetensors", lambda data: data.__setitem__(slice(8, 12), b"????"))
    with pytest.raises(ConfigError, match="header is not valid JSON"):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}, "does not match its shape"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "does not match its shape"),
        ({"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}, "type Q9, which is not supported"),
        ({"dtype": "F32", "shape": "4", "data_offsets": 7}, "entry of tensor x is invalid"),
        ({"shape": [4], "data_offsets": [0, 16]}, "entry of tensor x is invalid"),
        (3, "entry of tensor x is invalid"),
    ],
)
def test_an_invalid_header_is_refused(entry: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        SafetensorsCheckpoint((write_raw(tmp_path, json.dumps({"x": entry})),))


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
    with pytest.raises(ConfigError, match="x occurs twice"):
        SafetensorsCheckpoint((write_raw(tmp_path, f'{{"x": {entry}, "x": {entry}}}'),))


def write_raw(folder: Path, header: str) -> Path:
    path = folder / "raw.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    return path


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({Q_WEIGHT: torch.zeros(48, 48)}, folder / "b.safetensors")
    with pytest.raises(ConfigError, match=f"tensor {Q_WEIGHT} is in two files: a.safetensors and b.safetensors"):
        load(folder)


def test_an_index_that_names_missing_files_is_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path, "20KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ConfigError, match=f"lacks 1 of {len(shards)} weight files.*{shards[1].name}"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": "../other.safetensors"}}'])
def test_a_damaged_index_is_refused(text: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json (is damaged|names files outside)"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    message = r"holds no weights in the layout of transformers: .*; it holds adapter_model\.safetensors, whose tensors"
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_reading_a_parameter_twice_or_never_is_an_internal_error(folder: Path) -> None:
    spec, names = read_spec(folder)
    table = parameters(spec, layout_of(spec, RankGroup()))
    loader = Loader(open_checkpoint(folder)[0], table, names, torch.float32, CPU)
    loader.read("norm.weight")
    with pytest.raises(KeyError):
        loader.read("norm.weight")
    with pytest.raises(AssertionError, match="did not ask for"):
        loader.finish()


@pytest.mark.parametrize("variant", ["llama-nine-heads", "llama-biases", "llama-mqa"])
@given(size=st.integers(1, 4), exact=st.booleans())
@settings(max_examples=8, deadline=None)
def test_the_parts_of_all_ranks_add_up_to_the_whole(
    variant: str, size: int, exact: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save_model(make_model(variant), tmp_path_factory.mktemp("model"))
    spec, names = read_spec(folder)
    tables = [parameters(spec, layout_of(spec, RankGroup(rank, size), exact)) for rank in range(size)]
    whole = load_file(folder / "model.safetensors")
    loaders = [Loader(open_checkpoint(folder)[0], table, names, torch.float32, CPU) for table in tables]
    for name in tables[0]:
        rebuilt = torch.full(tables[0][name].shape, float("nan"))
        for table, loader in zip(tables, loaders, strict=True):
            part = table[name].part
            (rebuilt if part is None else part.of(rebuilt)).copy_(loader.read(name))
        assert torch.equal(rebuilt, whole[names.locate(name).name])
    for loader in loaders:
        loader.finish()


@given(dim=st.integers(0, 1), bounds=st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted))
@settings(deadline=None)
def test_any_part_is_read_exactly(dim: int, bounds: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("part") / "model.safetensors"
    tensor = torch.randn(30, 31)
    save_file({"before": torch.zeros(3), "x": tensor}, path)
    part = Part(dim, range(*bounds))
    out = torch.empty(part.shape_of((30, 31)), dtype=torch.float64)
    checkpoint = SafetensorsCheckpoint((path,))
    checkpoint.read("x", part, out)
    assert torch.equal(out, part.of(tensor).double())
    assert Parameter((30, 31), part).local_shape == tuple(out.shape)


def test_reading_does_not_keep_the_file_resident(tmp_path: Path) -> None:
    size = 64 << 20
    save_file({"x": torch.ones(size // 4)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint((tmp_path / "model.safetensors",))
    out = torch.zeros(size // 4)
    before = resident_file_bytes()
    checkpoint.read("x", None, out)
    assert resident_file_bytes() - before < size // 8


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.skipif(choose_dtype("", CPU) == torch.bfloat16 and BUILD is None, reason="torch packs weights as a whole")
@pytest.mark.parametrize("is_tied", [False, True])
def test_loading_peaks_at_the_size_of_the_weights_even_with_a_huge_head(is_tied: bool, tmp_path: Path) -> None:
    # A packed row has a multiple of 32 features.
    base = BASE | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "tie_word_embeddings": is_tied}
    config = transformers.LlamaConfig(**base)
    small = save_model(transformers.LlamaForCausalLM(config), tmp_path / "small")
    config = transformers.LlamaConfig(**base | {"vocab_size": 1 << 20})
    large = save_model(transformers.LlamaForCausalLM(config).bfloat16(), tmp_path / "large")
    program = Path(__file__).parents[1] / "programs" / "load_program.py"
    command = [sys.executable, str(program), small, large]
    result = subprocess.run(command, env=program_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert 0.9 < float(result.stdout.splitlines()[-1]) <= 1.2


def test_a_file_truncated_during_loading_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(1000)}, path)
    checkpoint = SafetensorsCheckpoint((path,))
    os.truncate(path, 2000)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is truncated: it had \d+ bytes and now ends at byte 2000"
    ):
        checkpoint.read("x", None, torch.empty(1000))


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))
