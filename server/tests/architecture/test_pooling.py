"""Embeddings and scores against transformers, with the pooling that sentence-transformers does; and what model folders
may ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock_server.engine import Engine
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.pooling import read_pooling
from penstock_server.models.registry import read_spec
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import NewSequence
from plans import Advance, plan
from safetensors.torch import load_file, save_file
from tested_device import DEVICE
from tiny_models import prompts

VOCAB = 131
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
ENCODER = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
MODERNBERT: dict[str, Any] = {
    **ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
QWEN3 = {**DECODER, "head_dim": 16}
EMBEDDERS = {
    "qwen3-last": ("Qwen3Config", QWEN3, "lasttoken"),
    "mistral-mean": ("MistralConfig", {**DECODER, "sliding_window": None}, "mean_tokens"),
    "bert-cls": ("BertConfig", ENCODER, "cls_token"),
    "bert-mean": ("BertConfig", {**ENCODER, "hidden_act": "gelu_new"}, "mean_tokens"),
    "xlm-roberta-cls": ("XLMRobertaConfig", {**ENCODER, "type_vocab_size": 1}, "cls_token"),
    "modernbert-mean": ("ModernBertConfig", MODERNBERT, "mean_tokens"),
    "nomic_bert-mean": ("NomicBertConfig", ENCODER, "mean_tokens"),
}
RERANKERS = {
    "qwen3": ("Qwen3Config", QWEN3),
    "xlm-roberta": ("XLMRobertaConfig", {**ENCODER, "type_vocab_size": 1}),
    "bert": ("BertConfig", ENCODER),
    "nomic_bert": ("NomicBertConfig", ENCODER),
    "nomic_bert-without-types": ("NomicBertConfig", {**ENCODER, "type_vocab_size": 1}),
    "modernbert-cls": ("ModernBertConfig", {**MODERNBERT, "classifier_pooling": "cls"}),
    "modernbert-mean": ("ModernBertConfig", {**MODERNBERT, "classifier_pooling": "mean", "classifier_bias": True}),
}


def make(factory: Any, config: str, values: dict[str, Any], folder: Path) -> Any:
    """A model with random tensors, norms and biases too, saved to the folder."""
    torch.manual_seed(5)
    model = factory.from_config(getattr(transformers, config)(**values), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
            else:
                parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def add_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    """As sentence-transformers saves a model."""
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def add_dense(folder: Path, index: int, values: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    """The weights and configuration of a Dense module that `add_modules` named."""
    torch.manual_seed(index)
    layer = torch.nn.Linear(values["in_features"], values["out_features"], values["bias"]).to(dtype)
    place = folder / f"{index}_Dense"
    place.mkdir()
    save_file({f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(values))
    return layer.float()


def run(
    folder: Path, texts: list[list[int]], block_tokens: int, chunk: int, num_second: Sequence[int] = (0, 0, 0)
) -> list[torch.Tensor]:
    """The vectors of three texts: the second starts a step after the first, and the third is started again halfway.
    An encoder computes each text in one step. num_second: last tokens of each text that have token type 1."""
    model = load_model(LoadOptions(folder, torch.float32, DEVICE, block_tokens), RankGroup())
    engine = Engine(model, RankGroup(), DEVICE, block_tokens)
    engine.warm_up(WarmUpConfig(80, 4, max_sequence_tokens=0, num_blocks=64))
    is_encoder = model.traits.max_source_tokens > 0
    computed = dict.fromkeys(range(3), 0)
    vectors: dict[int, torch.Tensor] = {}
    for number in range(1, 40):
        new = {1: [0, 2], 2: [1, 2]}.get(number, [])
        freed = [2] if number == 2 else []
        computed.update(dict.fromkeys(new, 0))
        sequences = [
            NewSequence(
                each,
                texts[each],
                len(texts[each]),
                block_ids=range(16 * each, 16 * each + -(-len(texts[each]) // block_tokens)),
                num_source_tokens=len(texts[each]) if is_encoder else 0,
                num_second_text_tokens=num_second[each],
            )
            for each in new
        ]
        advances = []
        for each, text in enumerate(texts):
            is_known = number > 1 or each in new
            if is_known and computed[each] < len(text):
                count = len(text) if is_encoder else min(chunk, len(text) - computed[each])
                computed[each] += count
                advances.append(Advance(each, count, sample=computed[each] == len(text)))
        result = engine.step(plan(number, freed, sequences, advances))
        assert not result.failures
        for sequence_id, vector in zip(result.sequence_ids.tolist(), result.vectors, strict=True):
            vectors[sequence_id] = torch.tensor(vector)
        if number > 1 and len(vectors) == 3:
            break
    return [vectors[each] for each in range(3)]


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, values, mode = EMBEDDERS[name]
    model = make(transformers.AutoModel, config, values, tmp_path)
    add_modules(tmp_path, {"word_embedding_dimension": 48, f"pooling_mode_{mode}": True})
    texts = prompts(3, [40, 9, 25], VOCAB)
    for block_tokens in (4, 16):  # attention in plain torch, and in kernels
        for text, vector in zip(texts, run(tmp_path, texts, block_tokens, chunk=7), strict=True):
            with torch.no_grad():
                states = model(torch.tensor([text])).last_hidden_state[0]
            expected = {"lasttoken": states[-1], "cls_token": states[0], "mean_tokens": states.mean(0)}[mode]
            torch.testing.assert_close(vector, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, values = RERANKERS[name]
    values = {**values, "num_labels": 1}
    model = make(transformers.AutoModelForSequenceClassification, config, values, tmp_path)
    texts = prompts(3, [40, 9, 25], VOCAB)
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    num_second = [23, 0, 25] if has_types else [0, 0, 0]
    found = run(tmp_path, texts, 16, chunk=7, num_second=num_second)
    for text, num, vector in zip(texts, num_second, found, strict=True):
        types = {"token_type_ids": torch.tensor([[0] * (len(text) - num) + [1] * num])} if has_types else {}
        with torch.no_grad():
            expected = model(torch.tensor([text]), **types).logits[0]
        torch.testing.assert_close(vector, expected, atol=2e-5, rtol=1e-4)


def test_a_published_nomic_bert_has_other_keys(tmp_path: Path) -> None:
    model = make(transformers.AutoModel, "NomicBertConfig", ENCODER, tmp_path)
    config: dict[str, Any] = {
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 48,
        "n_embd": 48,
        "n_head": 6,
        "n_inner": 80,
        "n_layer": 3,
        "n_positions": 64,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "type_vocab_size": 2,
        "vocab_size": VOCAB,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path)[0].max_position_tokens == 48
    text = prompts(3, [40], VOCAB)[0]
    found = run(tmp_path, [text] * 3, 16, chunk=7)[0]
    with torch.no_grad():
        expected = model(torch.tensor([text])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    with pytest.raises(ConfigError, match="num_experts 8 is not supported; supported: 0"):
        read_spec(tmp_path)


def test_a_generating_model_s_folder_with_modules_embeds(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: a causal model with a head, which is not loaded."""
    model = make(transformers.AutoModelForCausalLM, "Qwen3Config", QWEN3, tmp_path)
    assert read_pooling(tmp_path) is None
    add_modules(tmp_path, {"pooling_mode": "lasttoken"}, "Normalize")
    text = prompts(3, [9], VOCAB)[0]
    found = run(tmp_path, [text] * 3, 16, chunk=7)[0]
    with torch.no_grad():
        expected = model.model(torch.tensor([text])).last_hidden_state[0, -1]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    """The second one's weights are a pickle."""
    model = make(transformers.AutoModel, "BertConfig", ENCODER, tmp_path)
    add_modules(tmp_path, {"pooling_mode": "mean"}, "Dense", "Dense", "Normalize")
    tanh, identity = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
    wide = {"in_features": 48, "out_features": 70, "bias": True, "activation_function": tanh}
    narrow = {"in_features": 70, "out_features": 20, "bias": False, "activation_function": identity}
    first, second = add_dense(tmp_path, 2, wide), add_dense(tmp_path, 3, narrow, torch.float16)
    pickle = tmp_path / "3_Dense" / "model.safetensors"
    torch.save(load_file(pickle), pickle.with_name("pytorch_model.bin"))
    pickle.unlink()
    texts = prompts(3, [40, 9, 25], VOCAB)
    for text, vector in zip(texts, run(tmp_path, texts, 16, chunk=7), strict=True):
        with torch.no_grad():
            mean = model(torch.tensor([text])).last_hidden_state[0].mean(0)
            expected = second(first(mean).tanh())
        torch.testing.assert_close(vector, expected, atol=2e-5, rtol=1e-4)
    engine, description = Engine.load(LoadConfig(tmp_path, dtype="float32", num_threads=1), load_model=load_model)
    engine.close()
    assert description.num_dimensions == 20
    assert description.pooling is not None
    assert description.pooling.is_normalized  # by the router, after all of it


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"in_features": 47}, "from 47 numbers to 8 is not possible; its input has 48"),
        ({"out_features": 9}, r"linear.weight has shape \[8, 48\]"),
        ({"bias": True}, "lacks 1 of 2 tensors: linear.bias"),
        ({"activation_function": "torch.nn.modules.activation.ReLU"}, "ReLU' is not supported; supported: torch.nn"),
        ({"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings' is not supported"),
    ],
)
def test_unsupported_dense_modules_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(transformers.AutoModel, "BertConfig", ENCODER, tmp_path)
    add_modules(tmp_path, {"pooling_mode": "mean"}, "Dense")
    kept = {"in_features": 48, "out_features": 8, "bias": False}
    add_dense(tmp_path, 2, kept)
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**kept, **values}))
    with pytest.raises(ConfigError, match=message):
        load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 16), RankGroup())


