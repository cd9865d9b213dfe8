"""Against files and the tool of llama.cpp, which `make bench` unpacks and builds: the published vectors of its
vocabularies, and a tiny model in the types that its tool writes."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGUFReader
from gguf_files import save_gguf
from model_driver import ModelDriver
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.header import read_header
from penstock_server.weights.gguf.metadata import Metadata
from penstock_server.weights.gguf.tokenizer import tokenizer_json
from rank_threads import run_ranks
from tiny_models import prompts
from tokenizers import Tokenizer

PEERS = Path(__file__).parents[3] / ".peers"
LLAMA = PEERS / "llama.cpp"
VOCABULARIES = sorted(LLAMA.glob("models/ggml-vocab-*.gguf"))
REFUSED = {
    "aquila": "does not name its pre-tokenizer",
    "bert-bge": "GGUF tokenizer 'bert' is not supported",
    "gemma-4": "GGUF tokenizer 'gemma4' is not supported",
}
# The published tokenizer composes characters (NFC); llama.cpp does not.
COMPOSED = {"qwen35": 3}
TOOL = LLAMA / "build" / "bin" / "llama-quantize"
# What the tool writes without an importance matrix, and the type of most of its matrices.
TYPES = {
    **{name: name for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q6_K", "IQ4_NL", "IQ4_XS", "Q2_K")},
    **{f"Q{bits}_K_{size}": f"Q{bits}_K" for bits, sizes in ((3, "SML"), (4, "SM"), (5, "SM")) for size in sizes},
}
# Rows are whole blocks of 256.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

pytestmark = pytest.mark.slow


def vectors(path: Path) -> list[tuple[str, list[int]]]:
    """The texts of a vocabulary with their ids, without tokens that are added to every text."""
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(id_) for id_ in line.split()] for line in path.with_suffix(".gguf.out").read_text().splitlines()]
    return list(zip(texts[: len(ids)], ids, strict=True))


@pytest.mark.skipif(not VOCABULARIES, reason="llama.cpp is not unpacked; make bench does")
def test_vocabularies_of_llama_cpp_give_the_published_ids() -> None:
    num_vectors = 0
    for path in VOCABULARIES:
        name, metadata = path.stem.removeprefix("ggml-vocab-"), Metadata(read_header(path), path)
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                tokenizer_json(metadata)
            continue
        tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))
        if not path.with_suffix(".gguf.inp").exists():
            continue
        texts = vectors(path)
        found = [tokenizer.encode(text, add_special_tokens=False).ids for text, _ in texts]
        wrong = [text for ids, (text, expected) in zip(found, texts, strict=True) if ids != expected]
        assert len(wrong) == COMPOSED.get(name, 0), (name, wrong)
        num_vectors += len(texts)
    assert num_vectors > 500


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
    return save_gguf(model, tmp_path_factory.mktemp("source") / "source.gguf", "llama", "F32")


def logits(folder: Path, *chunks: int, group: RankGroup | None = None, dequantize: bool = False) -> torch.Tensor | None:
    """[tokens, vocab] float32, on rank 0"""
    options = LoadOptions(folder, torch.bfloat16, torch.device("cpu"), 16, dequantize=dequantize)
    driver = ModelDriver(load_model(options, group or RankGroup()), 16, num_blocks=4)
    sequence = driver.sequence(prompts(1, [40], SIZES["vocab_size"])[0])
    rows = [driver.step([(sequence, count)], every_row=True) for count in chunks]
    return None if rows[0] is None else torch.cat(rows).float()


@pytest.mark.native
@pytest.mark.usefixtures("model_cache", "one_thread")
@pytest.mark.skipif(not TOOL.exists(), reason="llama-quantize is not built; bench/quantized.py does")
@pytest.mark.parametrize("kind", TYPES)
def test_a_file_of_llama_quantize_is_served_like_its_dequantized_weights(
    kind: str, source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    subprocess.run([TOOL, source, path, kind], check=True, capture_output=True)
    stored = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) == 2)
    assert stored.most_common(1)[0][0] == TYPES[kind]
    folder = gguf_folder(path)
    found, exact = logits(folder, 40), logits(folder, 40, dequantize=True)
    assert found is not None
    assert exact is not None
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < 0.05 * exact.norm()
    chunked, of_ranks = logits(folder, 7, 33), run_ranks(2, lambda group: logits(folder, 40, group=group))[0]
    assert chunked is not None
    assert of_ranks is not None
    assert torch.equal(found, chunked)
    assert torch.equal(found, of_ranks)
