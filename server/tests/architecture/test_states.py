"""Layers that keep a state between tokens: the native kernels against the operators of torch, one step against many,
going back as rejected drafts do, and snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB, Case
from model_driver import DrivenSequence, ModelDriver, interpret, is_native
from near_tie import assert_greedy
from penstock_server import device as devices
from penstock_server.device.reference.ops import TorchOps
from penstock_server.device.state import CHUNK_TOKENS
from penstock_server.errors import ConfigError
from penstock_server.layers.mamba2 import Mamba2Spec
from penstock_server.models import kimi_linear, load_model
from penstock_server.models.config import Config
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import ARCHITECTURES, read_spec
from penstock_server.models.spec import ModelSpec, NameMap
from penstock_server.parallel import RankGroup
from tiny_model import make_model, save_case
from tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_TOKENS = 16
CPU = torch.device("cpu")
NAMES = [
    "bailing-hybrid",
    "bailing-hybrid-no-limit",
    "bamba",
    "falcon-h1",
    "falcon-h1-norm",
    "falcon-mamba",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "jamba",
    "jamba-dense",
    "kimi-linear",
    "lfm2",
    "lfm2-biases",
    "lfm2-moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron-h",
    "olmo-hybrid",
    "olmo-hybrid-no-rope",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
]
CHUNKS = (1, 7, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 13)
LENGTH = 90


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    model = load_model(LoadOptions(folder, dtype, CPU, BLOCK_TOKENS, **options), RankGroup())
    assert isinstance(model, Decoder)
    return model


def load_reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """With the operators of torch."""
    with monkeypatch.context() as patch:
        patch.setattr(devices, "choose_ops", lambda *_, **__: TorchOps())
        return load(folder, attention="reference")


def advance(driver: ModelDriver, sequence: DrivenSequence, count: int, chunk: int) -> torch.Tensor:
    """The logits [count, vocab] of the next tokens, in chunks."""
    end, found = sequence.num_computed + count, []
    while sequence.num_computed < end:
        found.append(driver.step([(sequence, min(chunk, end - sequence.num_computed))], every_row=True))
    return torch.cat(found)


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its folder."""
    reference = make_model(request.param, CASES[request.param])
    return reference, save_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("is_compiled", [pytest.param(True, marks=pytest.mark.native), False])
def test_logits_and_greedy_tokens_are_those_of_transformers(
    made: tuple[Any, Path], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, folder = made
    model = load(folder) if is_compiled else load_reference(folder, monkeypatch)
    assert model.traits.is_row_independent == is_compiled
    (text,) = prompts(3, [LENGTH], VOCAB)
    with torch.inference_mode():
        expected = reference(torch.tensor([text]), use_cache=False).logits[0]
    for chunk in CHUNKS:
        driver = ModelDriver(model, BLOCK_TOKENS)
        logits = advance(driver, driver.sequence(text), LENGTH, chunk)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    beginnings = [text[:5], text[:40], text[:17]]
    for beginning, tokens in zip(
        beginnings, ModelDriver(model, BLOCK_TOKENS).greedy(beginnings, 64, chunk_tokens=7), strict=True
    ):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*beginning, *tokens]]), use_cache=False).logits[0]
        assert_greedy(logits[len(beginning) - 1 : -1], tokens)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_call_computes_the_bits_of_its_operations(made: tuple[Any, Path], dtype: torch.dtype) -> None:
    model = load(made[1], dtype)
    assert is_native(model)
    (text,) = prompts(3, [LENGTH], VOCAB)
    driver = ModelDriver(model, BLOCK_TOKENS)
    whole = advance(driver, driver.sequence(text), LENGTH, LENGTH)
    for chunk in CHUNKS:
        assert torch.equal(advance(driver, driver.sequence(text), LENGTH, chunk), whole)
    interpret(model)
    assert torch.equal(advance(driver, driver.sequence(text), LENGTH, 31), whole)