def test_a_dense_module_needs_its_files(tmp_path: Path) -> None:
    transformers.BertConfig(**ENCODER).save_pretrained(tmp_path)
    add_modules(tmp_path, {"pooling_mode": "mean"}, "Dense")
    with pytest.raises(ConfigError, match=r"2_Dense holds no config\.json, but modules.json names this folder"):
        read_spec(tmp_path)
    add_dense(tmp_path, 2, {"in_features": 48, "out_features": 8, "bias": False})
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"2_Dense holds no model\.safetensors and no pytorch_model\.bin; a Dense"):
        read_spec(tmp_path)


def test_a_dense_module_s_pickle_runs_no_code(tmp_path: Path) -> None:
    make(transformers.AutoModel, "BertConfig", ENCODER, tmp_path)
    add_modules(tmp_path, {"pooling_mode": "mean"}, "Dense")
    add_dense(tmp_path, 2, {"in_features": 48, "out_features": 8, "bias": False})
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    torch.save({"linear.weight": Path("/")}, tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"contains code \(pathlib"):
        load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 16), RankGroup())


def test_the_router_learns_what_a_model_makes_of_a_sequence(tmp_path: Path) -> None:
    make(transformers.AutoModel, "BertConfig", ENCODER, tmp_path)
    add_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "Normalize")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    engine, description = Engine.load(LoadConfig(tmp_path, dtype="float32", num_threads=1), load_model=load_model)
    engine.close()
    assert description.pooling is not None
    assert (description.pooling.task, description.pooling.outputs) == ("embed", "cls")
    assert description.pooling.is_normalized
    assert (description.pooling.is_matryoshka, description.pooling.matryoshka_dimensions) == (True, (8, 16))
    assert (description.num_dimensions, description.max_position_tokens, description.max_source_tokens) == (48, 48, 48)
    assert description.decoder_prefix == ()


