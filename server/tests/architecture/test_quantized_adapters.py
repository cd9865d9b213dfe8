"""Adapters beside quantized weights give the logits that `peft` has with the weights that they stand for, in every kind
of format, and two ranks compute the bits of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from cases import CASES
from gguf_files import TOKENS, save_gguf
from penstock_server.models.decoder import Decoder
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.folder import gguf_folder
from quantized_checkpoints import FILE, save_quantized
from rank_threads import run_native_ranks
from safetensors.torch import save_file
from test_adapters import load, loaded, logits_of, make_adapter, reference, save, texts
from test_quantized_models import FORMATS
from tiny_model import make_model
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

pytest.importorskip("peft")
pytestmark = pytest.mark.native

# Every layer has whole blocks of 64 inputs: bitsandbytes' own dequantization on CPUs is wrong for others.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
CASE = replace(CASES["llama"], values={**CASES["llama"].values, **SIZES, "vocab_size": len(TOKENS)})
GGUF = ("Q4_0", "Q5_1", "Q8_0")


def checkpoints(kind: str, folder: Path) -> tuple[Path, Path]:
    """The folder of a quantized model, and that of the weights that it stands for, in float32."""
    model = make_model("llama", CASE)
    if kind not in GGUF:
        return save_quantized(model, folder, *FORMATS[kind])
    folder.mkdir()
    path, dense = save_gguf(model, folder / "model.gguf", "llama", kind), folder / "dense"
    model.save_pretrained(dense)
    exact = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, dense / FILE)
    return gguf_folder(path), dense


def assert_close(kind: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """NF4's codebook is rounded to integers of 8 bits."""
    assert (found - expected).norm() < (0.06 if kind == "nf4" else 5e-4) * expected.norm()


@pytest.mark.parametrize("kind", [*FORMATS, *GGUF])
def test_logits_are_those_of_peft_with_the_weights_that_are_stored(kind: str, tmp_path: Path) -> None:
    stored, dense = checkpoints(kind, tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", dense, 1)
    other, other_model = make_adapter(tmp_path / "other", dense, 2, r=5, use_rslora=True)
    model = load(stored, activation_bits=16)
    first, second = loaded(model, [one, other])
    together = logits_of(model, texts(), [first, None, second, first])
    base = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    for text, logits, expected in zip(texts(), together, (one_model, base, other_model, one_model), strict=True):
        assert_close(kind, logits, reference(expected, text))
    assert torch.equal(together[1], logits_of(model, texts()[1:2], [None])[0])
    merged = one_model.merge_and_unload()
    assert_close(kind, together[0], reference(merged, texts()[0]))


@pytest.mark.parametrize("kind", [*FORMATS, *GGUF])
def test_two_ranks_compute_the_bits_of_one(kind: str, tmp_path: Path) -> None:
    stored, dense = checkpoints(kind, tmp_path / "base")
    adapter, _ = make_adapter(tmp_path / "one", dense, 1)

    def logits(group: RankGroup) -> list[torch.Tensor]:
        model = load(stored, group, torch.bfloat16)
        (first,) = loaded(model, [adapter])
        return logits_of(model, texts(), [first, None, None, first])

    alone = logits(RankGroup())
    for of_rank in run_native_ranks(2, logits):
        for found, expected in zip(of_rank, alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("quantize", ["eetq", "fp8", "bitsandbytes-nf4"])
def test_adapters_are_added_to_weights_that_are_quantized_at_load(quantize: str, tmp_path: Path) -> None:
    folder = save("llama", CASE, tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", folder, 1)
    model: Decoder = load(folder, dtype=torch.bfloat16, quantize=quantize, activation_bits=16)
    (adapter,) = loaded(model, [one])
    text = texts()[0]
    with_adapter, plain = (logits_of(model, [text], [each])[0] for each in (adapter, None))
    assert torch.equal(logits_of(model, [text, text], [None, adapter])[0], plain)
    assert torch.equal(logits_of(model, [text, text], [None, adapter])[1], with_adapter)
    expected, base = reference(one_model, text), reference(one_model.unload(), text)
    # The error of the quantized base, which is as large without the adapter.
    error = (plain.float() - base).norm() / base.norm()
    assert (with_adapter.float() - expected).norm() / expected.norm() < 2 * error + 0.02
