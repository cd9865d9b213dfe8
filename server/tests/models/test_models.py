"""Every variant of the Llama family against transformers: logits and tokens, however prompts are cut into steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from tested_device import DEVICE
from tiny_models import VARIANTS, make_model, prompts, save_model


def load(folder: Path, dtype: torch.dtype = torch.float32, block_tokens: int = 4) -> CausalModel:
    return load_model(LoadOptions(folder, dtype, DEVICE, block_tokens), RankGroup())


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_mixed_batch_gives_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_model(variant)
    model = load(save_model(reference, tmp_path))
    driver = ModelDriver(model, block_tokens=4)
    texts = prompts(1, [21, 9, 5, 1], model.traits.vocab_size)
    expected = [reference(torch.tensor([text])).logits[0] for text in texts]
    first, second, third, fourth = (driver.sequence(text) for text in texts)
    # The logits of every token, in steps that mix long chunks, short chunks and single tokens.
    steps = [
        [(first, 7), (second, 8)],
        [(second, 1), (first, 1), (third, 3)],
        [(third, 1), (first, 13), (fourth, 1)],
        [(third, 1)],
    ]
    for step in steps:
        begins = [sequence.num_computed for sequence, _ in step]
        logits = driver.step(step, every_row=True)
        wanted = torch.cat(
            [
                expected[texts.index(sequence.token_ids)][begin : begin + count]
                for (sequence, count), begin in zip(step, begins, strict=True)
            ]
        )
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert [s.num_computed for s in (first, second, third, fourth)] == [21, 9, 5, 1]


@torch.inference_mode()
def test_only_sampled_rows_are_returned(tmp_path: Path) -> None:
    reference = make_model("llama")
    driver = ModelDriver(load(save_model(reference, tmp_path)))
    texts = prompts(2, [11, 6], 131)
    logits = driver.step([(driver.sequence(text), len(text)) for text in texts])
    wanted = torch.stack([reference(torch.tensor([text])).logits[0, -1] for text in texts])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_step_that_samples_nothing_still_fills_the_cache(tmp_path: Path) -> None:
    import dataclasses

    model = load(save_model(make_model("llama"), tmp_path))
    text = prompts(3, [10], 131)[0]
    whole = ModelDriver(model)
    expected = whole.step([(whole.sequence(text), 10)])
    driver = ModelDriver(model)
    forward = model.forward
    sequence = driver.sequence(text)
    model.forward = lambda batch: forward(dataclasses.replace(batch, sample_rows=batch.sample_rows[:0]))  # type: ignore[method-assign]
    logits = driver.step([(sequence, 9)])
    assert logits.shape == (0, 131)
    model.forward = forward  # type: ignore[method-assign]
    torch.testing.assert_close(driver.step([(sequence, 1)]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama-nine-heads", "qwen2"])
def test_greedy_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_model(variant)
    driver = ModelDriver(load(save_model(reference, tmp_path)))
    texts = prompts(4, [13, 4, 7], 131)
    expected = []
    for text in texts:
        ids = reference.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(ids[0, len(text) :].tolist())
    assert driver.greedy(texts, 24) == expected
    assert driver.greedy(texts, 24, chunk_tokens=3) == expected
    assert [driver.greedy([text], 24)[0] for text in texts] == expected


@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    reference = make_model("llama")
    save_model(reference.to(torch.bfloat16), tmp_path)
    model = load(tmp_path, torch.bfloat16, block_tokens=16)
    driver = ModelDriver(model, block_tokens=16, num_blocks=8)
    text = prompts(5, [30], 131)[0]
    logits = driver.step([(driver.sequence(text), 30)], every_row=True)
    assert logits.dtype == torch.bfloat16
    rounded = reference(torch.tensor([text])).logits[0]
    wanted = reference.float()(torch.tensor([text])).logits[0]
    # The error is at most 1.25 times that of transformers.
    assert (logits - wanted).norm() < 1.25 * (rounded - wanted).norm()


def test_old_and_new_spelling_of_rope_are_equivalent(tmp_path: Path) -> None:
    save_model(make_model("llama3-rope"), tmp_path)
    text = prompts(6, [40], 131)[0]
    logits = []
    path = tmp_path / "config.json"
    new = json.loads(path.read_text())
    scaling = dict(new["rope_parameters"])
    theta = scaling.pop("rope_theta")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    for config in (new, {**old, "rope_theta": theta, "rope_scaling": scaling}):
        path.write_text(json.dumps(config))
        driver = ModelDriver(load(tmp_path))
        logits.append(driver.step([(driver.sequence(text), 40)]))
    assert torch.equal(logits[0], logits[1])


@torch.inference_mode()
def test_an_activation_without_a_kernel_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    model = make_model("llama", hidden_act="mish")
    (text,) = prompts(5, [9], 131)
    driver = ModelDriver(load(save_model(model, tmp_path)))
    found = driver.step([(driver.sequence(text), len(text))], every_row=True)
    torch.testing.assert_close(found.cpu(), model(torch.tensor([text])).logits[0], atol=1e-4, rtol=1e-4)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    reference = make_model("llama")
    text = prompts(7, [12], 131)[0]
    logits = []
    for name, size in (("one", "5GB"), ("many", "20KB")):
        folder = save_model(reference, tmp_path / name, size)
        driver = ModelDriver(load(folder))
        logits.append(driver.step([(driver.sequence(text), 12)]))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(logits[0], logits[1])


def test_a_model_states_its_memory_and_limits(tmp_path: Path) -> None:
    model = load(save_model(make_model("llama-tied"), tmp_path), torch.bfloat16, block_tokens=8)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert (model.traits.architecture, model.traits.vocab_size, model.max_position_tokens) == ("llama", 131, 256)
    # Stored in float32 behind a header of some kB, loaded in bfloat16.
    assert 0 < stored - 2 * model.weight_bytes < 10_000
    assert model.kv_bytes_per_block == 3 * 2 * 8 * 2 * 8 * 2  # layers, k and v, tokens, KV heads, head_dim, bytes


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "model type 'rwkv' keeps a state between tokens"),
        ({"model_type": "absent"}, "lacks model_type"),
        ({"hidden_act": "wave"}, "hidden_act 'wave' is not supported; supported: gelu, "),
        ({"hidden_size": "absent"}, "lacks hidden_size"),
        ({"hidden_size": "48"}, "hidden_size must be of type int, not '48'"),
        ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of 4 KV heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"rope_parameters": {"rope_type": "wave"}}, "rope scaling 'wave' is not supported; supported: default, "),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "rope over 3 of a head's 8 elements is not possible"),
        ({"rope_parameters": {"full_attention": {}}}, "differ between layers are not supported"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 without"),
        ({"model_type": "mpt", "d_model": 48, "n_heads": 6, "attn_config": {"qk_ln": True}}, "qk_ln is not supported"),
        ({"model_type": "gemma2", "layer_types": ["linear_attention"] * 3}, "layer_types must name 3 layers"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        (
            {"quantization_config": {"quant_method": "vptq"}},
            "quantized with 'vptq', which is not supported",
        ),
        ({"vocab_size": 130}, r"shape \[131, 48\] in the checkpoint, but config.json implies \[130, 48\]"),
        ({"num_hidden_layers": 2}, "9 tensors that the model has no place for: model.layers.2"),
        ({"num_hidden_layers": 4}, "the checkpoint lacks 9 of 39 tensors: model.layers.3"),
    ],
)
def test_unsupported_configurations_are_refused_with_the_reason(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_model(make_model("llama"), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load(tmp_path)
