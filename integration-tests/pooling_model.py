"""Tiny random models that pool, and servers of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from binary import Server, start
from tokenizers import Tokenizer, models, pre_tokenizers, processors

CLS, SEP = 256, 257
SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass
class Served:
    server: Server
    model: Any
    tokenizer: Tokenizer

    def states(self, text: str) -> torch.Tensor:
        """[tokens, hidden]"""
        with torch.no_grad():
            states: torch.Tensor = self.model(torch.tensor([self.tokenizer.encode(text).ids])).last_hidden_state[0]
        return states


def save(folder: Path, factory: Any, config: Any) -> tuple[Any, Tokenizer]:
    """A random model over bytes, whose tokenizer adds tokens around a text and between two, and tells the two apart."""
    vocab = {token: index for index, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE({**vocab, "[CLS]": CLS, "[SEP]": SEP}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    model = factory.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def add_modules(folder: Path, mode: str) -> None:
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def serve(folder: Path, model: Any, tokenizer: Tokenizer, *flags: str) -> Iterator[Served]:
    """Stops the server when the iterator is exhausted."""
    server = start("--model-id", str(folder), "--dtype", "float32", "--max-client-batch-size", "8", *flags)
    yield Served(server, model, tokenizer)
    assert server.stop() == 0


def serve_encoder(folder: Path) -> Iterator[Served]:
    """BERT, mean pooling, Matryoshka."""
    made = save(folder, transformers.AutoModel, transformers.BertConfig(**SIZES, is_matryoshka=True))
    add_modules(folder, "mean_tokens")
    yield from serve(folder, *made)


def serve_reranker(folder: Path) -> Iterator[Served]:
    """BERT, which reads token types."""
    config = transformers.BertConfig(**SIZES, num_labels=1)
    yield from serve(folder, *save(folder, transformers.AutoModelForSequenceClassification, config))
