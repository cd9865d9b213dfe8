"""The embedded model, SmolLM2-135M in bfloat16: the tokenizer, the logits and the tokens of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_driver import ModelDriver
from penstock_server import watermark
from penstock_server.engine import Engine
from penstock_server.models import load_model
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import NewSequence, Sampling
from penstock_server.watermark import GreenLists, detect
from plans import Advance, plan, step
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

CORPUS = [
    "",
    " ",
    "Hello, world! It's a test; we'll see what they've done. Isn't it?",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "   leading, double  and trailing spaces   ",
    "tabs\tand\nnew\n\nlines\r\n and   \n  mixtures \t\n",
    "def f(x):\n    return x ** 2 if x > 0 else -x  # ünïcödé\n",
    "snake_case camelCase SCREAMING kebab-case a.b.c https://example.org/path?q=1&r=%20",
    "3.14159, 1,000,000 and 0x1F; 2026-11-21T03:40:00Z; v1.2.3; ½ ③ Ⅷ",
    "Größe, façade, naïve, œuvre, Ångström, e\u0301 and é",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过懒狗。今天天气很好！",
    "いろはにほへと ちりぬるを ワカヨタレソ ツネナラム",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "🎉 emoji 👩‍👩‍👧‍👦 flags 🇫🇷 skin 👍🏽 keycap 1️⃣",
    "zero\u200bwidth, nbsp\u00a0here, \u3000ideographic space, bell\a, null\x00",
    "<|im_start|>user\nWhat is <|im_end|> and <|endoftext|>?<|im_end|>\n<repo_name>x<file_sep>",
    "<|im_start |> not special <|im_start",
]
PROMPTS = [
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is two plus three?",
]


@pytest.fixture(scope="module")
def tokenizer(embedded_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(embedded_folder)


@pytest.fixture(scope="module")
def weights(embedded_folder: Path) -> dict[str, torch.Tensor]:
    """In float32: what transformers dequantizes and puts in order itself."""
    config = transformers.AutoConfig.from_pretrained(embedded_folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # `from_pretrained` would do this, but only with accelerate installed.
    return load_gguf_checkpoint(str(embedded_folder / "model.gguf"), return_tensors=True, model_to_load=model)[
        "tensors"
    ]


def built_by_transformers(
    folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()


@pytest.fixture(scope="module")
def reference(embedded_folder: Path, weights: dict[str, torch.Tensor]) -> transformers.PreTrainedModel:
    return built_by_transformers(embedded_folder, weights, torch.bfloat16)


@pytest.fixture(scope="module")
def model(embedded_folder: Path) -> CausalModel:
    options = LoadOptions(embedded_folder, torch.bfloat16, torch.device("cpu"), 16, dequantize=True)
    return load_model(options, RankGroup())


@pytest.fixture
def driver(model: CausalModel) -> ModelDriver:
    return ModelDriver(model, block_tokens=16, num_blocks=128)


def chat(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return list(ids["input_ids"])


def test_the_tokenizer_encodes_as_the_original(embedded_folder: Path, tokenizer: Any) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(embedded_folder, gguf_file="model.gguf")
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        # SmolLM2 cuts every digit off first. transformers does not know that from the file, and differs where
        # what stands before a digit would otherwise be cut with it; there the cut is made for it.
        pieces = split_before_and_after_numerals(text)
        assert ids == [token_id for piece in pieces for token_id in theirs.encode(piece)]


def split_before_and_after_numerals(text: str) -> list[str]:
    pieces = [""]
    for character in text:
        if character.isnumeric() or (pieces[-1] and pieces[-1][-1].isnumeric()):
            pieces.append("")
        pieces[-1] += character
    return pieces


def test_spaces_before_a_digit_stay_together(tokenizer: Any) -> None:
    assert tokenizer.tokenize("x  12 3") == ["x", "ĠĠ", "1", "2", "Ġ", "3"]


def test_chat_template_and_special_tokens_are_the_models(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        *("<|im_start|>", "<|im_end|>"),
        "<|endoftext|>",
    )
    text = tokenizer.decode(chat(tokenizer, "hi"))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_folder_is_one_that_transformers_understands(embedded_folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(embedded_folder)
    theirs = transformers.AutoConfig.from_pretrained(embedded_folder, gguf_file="model.gguf")
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_parameters",
        "max_position_embeddings",
    ):
        assert getattr(config, key) == getattr(theirs, key)
    assert config.tie_word_embeddings
    assert config.rms_norm_eps == 1e-5
    assert transformers.GenerationConfig.from_pretrained(embedded_folder).eos_token_id == [0, 2]


@torch.inference_mode()
def test_logits_are_as_exact_as_those_of_transformers(
    driver: ModelDriver, reference: transformers.PreTrainedModel, tokenizer: Any
) -> None:
    exact_model = copy.deepcopy(reference).float()
    squares = torch.zeros(3, dtype=torch.float64)  # squared sizes of our errors, transformers' errors and the logits
    for first in range(len(PROMPTS)):
        # Texts that begin alike would share the rounding errors of the first token, to which all others attend.
        ids = tokenizer.encode(" ".join(PROMPTS[first:] + PROMPTS[:first]))
        sequence = driver.sequence(ids)
        parts = [driver.step([(sequence, count)], every_row=True) for count in (20, 1, len(ids) - 21)]
        logits = torch.cat([part for part in parts if part is not None]).float()
        rounded = reference(torch.tensor([ids])).logits[0].float()
        exact = exact_model(torch.tensor([ids])).logits[0]
        squares += torch.stack([(each**2).sum() for each in (logits - exact, rounded - exact, exact)]).double()
    ours, theirs, norm = squares.sqrt().tolist()
    # Both round to bfloat16, at other places: 3 % of the logits' norm for this small model.
    assert theirs < 0.05 * norm
    assert ours < 1.1 * theirs


def test_it_knows_the_capital_of_france(driver: ModelDriver, tokenizer: Any) -> None:
    # The answer's first token is nearly a tie, which kernels of different instruction sets break differently.
    begun = tokenizer.encode("The capital of France is", add_special_tokens=False)
    (tokens,) = driver.greedy([chat(tokenizer, "What is the capital of France?") + begun], 3)
    assert tokenizer.decode(tokens) == " Paris.<|im_end|>"


@torch.inference_mode()
def theirs_after(reference: transformers.PreTrainedModel, text: list[int], tokens: list[int]) -> torch.Tensor:
    """transformers' logits where each of the tokens was chosen [tokens, vocab]."""
    return reference(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1].float()


