"""Embeddings and scores end to end: tiny models, the real binary, real clients."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from client import ask
from huggingface_hub import InferenceClient
from penstock import LLM
from pooling_model import SIZES, Served, add_modules, save, serve

TEXTS = ["What is deep learning?", "A branch of machine learning.", "fish"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Qwen3, the last token, with prompts that need several steps."""
    folder = tmp_path_factory.mktemp("decoder")
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    made = save(folder, transformers.AutoModel, config)
    add_modules(folder, "lasttoken")
    yield from serve(folder, *made, "--max-batch-prefill-tokens", "32", "--max-batch-size", "8")


def unit(vector: torch.Tensor) -> np.ndarray[Any, Any]:
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def test_the_openai_client_gets_the_vectors_of_transformers(encoder: Served, decoder: Served) -> None:
    for served in (encoder, decoder):
        client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="-")
        pooled = [served.states(text).mean(0) if served is encoder else served.states(text)[-1] for text in TEXTS]
        ids = [served.tokenizer.encode(text).ids for text in TEXTS]
        # The client asks for base64 unless told otherwise.
        for inputs, options in ((TEXTS, {}), (TEXTS, {"encoding_format": "float"}), (ids, {})):
            answer = client.embeddings.create(model="any", input=inputs, **options)
            for expected, data in zip(pooled, answer.data, strict=True):
                np.testing.assert_allclose(data.embedding, unit(expected), atol=1e-4)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


def test_llm_makes_the_vectors_of_the_server(encoder: Served) -> None:
    texts = [f"{text} {i}" for i in range(6) for text in TEXTS]
    expected = [ask(encoder.server, "/v1/embeddings", {"input": text}).json["data"][0]["embedding"] for text in texts]
    with LLM(ask(encoder.server, "/info").json["model_id"], dtype="float32", max_client_batch_size=8) as llm:
        found = llm.embed(texts)
        assert [(one.index, one.text) for one in found] == list(enumerate(texts))
        np.testing.assert_array_equal(np.float32([one.vector for one in found]), np.float32(expected))
        assert len(llm.embed(encoder.tokenizer.encode(TEXTS[0]).ids, dimensions=8)[0].vector) == 8


def test_the_hub_s_client_posts_to_the_root(encoder: Served) -> None:
    client = InferenceClient(model=encoder.server.url)
    found = client.feature_extraction(TEXTS[0])
    np.testing.assert_allclose(np.squeeze(found), unit(encoder.states(TEXTS[0]).mean(0)), atol=1e-4)


def test_embed_takes_the_options_of_text_embeddings_inference(encoder: Served) -> None:
    def embed(**options: Any) -> np.ndarray[Any, Any]:
        answer = ask(encoder.server, "/embed", {"inputs": TEXTS[0], **options})
        assert answer.status == 200, answer.text
        return np.array(answer.json[0])

    mean = encoder.states(TEXTS[0]).mean(0)
    np.testing.assert_allclose(embed(), unit(mean), atol=1e-4)
    np.testing.assert_allclose(embed(encoding_format="float"), unit(mean), atol=1e-4)
    np.testing.assert_allclose(embed(normalize=False), mean.numpy(), atol=1e-4)
    np.testing.assert_allclose(embed(dimensions=8), unit(mean[:8]), atol=1e-4)
    prompted = encoder.states(f"query: {TEXTS[0]}").mean(0)
    np.testing.assert_allclose(embed(prompt_name="query"), unit(prompted), atol=1e-4)
    body = {"input": TEXTS[0], "prompt_name": "query", "normalize": False, "embed_dtype": "float32"}
    vector = ask(encoder.server, "/v1/embeddings", body).json["data"][0]["embedding"]
    np.testing.assert_allclose(vector, prompted.numpy(), atol=1e-4)
    long = "abcdefgh" * 40
    right, left = (encoder.states(part).mean(0) for part in (long[:126], long[-126:]))
    np.testing.assert_allclose(embed(inputs=long, truncate=True), unit(right), atol=1e-4)
    found = embed(inputs=long, truncate=True, truncation_direction="left")
    np.testing.assert_allclose(found, unit(left), atol=1e-4)


