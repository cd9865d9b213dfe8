"""A program in one native call computes the bits of its operations one after the other, for every architecture that
native kernels support, and the log names the operation that they lack for others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from cases import CASES, Case
from model_driver import ModelDriver, interpret, is_native
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from rank_threads import run_native_ranks
from tiny_model import make_model, save_model
from tiny_models import prompts

pytestmark = pytest.mark.native

BLOCK_TOKENS = 16
VOCAB = 131
WIDTHS = ("hidden_size", "n_embd", "d_model")  # the names of the hidden size
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads")

SUPPORTED = [
    "apertus",
    "arcee",
    "baichuan-13b",
    "baichuan2",
    "bloom",
    "bloom-normed-residual",
    "codegen",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4-5",
    "exaone4",
    "falcon-7b",
    "falcon-40b",
    "falcon-11b",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "gpt-bigcode",
    "gpt-neo",
    "gpt-neox",
    "gpt-neox-sequential",
    "gpt2",
    "gptj",
    "granite",
    "helium",
    "hunyuan",
    "internlm2",
    "internlm3",
    "jais2",
    "llama",
    "llama-biases",
    "llama-gelu",
    "ministral",
    "ministral3",
    "mistral",
    "mpt",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo3",
    "opt",
    "opt-350m",
    "persimmon",
    "phi",
    "phi-qk-norm",
    "phi3",
    "phi4",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window",
    "seed-oss",
    "smollm3",
    "smollm3-window",
    "stablelm",
    "stablelm-12b",
    "starcoder2",
]
# Their heads have 8 elements, so the cache pads them. Those of the other models get 16.
PADDED = ["cohere-qk-norm", "gptj", "llama-nine-heads", "olmo2"]
EXPERTS = [
    "cohere2-moe",
    "dbrx",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm4-moe",
    "gpt-oss",
    "granitemoe",
    "granitemoeshared",
    "llama4",
    "minimax-m2",
    "mixtral",
    "mixtral-two-experts",
    "olmoe",
    "phimoe",
    "qwen2-moe",
    "qwen3-moe",
]
# Their layers are new combinations of parts that the others have.
COMBINED = ["dots1", "ernie4-5-moe", "exaone-moe", "glm4-moe-lite", "hunyuan-moe", "hy-v3", "solar-open"]
# Values that differ from the case's, and the operation.
NOT_NATIVE: dict[str, tuple[dict[str, int], str]] = {
    "deepseek-v3": ({}, "latent attention with heads of 20 elements, which are padded"),
    "mimo-v2-flash": ({}, "attention to values of 8 elements by keys of 16"),
    "t5": ({}, "attention with a learned bias"),
    "bart": ({}, "cross-attention"),
    "hunyuan": ({"head_dim": 8}, "norm of rotated heads of 8 elements, which are padded"),
}


def sized(name: str) -> Case:
    """A model whose heads the cache pads only if it is here for that."""
    return CASES[name] if name in PADDED else widened(CASES[name])


def widened(case: Case) -> Case:
    """The case with heads of 16 elements; of latent attention, 32."""
    given = {**case.sizes, **case.values}
    name = next(name for name in WIDTHS if name in given)
    num_heads = next(given[heads] for heads in HEADS if heads in given)
    of_head = {dim: 16 for dim in ("head_dim", "qk_rope_head_dim") if dim in given}
    return replace(case, values={**case.values, name: 16 * num_heads, **of_head})


def save(name: str, case: Case, folder: Path) -> Path:
    reference = make_model(name, case)
    save_model(reference, folder)
    return folder if case.published is None else case.published.save(reference, folder / "published")


def load(folder: Path, group: RankGroup, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    model = load_model(LoadOptions(folder, dtype, torch.device("cpu"), BLOCK_TOKENS), group)
    assert isinstance(model, Decoder)
    return model


def logits_of_steps(model: Decoder) -> list[torch.Tensor]:
    """Steps of chunks, single tokens and both; each has the logits of every row, or of the last rows."""
    driver = ModelDriver(model, BLOCK_TOKENS)
    first, second, third = (driver.sequence(text) for text in prompts(5, [80, 40, 33], VOCAB))
    steps = [
        ([(first, 33)], False),
        ([(first, 17), (second, 20)], True),
        ([(first, 1), (second, 1), (third, 30)], False),
        ([(first, 1), (second, 1), (third, 1)], False),
        ([(third, 1)], True),
        ([(first, 20), (second, 3), (third, 1)], False),
    ]
    return [driver.step(advances, every_row=every_row) for advances, every_row in steps]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in (*SUPPORTED, *PADDED, *EXPERTS)),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.slow) for name in COMBINED),
        *((name, dtype) for name in ("llama", "qwen2-moe", "deepseek-v3") for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_one_call_computes_the_bits_of_the_layers(
    name: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        model = load(save(name, sized(name), tmp_path), RankGroup(), dtype)
    assert "layers: one native call" in caplog.messages
    together, caches = logits_of_steps(model), [cache.clone() for cache in model.caches]
    interpret(model)
    assert_equal(together, logits_of_steps(model))
    assert_equal(caches, model.caches)


@pytest.mark.parametrize("activation_bits", [8, 16])
def test_one_call_computes_the_bits_of_quantized_experts(activation_bits: int, tmp_path: Path) -> None:
    case = widened(CASES["qwen2-moe"])
    widths = {"intermediate_size": 96, "shared_expert_intermediate_size": 64}  # whole panels
    folder = save("qwen2-moe", replace(case, values={**case.values, **widths}), tmp_path)
    device = torch.device("cpu")
    options = LoadOptions(
        folder, torch.bfloat16, device, BLOCK_TOKENS, activation_bits=activation_bits, quantize="eetq"
    )
    model = load_model(options, RankGroup())
    assert isinstance(model, Decoder)
    assert is_native(model)
    together = logits_of_steps(model)
    interpret(model)
    assert_equal(together, logits_of_steps(model))


def test_ranks_compute_parts_of_experts_one_by_one_with_the_bits_of_one_call(tmp_path: Path) -> None:
    folder = save("mixtral-two-experts", widened(CASES["mixtral-two-experts"]), tmp_path)

    def logits(group: RankGroup) -> list[torch.Tensor]:
        model = load(folder, group)
        assert is_native(model) == (group.size == 1)
        return logits_of_steps(model)

    assert_equal(run_native_ranks(3, logits)[0], logits(RankGroup()))


@pytest.mark.parametrize("name", sorted({*SUPPORTED, *PADDED, *EXPERTS}))
def test_two_ranks_compute_the_bits_of_one_in_one_call(name: str, tmp_path: Path) -> None:
    folder = save(name, sized(name), tmp_path)

    def logits(group: RankGroup) -> list[torch.Tensor]:
        model = load(folder, group)
        assert is_native(model)
        return logits_of_steps(model)

    for of_rank in run_native_ranks(2, logits):
        assert_equal(of_rank, logits(RankGroup()))


def assert_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NOT_NATIVE)
def test_the_log_says_what_has_no_native_operation(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values, operation = NOT_NATIVE[name]
    case = replace(CASES[name], values={**CASES[name].values, **values})
    with caplog.at_level(logging.INFO):
        load(save(name, case, tmp_path), RankGroup())
    (line,) = [message for message in caplog.messages if message.startswith("layers:")]
    assert line == f"layers: one operation after the other (no native {operation})"


def test_norms_over_all_heads_count_keys_that_several_ranks_hold_once(tmp_path: Path) -> None:
    """Two KV heads on three ranks."""
    folder = save("olmo2", widened(CASES["olmo2"]), tmp_path)

    def logits(group: RankGroup) -> list[torch.Tensor]:
        model = load(folder, group)
        assert is_native(model)
        return logits_of_steps(model)

    assert_equal(run_native_ranks(3, logits)[0], logits(RankGroup()))


def test_an_encoder_in_front_of_a_decoder_runs_in_one_call(tmp_path: Path) -> None:
    model = load(save("bart", widened(CASES["bart"]), tmp_path), RankGroup())
    assert model.encoder is not None

    def logits() -> list[torch.Tensor]:
        driver = ModelDriver(model, BLOCK_TOKENS)
        first, second = (driver.sequence(text, num_source=len(text) - 3) for text in prompts(5, [40, 23], VOCAB))
        return [driver.step([(first, 40), (second, 23)], every_row=True)]

    together = logits()
    interpret(model.encoder)
    assert_equal(together, logits())


ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
MODERNBERT = {"local_attention": 8, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
ENCODERS: dict[str, dict[str, object]] = {
    "BertConfig": {},
    "XLMRobertaConfig": {"type_vocab_size": 1},
    "NomicBertConfig": {},
    "ModernBertConfig": MODERNBERT,
}


@pytest.mark.parametrize("config", ENCODERS)
def test_encoders_compute_the_bits_of_their_layers_in_one_call(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "logits", lambda _, outputs, adapters: outputs.clone())  # they have no output head
    torch.manual_seed(5)
    values = getattr(transformers, config)(**ENCODER, **ENCODERS[config])
    transformers.AutoModel.from_config(values, dtype=torch.float32).save_pretrained(tmp_path)

    def outputs(group: RankGroup, *, is_one_call: bool = True) -> list[torch.Tensor]:
        model = load(tmp_path, group)
        assert is_native(model)
        if not is_one_call:
            interpret(model)
        driver = ModelDriver(model, BLOCK_TOKENS)
        steps = []
        for every_row in (True, False):
            first, second = (driver.sequence(text) for text in prompts(5, [40, 23], VOCAB))
            steps.append(driver.step([(first, 40), (second, 23)], every_row=every_row))
        return steps

    expected = outputs(RankGroup(), is_one_call=False)
    assert_equal(outputs(RankGroup()), expected)
    for of_rank in run_native_ranks(3, outputs):
        assert_equal(of_rank, expected)


class Noting:
    """An observer of two layers that keeps what it sees."""

    layers = (0, 2)

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def see(self, layer: int, residual: torch.Tensor, slots: torch.Tensor) -> None:
        assert len(residual) == len(slots)
        self.seen.append(residual.clone())


def test_an_observer_sees_the_same_between_native_calls_and_changes_no_bit(tmp_path: Path) -> None:
    case = sized("llama")
    model = load(save("llama", replace(case, values={**case.values, "num_hidden_layers": 4}), tmp_path), RankGroup())
    expected = logits_of_steps(model)
    found = []
    for is_one_call in (True, False):
        observer = Noting()
        model.observe(observer)
        if not is_one_call:
            interpret(model)
        assert_equal(logits_of_steps(model), expected)
        found.append(observer.seen)
    assert_equal(*found)
    assert len(found[0]) == 2 * 6