def test_greedy_tokens_are_those_of_transformers_but_for_ties(
    driver: ModelDriver, reference: transformers.PreTrainedModel, tokenizer: Any
) -> None:
    """A token that transformers would not choose is one that it rounds to nearly the same logit as its own.

    The logits lie between 16 and 64, where a unit of bfloat16 is 0.125 or 0.25. Rounding all along the way moves them
    by two to four units, in transformers as here: of the 480 tokens of ten prompts 9 differ; compared with the
    float32 result 6 of ours do, and 10 of transformers'.
    """
    texts = [chat(tokenizer, prompt) for prompt in PROMPTS]
    num_same = 0
    for text, tokens in zip(texts, driver.greedy(texts, 24, chunk_tokens=24), strict=True):
        logits = theirs_after(reference, text, tokens)
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert behind.max() <= 0.5
        num_same += int((behind == 0).sum())
    assert num_same >= 0.95 * 24 * len(texts)


def test_in_float32_greedy_tokens_are_exactly_those_of_transformers(
    embedded_folder: Path, weights: dict[str, torch.Tensor], tokenizer: Any
) -> None:
    exact = built_by_transformers(embedded_folder, weights, torch.float32)
    model = load_model(
        LoadOptions(embedded_folder, torch.float32, torch.device("cpu"), 16, activation_bits=16), RankGroup()
    )
    driver = ModelDriver(model, block_tokens=16, num_blocks=64)
    texts = [chat(tokenizer, prompt) for prompt in PROMPTS]
    for text, tokens in zip(texts, driver.greedy(texts, 12, chunk_tokens=24), strict=True):
        assert tokens == theirs_after(exact, text, tokens).argmax(-1).tolist()


def test_loading_takes_little_more_than_the_weights(model: CausalModel) -> None:
    assert model.weight_bytes == 2 * 134_515_008
    assert (model.traits.architecture, model.traits.vocab_size, model.max_position_tokens) == ("llama", 49152, 8192)


def test_a_watermark_is_found_in_what_was_generated_with_it_and_nowhere_else(
    embedded_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    engine, description = Engine.load(LoadConfig(embedded_folder, 16, num_threads=1))
    engine.warm_up(WarmUpConfig(64, 2, max_sequence_tokens=256, num_blocks=32))
    text = chat(tokenizer, "Write a long story about a fisherman, his daughter and a storm.")
    samplings = [Sampling(do_sample=True, seed=7, temperature=0.9, watermark=marked) for marked in (True, False)]
    blocks = [range(16), range(16, 32)]
    new = [NewSequence(i, text, len(text), 0, blocks[i], sampling) for i, sampling in enumerate(samplings)]
    generated: list[list[int]] = [[], []]
    for number in range(1, 152):
        if number == 1:  # the limit of a step is 64 tokens
            advances = [Advance(0, len(text), sample=True), Advance(1, 1)]
        else:
            rest = len(text) - 1 if number == 2 else 1
            advances = [Advance(0, 1, sample=True), Advance(1, rest, sample=True)]
        for output in step(engine, plan(number, (), new if number == 1 else (), advances)):
            assert not output.error
            generated[output.sequence_id] += [token.id for token in output.tokens]
    lists = GreenLists(description.vocab_size)
    assert detect(generated[0], lists).z_score > 4
    assert abs(detect(generated[1], lists).z_score) < 3
    # And from the text alone, as the command reads it.
    (tmp_path / "story").write_text(tokenizer.decode(generated[0]))
    assert watermark.main([str(embedded_folder), str(tmp_path / "story")]) == 0