def test_a_broken_vector_fails_its_sequence_only(tmp_path: Path) -> None:
    model = make(transformers.AutoModel, "BertConfig", ENCODER, tmp_path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = 3e38  # its variance is infinite
    model.save_pretrained(tmp_path)
    engine = Engine(load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 16), RankGroup()), RankGroup(), DEVICE, 16)
    engine.warm_up(WarmUpConfig(64, 4, num_blocks=64))
    new = [NewSequence(each, [5, 6 + each], 2, block_ids=[each], num_source_tokens=2) for each in range(3)]
    result = engine.step(plan(1, (), new, [Advance(each, 2, sample=True) for each in range(3)]))
    assert result.sequence_ids.tolist() == [0, 2]
    assert [failure.sequence_id for failure in result.failures] == [1]


@pytest.mark.parametrize(
    ("num_types", "num_second", "message"),
    [
        (1, 1, "1 tokens of a second text among 2 known tokens, but the model has no"),
        (2, 3, "has 3 tokens of a second"),
    ],
)
def test_only_known_tokens_of_a_model_with_types_have_one(
    num_types: int, num_second: int, message: str, tmp_path: Path
) -> None:
    make(transformers.AutoModel, "BertConfig", {**ENCODER, "type_vocab_size": num_types}, tmp_path)
    engine = Engine(load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 16), RankGroup()), RankGroup(), DEVICE, 16)
    engine.warm_up(WarmUpConfig(64, 4, num_blocks=64))
    new = [NewSequence(0, [5, 6], 2, block_ids=[0], num_source_tokens=2, num_second_text_tokens=num_second)]
    result = engine.step(plan(1, (), new, [Advance(0, 2, sample=True)]))
    assert message in result.failures[0].reason


def test_an_encoder_s_sequence_is_all_source(tmp_path: Path) -> None:
    make(transformers.AutoModel, "BertConfig", ENCODER, tmp_path)
    engine = Engine(load_model(LoadOptions(tmp_path, torch.float32, DEVICE, 16), RankGroup()), RankGroup(), DEVICE, 16)
    engine.warm_up(WarmUpConfig(64, 4, num_blocks=64))
    new = [NewSequence(0, [5, 6], 2, block_ids=[0], num_source_tokens=1)]
    result = engine.step(plan(1, (), new, [Advance(0, 2, sample=True)]))
    assert "an encoder reads all of them" in result.failures[0].reason


@pytest.mark.parametrize(
    ("pooling", "modules", "message"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling mode 'pooling_mode_max_tokens' is not supported"),
        ({"pooling_mode": "max"}, (), "pooling mode 'max' is not supported; supported: cls, mean, lasttoken"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, (), "exactly one pooling mode"),
        ({}, (), "exactly one pooling mode must be set, not 0"),
        ({"pooling_mode": "mean", "include_prompt": False}, (), "include_prompt is false"),
        ({"pooling_mode": "mean"}, ("Normalize", "Dense"), "a Dense module behind Normalize is not supported"),
        ({"pooling_mode": "mean"}, ("LSTM",), "module 'LSTM' is not supported; supported: Transformer, Pooling, Dense"),
    ],
)
def test_unsupported_modules_are_refused(
    pooling: dict[str, Any], modules: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    transformers.BertConfig(**ENCODER).save_pretrained(tmp_path)
    add_modules(tmp_path, pooling, *modules)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


def test_classifiers_that_are_no_rerankers_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="it classifies into 2 labels; only rerankers, which have one label"):
        read_pooling(tmp_path)