def test_texts_are_ranked_by_their_score(reranker: Served) -> None:
    query = "machine learning"
    logits = []
    for text in TEXTS:
        pair = reranker.tokenizer.encode(query, text)
        inputs = {"input_ids": torch.tensor([pair.ids]), "token_type_ids": torch.tensor([pair.type_ids])}
        with torch.no_grad():
            logits.append(reranker.model(**inputs).logits[0, 0].item())
    order = sorted(range(len(TEXTS)), key=lambda index: -logits[index])
    raw = ask(
        reranker.server, "/rerank", {"query": query, "texts": TEXTS, "raw_scores": True, "return_text": True}
    ).json
    assert [(rank["index"], rank["text"]) for rank in raw] == [(index, TEXTS[index]) for index in order]
    np.testing.assert_allclose([rank["score"] for rank in raw], [logits[index] for index in order], atol=1e-4)
    answer = ask(reranker.server, "/v1/rerank", {"query": query, "documents": TEXTS, "top_n": 2}).json
    assert [result["index"] for result in answer["results"]] == order[:2]
    expected = torch.tensor([logits[index] for index in order[:2]]).sigmoid()
    np.testing.assert_allclose([result["relevance_score"] for result in answer["results"]], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/embed", {"inputs": []}, "`inputs` cannot be empty"),
        ("/embed", {"inputs": ""}, "`inputs` cannot be empty"),
        ("/embed", {"inputs": ["a", ""]}, "`inputs` cannot be empty"),
        ("/embed", {"inputs": [[]]}, "`inputs` cannot be empty"),
        ("/embed", {"inputs": [[999]]}, "token ids must be < 258. Given: 999"),
        ("/embed", {"inputs": {"a": 1}}, "a string, a list of strings, a list of token ids"),
        ("/embed", {"inputs": "a" * 127}, "`inputs` must have at most 128 tokens. Given: 129"),
        ("/embed", {"inputs": ["a"] * 9}, "`inputs` must be at most 8; raise --max-client-batch-size"),
        ("/embed", {"inputs": "a", "prompt_name": "none"}, '`prompt_name` must be one of "query". Given: none'),
        ("/v1/embeddings", {"input": []}, "`input` cannot be empty"),
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, "`dimensions` must be >= 1 and <= 48. Given: 49"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "unknown variant `hex`"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "none"}, '`prompt_name` must be one of "query". Given: none'),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "`truncate_prompt_tokens` is not supported"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "`embed_dtype` is not supported"),
        ("/embed", {"inputs": "a", "encoding_format": "base64"}, "unknown variant `base64`, expected `float`"),
        ("/rerank", {"query": "a", "texts": ["b"]}, "it makes embeddings (/embed, /v1/embeddings)"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "it makes embeddings"),
        ("/generate", {"inputs": "a"}, "it makes embeddings"),
    ],
)
def test_bad_input_is_refused(encoder: Served, path: str, body: dict[str, Any], message: str) -> None:
    answer = ask(encoder.server, path, body)
    assert answer.status == (400 if path.startswith("/v1") else 422), answer.text
    assert message in (answer.text if answer.text[0] != "{" else json.dumps(answer.json).replace('\\"', '"'))


def test_a_worker_s_death_is_not_seen(decoder: Served) -> None:
    pids = decoder.server.worker_pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    found = ask(decoder.server, "/embed", {"inputs": TEXTS[0]})
    np.testing.assert_allclose(found.json[0], unit(decoder.states(TEXTS[0])[-1]), atol=1e-4)
    assert decoder.server.worker_pids() != pids


def test_info_says_what_the_model_is_for(encoder: Served, reranker: Served) -> None:
    tags = [ask(served.server, "/info").json["model_pipeline_tag"] for served in (encoder, reranker)]
    assert tags == ["feature-extraction", "text-ranking"]
