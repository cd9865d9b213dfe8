"""Models whose keys and values are stored in fp8: their logits, their scales, and the capacity of their cache."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from cases import CASES, VOCAB
from engine_run import BLOCK_TOKENS, EngineRun
from fake_cuda import fake_cuda
from fake_cuda import load as load_fake
from model_driver import ModelDriver
from penstock_server.device.attention.fp8 import FP8_DTYPES, KvScales
from penstock_server.engine import Engine, memory
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from safetensors.torch import load_file, save_file
from tested_device import DEVICE
from tiny_model import save_case
from tiny_models import make_model, prompts, save_model
from torch import Tensor

NUM_TOKENS = 12
NARROW = torch.float8_e4m3fn


def load(folder: Path, kv_dtype: torch.dtype | None) -> Decoder:
    options = LoadOptions(folder, torch.float32, DEVICE, BLOCK_TOKENS, kv_dtype=kv_dtype)
    model = load_model(options, RankGroup())
    assert isinstance(model, Decoder)
    return model


def logits(folder: Path, kv_dtype: torch.dtype | None, num_source: int) -> Tensor:
    """Logits of the tokens of two texts, the second of which is computed in chunks."""
    driver = ModelDriver(load(folder, kv_dtype), BLOCK_TOKENS)
    first, second = (driver.sequence(text, num_source) for text in prompts(1, [21, 30], VOCAB))
    steps = [[(first, 20), (second, 9)], [(second, 13), (first, 1)], [(second, 8)]]
    found = [driver.step(step, every_row=True) for step in steps]
    return torch.cat([each for each in found if each is not None]).float()


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v3", "t5"])
@torch.inference_mode()
def test_rounded_keys_and_values_change_logits_a_little(name: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_case(name, tmp_path)
    num_source = 7 if CASES[name].has_encoder else 0
    plain, narrow = (logits(folder, each, num_source) for each in (None, kv_dtype))
    assert 0 < (narrow - plain).norm() < 0.3 * plain.norm()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_tokens_do_not_depend_on_batches_chunks_and_preemption(name: str, tmp_path: Path) -> None:
    changes = {"sliding_window": 10} if name == "mistral" else {}
    folder = save_model(make_model(name, **changes), tmp_path)
    texts = prompts(2, [19, 26, 24], 131)
    texts[2][:16] = texts[1][:16]
    together = EngineRun(folder, kv_dtype=NARROW).greedy(texts, NUM_TOKENS, shared_tokens=16, chunk=5)
    with torch.inference_mode():
        driver = ModelDriver(load(folder, NARROW), BLOCK_TOKENS)
        alone = [driver.greedy([text], NUM_TOKENS)[0] for text in texts]
    assert together == alone


SCALED_NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "vllm": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "quark": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}
SCALES = KvScales(0.25, 0.5)


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    """To the checkpoint in the folder."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(make_model("llama", num_hidden_layers=2), tmp_path)


def scales(folder: Path, kv_dtype: torch.dtype | None = NARROW) -> list[KvScales | None]:
    return [layer.attention.scales for layer in load(folder, kv_dtype).layers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("names", SCALED_NAMES.values(), ids=SCALED_NAMES)
def test_scales_are_read_under_every_published_name(names: tuple[str, str], folder: Path) -> None:
    found = zip(names, SCALES, strict=True)
    add(folder, {f"model.layers.1.{name}": torch.tensor([scale]) for name, scale in found})
    assert scales(folder) == [KvScales(1.0, 1.0), SCALES]
    assert scales(folder, None) == [None, None]


def test_one_scale_may_be_that_of_keys_and_values(folder: Path) -> None:
    add(folder, {"model.layers.0.self_attn.kv_scale": torch.tensor(0.5, dtype=torch.bfloat16)})
    assert scales(folder)[0] == KvScales(0.5, 0.5)


@pytest.mark.parametrize(
    ("scale", "message"),
    [(torch.tensor([1.0, 2.0]), r"has shape \[2\]; fp8 keys"), (torch.tensor(0.0), "is 0.0; it must be positive")],
)
def test_unusable_scales_are_refused(scale: Tensor, message: str, folder: Path) -> None:
    add(folder, {"model.layers.1.self_attn.v_scale": scale})
    with pytest.raises(ConfigError, match=message):
        load(folder, NARROW)
    load(folder, None)


def test_a_cache_of_half_the_bytes_holds_twice_the_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "default_cap_bytes", lambda longest_bytes: 1 << 20)
    found = []
    for name in ("auto", "fp8_e4m3fn"):
        # Native attention pads these heads.
        config = LoadConfig(folder, dtype="float16", device="cpu", kv_cache_dtype=name, attention="reference")
        engine, described = Engine.load(config)
        found.append((described.kv_bytes_per_block, engine.warm_up(WarmUpConfig(32, 4, 64)).num_blocks))
        engine.close()
    (plain_bytes, plain_blocks), (narrow_bytes, narrow_blocks) = found
    assert (plain_bytes, plain_blocks * 2) == (narrow_bytes * 2, narrow_blocks)


@pytest.mark.native
def test_on_a_cpu_fp8_is_native_and_the_log_says_its_scales(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = LoadOptions(folder, torch.bfloat16, torch.device("cpu"), 16, kv_dtype=NARROW)
    assert load_model(options, RankGroup()).traits.attention_name == "native"
    assert "keys and values are stored in float8_e4m3fn, with scales of 1.0" in caplog.text


def test_on_a_gpu_fp8_steps_are_recorded(folder: Path) -> None:
    with fake_cuda():
        engine = load_fake(folder, kv_cache_dtype="fp8_e5m2")
        assert engine.model.traits.is_recordable
        assert engine.model.caches[0].dtype == torch.int8
        engine.close()
