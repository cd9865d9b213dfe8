"""Adapters of the token embedding and of the output head give the logits of `peft`, with heads of their own and tied
ones, and leave the bits of other rows alone. The copy of the base's weight that `peft` saves must be this base's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, VOCAB
from engine_run import EngineRun
from near_tie import assert_greedy
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Adapter, NewSequence, Sampling
from plans import Advance, plan, step
from safetensors.torch import load_file, save_file
from test_adapters import (
    ACCURATE,
    MAX_RANK,
    assert_two_ranks_compute_the_bits_of_one,
    load,
    loaded,
    logits_of,
    make_adapter,
    reference,
    save,
    texts,
)
from test_native_stack import BLOCK_TOKENS, widened

pytest.importorskip("peft")
pytestmark = pytest.mark.native

TIED = replace(CASES["llama"], values={**CASES["llama"].values, "tie_word_embeddings": True})
BASES = {
    "llama": CASES["llama"],
    "tied": TIED,
    "own-head": TIED,  # in the checkpoint
    "gemma2": CASES["gemma2"],  # tied; embeddings are multiplied, logits capped
    "gpt-neox": CASES["gpt-neox"],  # other names
    "opt-350m": CASES["opt-350m"],  # embeddings of another size
}
BOTH = {
    "gpt-neox": ["embed_in", "lm_head", "query_key_value"],
    "opt-350m": ["embed_tokens", "lm_head", "q_proj"],
}
DEFAULT = ["embed_tokens", "lm_head", "q_proj"]


def save_base(name: str, folder: Path) -> Path:
    save("llama" if BASES[name] is TIED else name, widened(BASES[name]), folder)
    if name == "own-head":
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_peft_and_neighbours_keep_their_bits(name: str, tmp_path: Path) -> None:
    folder = save_base(name, tmp_path / "base")
    both = BOTH.get(name, DEFAULT)
    one, one_model = make_adapter(tmp_path / "one", folder, 1, target_modules=both)
    other, other_model = make_adapter(tmp_path / "other", folder, 2, r=5, use_rslora=True, target_modules=both[1:])
    model = load(folder)
    first, second = loaded(model, [one, other])
    of_sequences = [first, None, second, first]
    together = logits_of(model, texts(), of_sequences)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, logits, expected in zip(texts(), together, (one_model, base, other_model, one_model), strict=True):
        torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)
    plain = logits_of(model, texts(), [None] * 4)
    assert torch.equal(together[1], plain[1])
    assert not torch.allclose(together[2], plain[2], atol=1e-2)
    for text, adapter, logits in zip(texts(), of_sequences, together, strict=True):
        assert torch.equal(logits_of(model, [text], [adapter])[0], logits)


@pytest.mark.parametrize(
    ("targets", "changed"),
    [
        ({"target_modules": ["embed_tokens"]}, {"model.embed_tokens"}),
        ({"target_modules": ["lm_head"]}, {"lm_head"}),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, {"model.embed_tokens", "lm_head"}),
    ],
)
def test_a_tied_head_has_the_adapters_of_its_own_module(
    targets: dict[str, Any], changed: set[str], tmp_path: Path
) -> None:
    """peft's rule: the base's weight is shared, but A and B only with `ensure_weight_tying`, and both are saved."""
    folder = save_base("tied", tmp_path / "base")
    adapter, expected = make_adapter(tmp_path / "adapter", folder, 1, **targets)
    tensors = load_file(adapter / "adapter_model.safetensors")
    saved = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors if ".lora_" in name}
    assert saved == changed
    model = load(folder)
    text = texts()[0]
    (logits,) = logits_of(model, [text], loaded(model, [adapter]))
    torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)


@pytest.mark.parametrize("name", ["llama", "tied", "own-head"])
def test_two_ranks_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    """Each has a part of the vocabulary."""
    folder = save_base(name, tmp_path / "base")
    one, _ = make_adapter(tmp_path / "one", folder, 1, target_modules=DEFAULT)
    other, _ = make_adapter(tmp_path / "other", folder, 2, r=3, target_modules=["lm_head"])
    assert_two_ranks_compute_the_bits_of_one(folder, [one, other])


def test_embedding_and_head_of_a_quantized_base_are_changed(tmp_path: Path) -> None:
    case = widened(CASES["llama"])
    folder = save("llama", replace(case, values={**case.values, "intermediate_size": 128}), tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", folder, 1, target_modules=DEFAULT)
    model = load(folder, dtype=torch.bfloat16, quantize="bitsandbytes-nf4", activation_bits=16)
    (adapter,) = loaded(model, [one])
    text = texts()[0]
    plain, with_adapter = logits_of(model, [text, text], [None, adapter])
    assert torch.equal(logits_of(model, [text], [None])[0], plain)
    expected, base = reference(one_model, text), reference(one_model.unload(), text)
    error = (plain.float() - base).norm() / base.norm()
    assert (with_adapter.float() - expected).norm() / expected.norm() < 2 * error + 0.02


def test_the_engine_samples_and_scores_prompts_with_the_heads_adapter(tmp_path: Path) -> None:
    folder = save_base("tied", tmp_path / "base")
    adapter, expected = make_adapter(tmp_path / "adapter", folder, 1, target_modules=DEFAULT)

    def load_with_adapters(options: Any, group: RankGroup) -> Any:
        return load_model(replace(options, max_adapters=1, max_adapter_rank=MAX_RANK), group)

    run = EngineRun(folder, load_with_adapters, block_tokens=BLOCK_TOKENS)
    run.adapter = Adapter(1, adapter)
    prompts = texts()[:2]
    found = run.greedy([*prompts, prompts[1]], 12, shared_tokens=len(prompts[1]) - 1, chunk=7)
    for prompt, tokens in zip([*prompts, prompts[1]], found, strict=True):
        assert_greedy(reference(expected, [*prompt, *tokens])[len(prompt) - 1 : -1], tokens)
    text = prompts[0][:10]
    scored = Sampling(prompt_logprobs=True)
    new = [
        NewSequence(100 + index, text, len(text), 0, [index], scored, adapter=each)
        for index, each in enumerate((run.adapter, None))
    ]
    advances = [Advance(100 + index, len(text), sample=True) for index in range(2)]
    run.engine.reset()
    outputs = step(run.engine, plan(1, (), new, advances))
    references = [reference(expected, text), reference(expected.unload(), text)]
    for output, logits in zip(outputs, references, strict=True):
        logprobs = logits[:-1].log_softmax(-1)
        wanted = logprobs.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        its = torch.tensor([token.logprob for token in output.prompt_tokens])
        torch.testing.assert_close(its, wanted, atol=1e-3, rtol=1e-3)
    run.engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    """An adapter, and its loaded base."""
    folder = tmp_path_factory.mktemp("served")
    base = save_base("tied", folder / "base")
    adapter, _ = make_adapter(folder / "adapter", base, 1, target_modules=DEFAULT)
    return adapter, load(base)


def changed_copy(adapter: Path, folder: Path, name: str, copy: torch.Tensor) -> Path:
    """An adapter with another copy of a weight of the base."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({**tensors, f"base_model.model.{name}.base_layer.weight": copy}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_copy_of_another_bases_weight_is_refused(name: str, served: tuple[Path, Decoder], tmp_path: Path) -> None:
    adapter, model = served
    copy = load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{name}.base_layer.weight"]
    rounded = changed_copy(adapter, tmp_path / "rounded", name, copy.bfloat16())
    loaded(model, [rounded])
    initialized = copy.clone()
    initialized[17] = copy[18]
    for index, (other, reason) in enumerate(
        [
            (initialized, "the row of token 17 differs; merge the adapter into its base with peft"),
            (torch.cat((copy, copy[:3])), rf"its shape is \[{VOCAB + 3}, .*if the vocabulary was changed, merge"),
        ]
    ):
        folder = changed_copy(adapter, tmp_path / str(index), name, other)
        with pytest.raises(ConfigError, match=f"{name}.base_layer.weight is not the weight of this base: {reason}"):
            loaded(model, [folder])


def test_a_resized_vocabulary_is_refused(served: tuple[Path, Decoder], tmp_path: Path) -> None:
    """peft saves the tables whole, also those that are not its targets."""
    adapter, model = served
    folder = changed_copy(adapter, tmp_path / "resized", "lm_head", torch.zeros(1, 1))
    path = folder / "adapter_model.safetensors"
    save_file({"base_model.model.lm_head.weight": torch.zeros(VOCAB + 3, 8)}, path)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not supported; .*; merge the adapter into its base"):
        loaded(model, [folder])
