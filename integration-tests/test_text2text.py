"""Tiny random encoder–decoders through the real binary, compared with transformers token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from binary import Server, launch, start
from client import ask, events, send
from fault.probe import metrics, wait_for_rest, wait_until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

WORDS = ["the", "a", "cat", "dog", "house", "sea", "sleeps", "small", "in", "translate", "English", "to", "German"]
LONGEST = 100  # --max-input-tokens
NUM_TOKENS = 12
TEXTS = ["the cat", "a small dog sleeps in the house", "translate English to German: the sea", "x", "the dog " * 12]


def unigram() -> Tokenizer:
    """Like T5's tokenizer: spaces belong to words, and </s> ends every source."""
    pieces = [f"▁{word}" for word in WORDS] + ["▁", *'abcdefghijklmnopqrstuvwxyzETG:{}",0123456789']
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), *((piece, -float(len(piece) < 3)) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


def byte_level() -> Tokenizer:
    """Like BART's tokenizer: <s> and </s> around every source."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [("<s>", 0), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    return tokenizer


def t5(vocab_size: int) -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=vocab_size,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        relative_attention_max_distance=24,
        decoder_start_token_id=0,
        initializer_factor=3.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(vocab_size: int) -> PreTrainedModel:
    config = transformers.BartConfig(
        vocab_size=vocab_size,
        d_model=48,
        max_position_embeddings=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        init_std=0.3,
    )
    return transformers.BartForConditionalGeneration(config)


@dataclass
class Pair:
    """The same weights in the server and in transformers."""

    server: Server
    model: Any
    tokenizer: Tokenizer
    answer_tokens: int  # maximum length of an answer

    def source(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def expected(self, text: str, num_tokens: int = NUM_TOKENS) -> tuple[list[int], str]:
        """(token ids including the end token, text) of the greedy answer."""
        source = torch.tensor([self.source(text)])
        answer = self.model.generate(source, max_new_tokens=num_tokens, do_sample=False, num_beams=1)
        ids = answer[0, 1:].tolist()  # the first one is the decoder start token
        return ids, self.tokenizer.decode(ids)


@pytest.fixture(scope="module", params=["t5", "bart"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    build, tokenizer = {"t5": (t5, unigram()), "bart": (bart, byte_level())}[request.param]
    torch.manual_seed(1)
    model = build(tokenizer.get_vocab_size()).eval()
    assert isinstance(model, GenerationMixin)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    limits = ("--max-input-tokens", str(LONGEST), "--max-concurrent-requests", "16")
    server = start("--model-id", str(folder), "--dtype", "float32", "--enable-prefill-logprobs", *limits)
    yield Pair(server, model, tokenizer, {"t5": 8191, "bart": 127}[request.param])
    assert server.stop() == 0


def post(server: Server, path: str, body: Any) -> tuple[int, Any]:
    answer = ask(server, path, body)
    return answer.status, answer.json


def generate(pair: Pair, text: str, **parameters: Any) -> tuple[list[int], str]:
    fixed = {"max_new_tokens": NUM_TOKENS, "details": True}
    status, answer = post(pair.server, "/generate", {"inputs": text, "parameters": {**fixed, **parameters}})
    assert status == 200, answer
    return [token["id"] for token in answer["details"]["tokens"]], answer["generated_text"]


def test_greedy_answers_equal_transformers(pair: Pair) -> None:
    answers = {text: generate(pair, text) for text in TEXTS}
    assert answers == {text: pair.expected(text) for text in TEXTS}
    assert len({tuple(ids) for ids, _ in answers.values()}) > 1, "all answers are equal, whatever the source"


def test_a_stream_equals_the_plain_answer(pair: Pair) -> None:
    text = TEXTS[1]
    ids, whole = pair.expected(text)
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
    stream = events(pair.server, "/generate_stream", {"inputs": text, "parameters": parameters})
    assert [event["token"]["id"] for event in stream] == ids
    assert "".join(event["token"]["text"] for event in stream if not event["token"]["special"]) == whole
    assert (stream[-1]["generated_text"], stream[-1]["details"]["input_length"]) == (whole, len(pair.source(text)))


def test_answers_of_different_lengths_run_concurrently(pair: Pair) -> None:
    wanted = [(text, num_tokens) for num_tokens in (1, 5, 23) for text in TEXTS]
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(lambda one: generate(pair, one[0], max_new_tokens=one[1]), wanted))
    assert answers == [pair.expected(text, num_tokens) for text, num_tokens in wanted]
    wait_for_rest(pair.server)


def test_completions_accept_text_and_token_ids_and_count_the_source(pair: Pair) -> None:
    text = TEXTS[2]
    ids, whole = pair.expected(text)
    for prompt in (text, pair.source(text)):
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        status, answer = post(pair.server, "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, whole)
        assert answer["usage"]["prompt_tokens"] == len(pair.source(text))
        assert answer["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "temperature": 1.5, "seed": 3}])
def test_answers_follow_a_grammar(pair: Pair, drawn: dict[str, Any]) -> None:
    """With T5's tokenizer the space of the first word is not part of the answer, so a grammar must not require it."""
    regex = "(the|a small) (cat|dog) (sleeps|in the (house|sea))"
    parameters = {"max_new_tokens": 60, "details": True, "grammar": {"type": "regex", "value": regex}, **drawn}
    for text in TEXTS:
        body = {"inputs": text, "parameters": parameters}
        status, answer = post(pair.server, "/generate", body)
        assert (status, answer["details"]["finish_reason"]) == (200, "eos_token"), answer
        assert re.fullmatch(regex, answer["generated_text"])
        stream = events(pair.server, "/generate_stream", body)
        assert "".join(event["token"]["text"] for event in stream[:-1]) == answer["generated_text"]
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "small dog"]}, "age": {"type": "integer", "maximum": 30}},
        "required": ["animal", "age"],
        "additionalProperties": False,
    }
    parameters["grammar"] = {"type": "json", "value": schema}
    status, answer = post(pair.server, "/generate", {"inputs": TEXTS[1], "parameters": parameters})
    assert (status, answer["details"]["finish_reason"]) == (200, "eos_token"), answer
    jsonschema.validate(json.loads(answer["generated_text"]), schema)