@pytest.mark.native
def test_a_sequence_that_goes_back_computes_the_same_bits(made: tuple[Any, Path]) -> None:
    model = load(made[1])
    text, wrong = prompts(3, [LENGTH, LENGTH], VOCAB)
    driver = ModelDriver(model, BLOCK_TOKENS)
    whole = advance(driver, driver.sequence(text), LENGTH, LENGTH)
    for first in (1, 15, 16, 17, 30, 33, 48, 61):
        for count in (1, 4, CHUNK_TOKENS):
            sequence = driver.sequence([*text[:first], *wrong[first:]])
            advance(driver, sequence, first, LENGTH)
            advance(driver, sequence, count, LENGTH)
            sequence.token_ids[first:], sequence.num_computed = text[first:], first
            assert torch.equal(advance(driver, sequence, LENGTH - first, 5), whole[first:]), (first, count)
            driver.free(sequence)


@pytest.mark.native
def test_a_sequence_continues_from_a_snapshot_with_the_same_bits(made: tuple[Any, Path]) -> None:
    model = load(made[1])
    states = model.states
    assert states is not None
    (text,) = prompts(3, [LENGTH], VOCAB)
    for position in (CHUNK_TOKENS, 2 * CHUNK_TOKENS, 5 * CHUNK_TOKENS):
        for num_behind in (0, 5):  # the slot's sequence may have gone on within the next chunk
            driver = ModelDriver(model, BLOCK_TOKENS)
            first = driver.sequence(text)
            advance(driver, first, position + num_behind, 13)
            states.save(first.slot, position, 1)
            rest = advance(driver, first, LENGTH - position - num_behind, 13)
            second = driver.sequence(text)
            second.blocks, second.num_computed = first.blocks[: position // BLOCK_TOKENS], position
            states.restore(1, second.slot, position)
            found = advance(driver, second, LENGTH - position, 7)
            assert torch.equal(found[num_behind:], rest), (position, num_behind)
    assert states.bytes_per_slot == sum(cache[0].nbytes for cache in states.tensors[: len(states.tensors) // 2])
    assert states.bytes_per_snapshot == sum(cache[0].nbytes for cache in states.tensors[len(states.tensors) // 2 :])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("qwen3-5", {"linear_key_head_dim": 12}, "linear_key_head_dim must be a multiple of 16 up to 256, not 12"),
        (
            "qwen3-5",
            {"linear_value_head_dim": 512},
            "linear_value_head_dim must be a multiple of 16 up to 256, not 512",
        ),
        ("qwen3-5", {"linear_num_value_heads": 3}, "3 value heads of linear attention are not a multiple of 2 key"),
        ("qwen3-5", {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim must be from 1 to 16, not 17"),
        ("qwen3-5", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        (
            "qwen3-5",
            {"layer_types": ["mamba"] * 4},
            "layer_types must name 4 layers, each one of linear_attention, full_attention",
        ),
        ("olmo-hybrid", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("lfm2", {"conv_L_cache": 17}, "conv_L_cache must be from 1 to 16, not 17"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of must be at least 1, not 0"),
        ("lfm2-moe", {"layer_types": None}, "it lacks layer_types"),
        ("mamba", {"state_size": 257}, "state_size of Mamba must be from 1 to 256, not 257"),
        ("mamba", {"conv_kernel": 17}, "conv_kernel of Mamba must be from 1 to 16, not 17"),
        ("mamba", {"time_step_rank": 0}, "time_step_rank of Mamba must be at least 1, not 0"),
        ("mamba", {"expand": 0}, "intermediate_size of Mamba must be at least 1, not 0"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset must be from 0 to below attn_layer_period 3, not 3"),
        ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset must be from 0 to below expert_layer_period 2"),
        ("kimi-linear", {"linear_head_dim": 24}, "linear_key_head_dim must be a multiple of 16 up to 256, not 24"),
        ("kimi-linear", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("bailing-hybrid", {"layer_group_size": 0}, "layer_group_size must be at least 1, not 0"),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act must be silu"),
    ],
)
def test_layers_that_cannot_be_computed_are_refused(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case: Case = CASES[name]
    config = {"model_type": case.model_type, **case.sizes, **case.values, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bamba", {"mamba_d_state": 24}, "the state dimension of Mamba 2 must be a multiple of 16 up to 256, not 24"),
        ("bamba", {"mamba_d_head": 8}, "the head dimension of Mamba 2 must be a multiple of 16 up to 256, not 8"),
        ("bamba", {"mamba_n_groups": 5}, "12 heads of Mamba 2 are not a multiple of 5 groups"),
        ("bamba", {"mamba_d_conv": 17}, "the convolution of Mamba 2 must be from 1 to 16 wide, not 17"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("bamba", {"time_step_limit": [0.1]}, "time_step_limit must be a list of 2 numbers"),
        ("falcon-h1-norm", {"mamba_norm_before_gate": True}, "a norm before the gate is not supported"),
        ("falcon-h1-norm", {"ssm_in_multiplier": 0.5}, "ssm_in_multiplier 0.5 with mamba_proj_bias is not supported"),
        ("nemotron-h", {"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type must name the layers"),
        ("nemotron-h", {"moe_latent_size": 64}, "moe_latent_size is not supported"),
    ],
)
def test_mamba_layers_that_cannot_be_computed_are_refused(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    config = {"model_type": case.model_type, **case.sizes, **case.values, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron-h"])
def test_earlier_configurations_describe_the_same_model(name: str) -> None:
    """Publishers name layers differently, and write an infinite number as it is."""
    case = CASES[name]
    build, values = ARCHITECTURES[case.model_type], {**case.sizes, **case.values}
    old = dict(values)
    if name == "nemotron-h":
        old["hybrid_override_pattern"] = "M-*EM-"
        del old["layers_block_type"]
    else:
        old["layer_types"] = ["mamba", "attention", "mamba"]
        old["position_embedding_type"] = "nope"
    for limit in (float("inf"), {"__float__": "Infinity"}):
        given = [{**each, "time_step_limit": [0.0, limit]} for each in (values, old)]
        specs = [build(Config(each, Path("config.json"))) for each in given]
        assert specs[0] == specs[1]
        assert any(isinstance(part, Mamba2Spec) and part.dt_limits[1] == float("inf") for part in memories(specs[1]))


def test_published_configurations_of_kimi_linear_describe_the_same_model() -> None:
    case = CASES["kimi-linear"]
    own = ("linear_num_heads", "linear_head_dim", "layer_types", "mlp_layer_types")
    values = {**case.sizes, **case.values}
    old = {key: value for key, value in values.items() if key not in own}
    for ours, theirs in kimi_linear.SPELLINGS.items():
        if ours in old:
            old[theirs] = old.pop(ours)
    old["num_experts"] = old.pop("num_local_experts")
    net = {"num_heads": 6, "head_dim": 16, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1, 3]}
    built = [
        kimi_linear.kimi_linear(Config(each, Path("config.json")))
        for each in (values, {**old, "linear_attn_config": net})
    ]
    assert built[0] == built[1]


def test_layers_of_lightning_attention_decay_as_in_transformers(tmp_path: Path) -> None:
    """And only as much of a head is rotated as the publisher says."""
    case = CASES["minimax"]
    spec, _ = ARCHITECTURES["minimax"](Config({**case.sizes, **case.values, "rotary_dim": 8}, Path("config.json")))
    nets = [layer.attention for layer in spec.layers if isinstance(layer.attention, Mamba2Spec)]
    modules = [layer.self_attn for layer in make_model("minimax", case).model.layers[::2]]
    for net, module in zip(nets, modules, strict=True):
        assert net.decay == tuple(module.slope_rate.flatten().tolist())
    rope = spec.layers[1].plain_attention.rope
    assert rope is not None
    assert rope.rotary_dim == 8


def memories(built: tuple[ModelSpec, NameMap]) -> list[object]:
    return [part for layer in built[0].layers for part in layer.memories]
