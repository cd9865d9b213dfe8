"""Each kind of damage to a model folder gives one clear error from `prepare` or from loading, and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.prepare import prepare
from quantized_checkpoints import awq, save_quantized
from safetensors.torch import load_file, save_file
from test_gguf_split import split_model
from tiny_models import make_model, save_model

Q_WEIGHT = "model.layers.1.self_attn.q_proj.weight"
FILE = "model.safetensors"
PART = "part.safetensors"
INDEX = "model.safetensors.index.json"


def set_weight(value: float, dtype: torch.dtype = torch.float32, place: int = -1) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        tensors[Q_WEIGHT] = tensors[Q_WEIGHT].to(dtype)
        tensors[Q_WEIGHT].view(-1)[place] = value
        save_file(tensors, folder / FILE)

    return change


def set_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def set_index(**weight_map: object) -> Callable[[Path], None]:
    """Beside a part of the weights: an index beside a whole file is not used."""

    def change(folder: Path) -> None:
        (folder / FILE).rename(folder / PART)
        names = dict.fromkeys(load_file(folder / PART), PART)
        (folder / INDEX).write_text(json.dumps({"weight_map": {**names, **weight_map} if weight_map else {}}))

    return change


def remove(*patterns: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return change


def make_adapter(folder: Path) -> None:
    remove("*")(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')
    save_file({"lora_A.weight": torch.zeros(2)}, folder / "adapter_model.safetensors")


def make_incomplete_series(folder: Path) -> None:
    (folder / FILE).rename(folder / "model-00002-of-00003.safetensors")


def append(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + bytes(num_bytes)) and None


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "nan": (set_weight(float("nan")), f"is damaged: tensor {Q_WEIGHT} holds NaN$"),
    "infinity": (set_weight(float("-inf"), place=0), f"is damaged: tensor {Q_WEIGHT} holds infinity$"),
    "nan in bf16": (set_weight(float("nan"), torch.bfloat16), f"is damaged: tensor {Q_WEIGHT} holds NaN$"),
    "fp8": (
        set_weight(0.0, torch.float8_e4m3fn),
        f"tensor {Q_WEIGHT} is of type F8_E4M3, which cannot be loaded as a weight; F64, F32, F16, BF16 can",
    ),
    "index names a tensor that is not there": (
        set_index(stray=PART),
        f"the index of .* says that tensor stray is in {PART}, which does not hold it",
    ),
    "circular index": (set_index(stray=INDEX), f"is damaged: it names '{INDEX}', which is not a .safetensors file"),
    "escaping index": (set_index(stray="../other.safetensors"), "names files outside its folder"),
    "empty index": (set_index(), "it names no tensors"),
    "number as a file": (
        set_index(x=3),
        "index.json (is damaged|names files outside)",
    ),
    "missing shard without an index": (
        make_incomplete_series,
        "lacks 2 of 3 weight files that their number",
    ),
    "zero length": (lambda folder: (folder / FILE).write_bytes(b"") and None, "is truncated: it has 0 bytes"),
    "no weights": (remove("*.safetensors"), "holds no weights"),
    "no config": (remove("config.json"), "holds no config.json"),
    "nothing": (remove("*"), "is empty; a model folder holds"),
    "adapter": (make_adapter, "is an adapter of some/base: some/base is not in the cache, and HF_HUB_OFFLINE is set"),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("{") and None,
        "config.json is not valid JSON",
    ),
    "unknown architecture": (
        set_config(model_type="quux"),
        "model type 'quux' is neither supported nor a causal language model",
    ),
    "other width": (set_config(hidden_size=96), "has shape .* but config.json implies"),
    "more layers": (set_config(num_hidden_layers=4), "the checkpoint lacks 9 of 39 tensors"),
    "fewer layers": (set_config(num_hidden_layers=2), "the checkpoint holds 9 tensors that the model has no place for"),
    "text for a number": (set_config(hidden_size="48"), "hidden_size must be of type int, not '48'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # an adapter names a base on the hub
    change, message = DAMAGES[damage]
    folder = save_model(make_model("llama"), tmp_path)
    change(folder)
    with pytest.raises(ConfigError, match=message) as raised:
        load(Path(prepare(str(folder)).folder))
    assert "\n" not in str(raised.value)


def save_safetensors(folder: Path) -> Path:
    return save_model(make_model("llama"), folder, "60KB")


def save_pickles(folder: Path, *, is_archive: bool = True) -> Path:
    model = make_model("llama")
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    shards = [dict(list(tensors.items())[place::3]) for place in range(3)]
    names = [f"pytorch_model-{place:05}-of-00003.bin" for place in (1, 2, 3)]
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, folder / name, _use_new_zipfile_serialization=is_archive)
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def save_split_gguf(folder: Path) -> Path:
    folder.mkdir()
    split_model(folder).unlink()
    return folder


def save_awq(folder: Path) -> Path:
    """Quantized, in one file."""
    options = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return save_quantized(make_model("qwen2", **sizes), folder, options, awq(32))[0]


# By format: how a model is saved in several files, and which they are.
SHARDED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "safetensors": (save_safetensors, "*.safetensors"),
    "pickles": (save_pickles, "*.bin"),
    "pickles of old versions": (partial(save_pickles, is_archive=False), "*.bin"),
    "gguf": (save_split_gguf, "*.gguf"),
    "awq": (save_awq, "*.safetensors"),
}


@pytest.mark.usefixtures("model_cache")
@pytest.mark.parametrize("kind", SHARDED)
def test_a_shard_that_is_cut_off_or_missing_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    save, pattern = SHARDED[kind]
    folder = save(tmp_path / "model")
    shards = sorted(folder.glob(pattern))
    load_prepared(folder)
    for path in (shards[0], shards[-1]):
        whole = path.read_bytes()
        for size in (0, 3, 100, len(whole) // 4, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(ConfigError, match=rf"{path.name} is (truncated|damaged|not a GGUF file)"):
                load_prepared(folder)
        path.unlink()
        with pytest.raises(ConfigError, match=rf"lacks 1 of .* files .*{path.name}|holds no weights"):
            load_prepared(folder)
        path.write_bytes(whole)


def load_prepared(folder: Path) -> None:
    load(Path(prepare(str(folder)).folder))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    load_model(LoadOptions(folder, dtype, torch.device("cpu"), 16), RankGroup())


def test_weights_beyond_the_range_of_the_dtype_are_refused(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    set_weight(1e6)(folder)
    load(folder)
    with pytest.raises(ConfigError, match=f"{Q_WEIGHT} holds numbers beyond the range of float16; the largest is 1e"):
        load(folder, torch.float16)


def test_large_finite_weights_whose_sum_overflows_are_accepted(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    tensors = load_file(folder / FILE)
    tensors[Q_WEIGHT].fill_(3e38)
    save_file(tensors, folder / FILE)
    load(folder)


def test_files_that_only_look_like_weights_are_ignored(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path)
    (folder / FILE).rename(folder / "weights.safetensors")  # so that no file has the standard name
    for name in (
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "optimizer.pt",
        "scheduler.pt",
        "training_args.bin",
        "rng_state_0.pth",
        "model.onnx",
        "tf_model.h5",
        "flax_model.msgpack",
        "openvino_model.bin",
        "._weights.safetensors",
    ):
        (folder / name).write_bytes(b"not what its name says")
    load(Path(prepare(str(folder)).folder))