def test_one_source_can_have_several_answers(pair: Pair) -> None:
    text = TEXTS[4]  # longer than a block, so prefix sharing would be possible
    drawn = {"do_sample": True, "temperature": 1.0, "seed": 5}
    alone = [generate(pair, text, **drawn) for _ in range(2)]
    assert alone[0] == alone[1]
    body = {"prompt": text, "max_tokens": NUM_TOKENS, "temperature": 1.0, "n": 3, "seed": 5}
    _, answer = post(pair.server, "/v1/completions", body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert texts[0] == alone[0][1]
    parameters = {"best_of": 2, "do_sample": True, "details": True, "max_new_tokens": NUM_TOKENS}
    status, answer = post(pair.server, "/generate", {"inputs": text, "parameters": parameters})
    assert (status, len(answer["details"]["best_of_sequences"])) == (200, 1)
    wait_for_rest(pair.server)


def test_a_disconnect_frees_all_blocks(pair: Pair) -> None:
    parameters = {"max_new_tokens": pair.answer_tokens, "ignore_eos": True}
    connection, response = send(pair.server, "/generate_stream", {"inputs": TEXTS[4], "parameters": parameters})
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    wait_until(lambda: metrics(pair.server)["tgi_batch_current_size"] == 0, "no sequence is running")
    wait_for_rest(pair.server)


def test_the_root_route_does_not_repeat_the_source(pair: Pair) -> None:
    text = TEXTS[0]
    _, whole = pair.expected(text)
    body = {"inputs": text, "parameters": {"max_new_tokens": NUM_TOKENS}}
    assert post(pair.server, "/", body) == (200, [{"generated_text": whole}])
    body["parameters"]["return_full_text"] = True
    assert post(pair.server, "/", body) == (200, [{"generated_text": text + whole}])


def test_info_has_the_task_and_the_limits(pair: Pair) -> None:
    info = ask(pair.server, "/info").json
    assert (info["model_pipeline_tag"], info["max_input_tokens"]) == ("text2text-generation", LONGEST)
    logged = [line for line in pair.server.lines if "prefix-caching is false" in line]
    assert len(logged) == 1, "the log says once that prefixes are not shared"


def test_prefill_details_hold_the_decoder_start_token(pair: Pair) -> None:
    parameters = {"max_new_tokens": 1, "decoder_input_details": True}
    _, answer = post(pair.server, "/generate", {"inputs": TEXTS[0], "parameters": parameters})
    start_id = pair.model.generation_config.decoder_start_token_id
    text = pair.tokenizer.id_to_token(start_id)
    assert answer["details"]["prefill"] == [{"id": start_id, "text": text, "logprob": None}]


def test_unsupported_requests_are_refused(pair: Pair) -> None:
    long = "the " * LONGEST
    given = len(pair.source(long))
    status, answer = post(pair.server, "/generate", {"inputs": long})
    message = f"Input validation error: `inputs` must have at most {LONGEST} tokens. Given: {given}"
    assert (status, answer["error"]) == (422, message)
    status, answer = post(pair.server, "/generate", {"inputs": ""})
    assert (status, answer["error"]) == (422, "Input validation error: `inputs` cannot be empty")
    # Truncated, the same source is accepted.
    truncated, _ = generate(pair, long, truncate=LONGEST)
    assert truncated
    too_many = {"inputs": "the", "parameters": {"max_new_tokens": pair.answer_tokens + 1}}
    status, answer = post(pair.server, "/generate", too_many)
    message = (
        f"Input validation error: `max_new_tokens` must be <= {pair.answer_tokens}. Given: {pair.answer_tokens + 1}"
    )
    assert (status, answer["error"]) == (422, message)
    status, answer = post(pair.server, "/v1/completions", {"prompt": "the", "echo": True})
    assert (status, answer["error"]["param"]) == (400, "echo")
    status, answer = post(pair.server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert (status, answer["error"]["code"]) == (400, "template_error")


def test_an_input_limit_beyond_the_step_limit_is_refused_at_startup(tmp_path: Path) -> None:
    tokenizer = unigram()
    t5(tokenizer.get_vocab_size()).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ("--max-input-tokens", "200", "--max-batch-prefill-tokens", "100", "--max-batch-size", "8")
    process = launch("--model-id", str(tmp_path), *flags)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "--max-input-tokens is 200, but this model's inputs can have at most 100 tokens" in output
