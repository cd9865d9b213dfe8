"""The FlashAttention-2 backend against the reference: with the package on a GPU, elsewhere with a stand-in in torch.
And the choice of an implementation by name."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_flash_attn
import pytest
import tiny_models
import torch
from attention_pages import Pages, random
from fake_cuda import Recorder, fake_cuda, load
from penstock_server.device import flash
from penstock_server.device.attention import choose_attention, preferred_block_tokens
from penstock_server.device.attention.interface import Alibi, AttentionMask, AttentionShape, Rotation, Transform
from penstock_server.errors import ConfigError
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.shard import Shard
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Advances, NewSequence, Plan
from tested_device import DEVICE, triton_skip_reason
from torch import Tensor
from torch._subclasses import FakeTensorMode

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)
IS_INSTALLED = importlib.util.find_spec("flash_attn") is not None
if DEVICE.type == "cuda" and not IS_INSTALLED:
    pytest.skip("flash_attn is not installed", allow_module_level=True)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)


with_package = pytest.mark.usefixtures("_package", "on_tested_device")
PLAIN = AttentionShape(4, 2, 16, 0.3, 256)
ALIBI = Alibi((0.5, 0.25, 0.1, 0.7))
SHAPES = {
    "plain": PLAIN,
    "one-head-each": replace(PLAIN, num_kv_heads=4, head_dim=24),
    "large-blocks": replace(PLAIN, block_tokens=512),
    "window": replace(PLAIN, mask=AttentionMask(window=5)),
    "window-of-blocks": replace(PLAIN, mask=AttentionMask(window=270)),
    "soft-cap": replace(PLAIN, soft_cap=0.7),
    "alibi": replace(PLAIN, alibi=ALIBI),
    "scaled-alibi": replace(PLAIN, alibi=replace(ALIBI, is_scaled=True), soft_cap=0.7),
}


def make_pages(shape: AttentionShape, lengths: list[int]) -> Pages:
    attention = flash.make(shape, DEVICE, FP16, None, "")
    return Pages(attention, FP16, lengths)  # type: ignore[arg-type]


@with_package
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_computes_the_reference(name: str) -> None:
    pages = make_pages(SHAPES[name], [20, 561, 300, 8])
    pages.assert_near_reference([(0, 0, 20), (1, 560, 1), (2, 270, 30), (3, 7, 1), (0, 20, 0)])
    pages.assert_near_reference([(0, 0, 1), (1, 560, 1), (2, 255, 1), (3, 7, 1)])


@with_package
def test_queries_are_read_in_place() -> None:
    pages = make_pages(PLAIN, [50])
    queries, batch = pages.batch([(0, 30, 20)])
    wide = torch.cat([random(5, 20, 3, 16).to(FP16), queries], dim=1)[:, 3:]
    attended = pages.attention.attend(wide, pages.caches[0], pages.attention.prepare(batch))
    assert torch.equal(attended, pages.attend([(0, 30, 20)]))


@with_package
def test_written_tokens_are_attended_to_and_padding_is_not_stored() -> None:
    attention = flash.make(PLAIN, DEVICE, FP16, None, "")
    cache = attention.allocate(num_blocks=2)
    queries, keys, values = random(1, 6, 8, 16).to(FP16).split([4, 2, 2], dim=1)
    slots, positions = torch.tensor([256, 257, 258, 259, 260, -1]), torch.arange(6)
    cos, sin = torch.ones(9, 8), torch.zeros(9, 8)
    rotation = Rotation(cos, sin, positions, is_interleaved=False)
    attention.write_kv(cache, keys, values, slots, Transform(queries, rotation=rotation))
    stored = cache.transpose(1, 2).flatten(0, 1)  # [slots, kv_heads, 32]
    assert torch.equal(stored[256:261], torch.cat([keys, values], dim=2)[:5])
    assert not stored[:256].any()
    assert not stored[261:].any()
    _, batch = make_pages(PLAIN, [5]).batch([(0, 4, 1)])
    tables = torch.tensor([[1], [0]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32)
    batch = replace(batch, query_starts=starts, context_lens=lens, block_tables=tables)
    output = attention.attend(queries[4:], cache, attention.prepare(batch))
    assert output[0].any()
    assert not output[1].any()


UNSUPPORTED = {
    "256 is needed": replace(PLAIN, block_tokens=64),
    "heads have 576 elements": replace(PLAIN, num_kv_heads=1, head_dim=576, value_dim=512, values_in_keys=True),
    "heads have 20 elements": replace(PLAIN, head_dim=20),
    "keys and values differ": replace(PLAIN, value_dim=8),
    "share memory": replace(PLAIN, values_in_keys=True),
    "chunks of positions": replace(PLAIN, mask=AttentionMask(chunk=8)),
    "an encoder": replace(PLAIN, mask=AttentionMask(part="answer")),
    "sinks": replace(PLAIN, has_sinks=True),
    "a bias by distance": replace(PLAIN, has_relative_bias=True),
    "ALiBi rounded to bfloat16": replace(PLAIN, alibi=replace(ALIBI, is_bfloat16=True)),
}


@with_package
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_other_shapes_get_triton_unless_flash_is_asked_for(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with FakeTensorMode():
        assert choose_attention(UNSUPPORTED[reason], CUDA, BF16).name == "triton"
    (line,) = caplog.messages
    assert line.startswith(f"attention of {UNSUPPORTED[reason]}: triton (not flash: ")
    assert reason in line
    with pytest.raises(ConfigError, match=f"--attention flash cannot be used for .*{reason}"):
        choose_attention(UNSUPPORTED[reason], CUDA, BF16, name="flash")


@with_package
def test_an_installed_package_is_chosen_for_plain_shapes_and_larger_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    attention = choose_attention(PLAIN, CUDA, BF16)
    assert attention.name == "flash"
    assert attention.preferred_block_tokens == preferred_block_tokens(CUDA, BF16) == 256
    assert caplog.messages == ["attention of 4 heads of 16 with 2 KV heads: flash (the fastest)"]
    assert preferred_block_tokens(CUDA, torch.float32) == 64


@with_package
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_a_name_overrides_the_choice(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    attention = choose_attention(PLAIN, CUDA, BF16, name=name)
    assert attention.name == name
    assert attention.preferred_block_tokens == preferred_block_tokens(CUDA, BF16, name=name)
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if name == "reference" else "DEBUG")
    assert "as asked for" in record.message


@with_package
def test_flash_does_not_store_fp8(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode():
        assert choose_attention(PLAIN, CUDA, BF16, FP8).name == "triton"
        assert not caplog.messages
    assert preferred_block_tokens(CUDA, BF16, FP8) == 64
    reason = "it does not store fp8 (--kv-cache-dtype)"
    with pytest.raises(ConfigError, match=f"--attention flash cannot be used: {re.escape(reason)}"):
        preferred_block_tokens(CUDA, BF16, FP8, "flash")


def test_names_that_cannot_be_used_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # its import fails
    for name, device, dtype, reason in [
        ("native", CUDA, BF16, "for this CPU and data type; this is cuda in bfloat16"),
        ("native", CPU, torch.float64, "this is cpu in float64"),
        ("triton", CPU, BF16, "the device is cpu, not cuda"),
        ("flash", CPU, BF16, "the device is cpu, not cuda"),
        ("flash", CUDA, torch.float32, "the data type is float32"),
        ("flash", CUDA, BF16, r"cannot be imported .*; install it as docs/install\.md says"),
    ]:
        with pytest.raises(ConfigError, match=f"--attention {name} cannot be used.*{reason}.*auto"):
            preferred_block_tokens(device, dtype, name=name)
    with pytest.raises(ConfigError, match='attention is "paged", must be one of native, flash, triton, reference'):
        preferred_block_tokens(CPU, BF16, name="paged")


@pytest.mark.skipif(not IS_INSTALLED, reason="flash_attn is not installed")
def test_the_package_has_the_parameters_of_its_stand_in() -> None:
    import flash_attn

    real = inspect.signature(flash_attn.flash_attn_varlen_func).parameters
    used = inspect.signature(fake_flash_attn.flash_attn_varlen_func).parameters
    assert used.keys() <= real.keys()
    required = {name for name, parameter in real.items() if parameter.default is parameter.empty}
    assert required <= used.keys()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The longest query span of each call of the package. Its result has no data."""
    spans: list[int] = []

    def compute(q: Tensor, k: Tensor, v: Tensor, *, max_seqlen_q: int, **options: Any) -> Tensor:
        fake_flash_attn.check(q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"], options["block_table"])
        spans.append(max_seqlen_q)
        return torch.empty_like(q)

    monkeypatch.setattr(fake_flash_attn, "flash_attn_varlen_func", compute)
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    return spans


def test_a_step_neither_waits_for_the_device_nor_leaves_it(tmp_path: Path, calls: list[int]) -> None:
    folder = tiny_models.save_model(tiny_models.make_model("llama"), tmp_path)
    new = [NewSequence(i, [1, 2, 3], 3, block_ids=[i]) for i in range(2)]
    with fake_cuda() as launches:
        engine = load(folder, attention="flash")
        assert engine.model.traits.attention_name == "flash"
        assert engine.model.traits.is_recordable
        calls.clear()
        with Recorder(launches):
            engine.launch(Plan(1, new_sequences=new, advances=Advances.of([0, 1], [3, 3], [True, True])))
            engine.launch(Plan(2, advances=Advances.of([0, 1], [1, 1], [True, True])))
        engine.close()
    num_layers = tiny_models.BASE["num_hidden_layers"]
    assert calls == [3] * num_layers + [1] * num_layers
    assert launches.kernels["write_kernel"] >= 2 * num_layers
    assert not launches.kernels["attend_kernel"]


def test_a_layer_with_sinks_says_so_in_its_shape() -> None:
    shard = Shard.of(48, 131, RankGroup())
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, sinks=True)
    assert spec.shape(shard, 256).has_sinks
    assert not replace(spec, sinks=False).shape(shard, 256).has_sinks
