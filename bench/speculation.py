"""Measures what draft tokens give: servers with the real model, without drafts, with forced tokens only, with
`--speculate`, and with Medusa heads, loaded alternately. The heads are those of `train_medusa.py`, which trains them if
they are missing.

Three loads of one stream: copying a text, filling in a form under a JSON schema, and free chat; and 32 streams of
random words, where drafts must not cost throughput. Without `--speculate`, a server still drafts the tokens that
grammars force, so what the loads of one stream are compared with has `--max-batch-size 1`, which leaves no row for a
draft. The 32 streams, which have no grammar, are compared with a server without `--speculate`. The answers of all
servers are compared token by token, and so are those to requests with every kind of sampling. llama.cpp gets the loads
of one stream, without drafts, with its own n-grams and with a draft model. Both draft with the same model in 4 bits: it
is nearly always right, and not cheap.

The second model, Gemma 3 270M, has n-grams only, and no chat: it was not trained for answers. Each model's servers run
at the same time, those of the models one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

import peers
from compare import WEIGHTS, Server, free_port, llama_server, metrics_of, penstock_server, running, stream_load
from figure import speculation, table_of
from load import PENSTOCK, Dialect, prompt_of, run
from quantized import gguf_of
from result import heading, keep, machine, option_parser, title
from train_medusa import FOLDER, make_heads

MAX_TOKENS = 40_000  # tokens in the KV cache, so that neither server takes the memory of the other
SPECULATE = 8
NGRAMS = "--spec-ngram-simple"
NUM_STREAMS = 32
COUNTERS = ("penstock_draft_tokens", "penstock_accepted_draft_tokens")
FIELDS = ("first_name", "last_name", "street_address", "postal_code", "phone_number", "email_address", "year_of_birth")
FORM = {
    "type": "object",
    "properties": {
        name: {"type": "integer" if name == "year_of_birth" else "string", "maxLength": 16} for name in FIELDS
    },
    "required": list(FIELDS),
    "additionalProperties": False,
}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "typical_p": 0.9, "watermark": True},
    {"do_sample": True, "min_p": 0.05, "top_n_tokens": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"do_sample": True, "presence_penalty": 0.5, "min_tokens": 8},
    {"logit_bias": {"28": 2.0}, "stop": ["\n\n"]},
    {"do_sample": True, "temperature": 0.8, "stop_token_ids": [28, 30]},
    {"do_sample": True, "temperature": 0.8, "n": 2},
    {"grammar": {"type": "regex", "value": "[a-z]+( [a-z]+)*[.]"}},
    {"do_sample": True, "grammar": {"type": "json", "value": FORM}},
]
# What only the routes of OpenAI have.
COMPLETION_SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "bad_words": ["the", "of the", "and"]},
    {"temperature": 0.8, "allowed_token_ids": list(range(0, 20_000, 2))},
    {"temperature": 0.8, "best_of": 2},
]


def copying(words: Sequence[str], draw: random.Random) -> dict[str, Any]:
    """The model goes on with a list that the text has three times."""
    entries = ((prompt_of(words, 2, draw), draw.randrange(1000)) for _ in range(10))
    text = "\n".join(f"{place}.{name}: {number}" for place, (name, number) in enumerate(entries, 1))
    return {"inputs": f"{text}\n\n" * 3, "parameters": {"max_new_tokens": 100}}


def form(words: Sequence[str], draw: random.Random) -> dict[str, Any]:
    text = prompt_of(words, 8, draw)
    inputs = f"{text}\nThe form, filled in, as JSON:\n"
    return {"inputs": inputs, "parameters": {"max_new_tokens": 160, "grammar": {"type": "json", "value": FORM}}}


def chat(words: Sequence[str], draw: random.Random) -> dict[str, Any]:
    text = f"<|im_start|>user\nTell me about{prompt_of(words, 2, draw)}.<|im_end|>\n<|im_start|>assistant\n"
    return {"inputs": text, "parameters": {"max_new_tokens": 100}}


LOADS: dict[str, Callable[[Sequence[str], random.Random], dict[str, Any]]] = {
    "copying": copying,
    "JSON form": form,
    "free chat": chat,
}


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


# The tokens of an answer, and what else must not differ.
Answer = tuple[list[Any], Any]


def answer(port: int, request: dict[str, Any]) -> Answer:
    """The tokens of the answer, and all generations with logprobs and alternatives."""
    if "prompt" in request:
        (choice,) = post(port, "/v1/completions", request)["choices"]
        return choice["logprobs"]["tokens"], (choice["text"], choice["logprobs"])
    details = post(port, "/generate", {**request, "parameters": {**request["parameters"], "details": True}})["details"]
    generations = [details, *details.get("best_of_sequences", [])]
    return details["tokens"], [(each["tokens"], each.get("top_tokens")) for each in generations]


def answer_of_llama(port: int, request: dict[str, Any]) -> Answer:
    parameters = request["parameters"]
    body = {"prompt": request["inputs"], "n_predict": parameters["max_new_tokens"], "temperature": 0}
    if "grammar" in parameters:
        body["json_schema"] = parameters["grammar"]["value"]
    found = post(port, "/completion", {**body, "return_tokens": True, "cache_prompt": False})
    return found["tokens"], found["content"]


# By server: its flags for n-grams, and how to ask it.
SERVERS: dict[str, tuple[list[str], Callable[[int, dict[str, Any]], Answer]]] = {
    "penstock": (["--speculate", str(SPECULATE)], answer),
    "llama.cpp": (
        f"--spec-type ngram-simple {NGRAMS}-size-n 2 {NGRAMS}-size-m {SPECULATE}".split(),
        answer_of_llama,
    ),
}


@dataclass(frozen=True, slots=True)
class Model:
    """What the servers serve and are asked."""

    suffix: str  # suffix of the servers' names in the record
    words: Callable[[], list[str]]
    num_begin_tokens: int  # tokens that the tokenizer puts in front of a prompt
    loads: Sequence[str]

    def dialect(self) -> Dialect:
        """Penstock's dialect, with the tokens of the words as input tokens."""

        def counts(last: dict[str, Any]) -> tuple[int, int]:
            num_input, num_output = PENSTOCK.counts(last)
            return num_input - self.num_begin_tokens, num_output

        return replace(PENSTOCK, counts=counts)


MODELS = {
    "smollm2": Model("", peers.prompt_words, 0, list(LOADS)),
    "gemma": Model(", Gemma 3 270M", peers.gemma_words, 1, ["copying", "JSON form"]),
}


def measure(
    port: int, ask: Callable[[int, dict[str, Any]], Answer], requests: Sequence[dict[str, Any]]
) -> tuple[dict[str, float], list[Answer]]:
    """One stream of requests."""
    before, started = metrics_of(port), time.perf_counter()
    answers = [ask(port, request) for request in requests]
    seconds, after = time.perf_counter() - started, metrics_of(port)
    drafted, accepted = (after.get(name, 0) - before.get(name, 0) for name in COUNTERS)
    num_tokens = sum(len(tokens) for tokens, _ in answers)
    return {"tokens_per_s": num_tokens / seconds, "drafted": drafted, "accepted": accepted}, answers


def sampled_requests(words: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Texts that repeat themselves, with every kind of sampling in turn."""
    draw = random.Random("sampled")
    requests: list[dict[str, Any]] = []
    samplings = itertools.islice(itertools.cycle([*SAMPLINGS, *COMPLETION_SAMPLINGS]), count)
    for seed, sampling in enumerate(samplings, 1):
        text = (prompt_of(words, 12, draw).strip() + "\n") * 3
        if sampling in COMPLETION_SAMPLINGS:
            requests.append({"prompt": text, "max_tokens": 20, "seed": seed, "logprobs": 2, **sampling})
        else:
            requests.append({"inputs": text, "parameters": {"max_new_tokens": 20, "seed": seed, **sampling}})
    return requests


def repeated_share(request: dict[str, Any], tokens: Sequence[dict[str, Any]]) -> float:
    """How much of an answer of Penstock is lines of the request's text."""
    answer = "".join(token["text"] for token in tokens)
    return sum(len(line) for line in answer.splitlines(keepends=True) if line in request["inputs"]) / len(answer)


def num_different(some: Sequence[Any], others: Sequence[Any]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


def modes_of(name: str, model: Model, options: argparse.Namespace) -> dict[str, Server]:
    """The servers of one name by what drafts: nothing, in Penstock only grammars, n-grams, and for the embedded model
    heads and a draft model."""
    ngrams, _ = SERVERS[name]
    flags = {"off": [], "on": ngrams}
    if name == "penstock":
        flags = {"off": ["--max-batch-size", "1"], "forced": [], "on": ngrams}
    is_embedded = model is MODELS["smollm2"]
    if is_embedded:
        # llama.cpp makes the draft model.
        small = str(gguf_of("Q4_0")) if "llama.cpp" in options.only else str(peers.embedded_gguf())
        if name == "penstock":
            models = {"heads": str(make_heads(options.heads)), "draft": small}
            flags |= {mode: [*ngrams, "--speculative-model", path] for mode, path in models.items()}
        else:
            most = ["--spec-draft-n-max", str(SPECULATE)]
            flags["draft"] = ["--spec-type", "draft-simple", "--spec-draft-model", small, *most]
    dequantize = is_embedded and WEIGHTS[options.weights]
    if name == "penstock":
        fixed = ["--max-batch-total-tokens", str(MAX_TOKENS), "--standby", "off"]
        fixed += [] if is_embedded else ["--model-id", str(peers.gemma_gguf())]
        return {
            mode: replace(penstock_server([*fixed, *more], dequantize=dequantize), settled="")
            for mode, more in flags.items()
        }
    gguf = (peers.bf16_gguf() if dequantize else peers.embedded_gguf()) if is_embedded else peers.gemma_gguf()
    return {mode: llama_server(name, gguf, 1, more) for mode, more in flags.items()}


def measure_server(name: str, ports: dict[str, int], model: Model, repeat: int, num_requests: int) -> dict[str, Any]:
    """The loads of one repeat on the servers of one name, which take turns. ports: by mode."""
    ask, words = SERVERS[name][1], model.words()
    order = list(ports)[:: 1 if repeat % 2 else -1]
    cells: dict[str, Any] = {}
    for load in model.loads:
        draw = random.Random(f"{load}/{repeat}")
        requests = [LOADS[load](words, draw) for _ in range(num_requests)]
        has_grammar = "grammar" in requests[0]["parameters"]
        measured = {mode: measure(ports[mode], ask, requests) for mode in order if has_grammar or mode != "forced"}
        without = measured["off"][1]
        cells[load] = {
            mode: {**cell, "requests": num_requests, "different": num_different(without, answers)}
            for mode, (cell, answers) in measured.items()
        }
        if name == "penstock" and load == "copying":
            shares = [repeated_share(*pair) for pair in zip(requests, (tokens for tokens, _ in without), strict=True)]
            cells[load]["off"]["repeated"] = fmean(shares)
    num_differences = sum(cell["different"] for modes in cells.values() for cell in modes.values())
    if name == "penstock":
        many = stream_load(NUM_STREAMS)
        rates: dict[str, list[float]] = {mode: [] for mode in order if mode != "off"}
        for turn, modes in enumerate((list(rates), list(rates)[::-1])):
            for mode in modes:
                rates[mode].append(run(ports[mode], model.dialect(), many, words, f"{repeat}/{turn}").tokens_per_s)
        rates["off"] = rates.pop("forced")  # without a grammar
        cells[many.name] = {mode: {"tokens_per_s": harmonic_mean(found)} for mode, found in rates.items()}
    ratios = (
        f"{load} {mode} {cell[mode]['tokens_per_s'] / cell['off']['tokens_per_s']:.2f}"
        for load, cell in cells.items()
        for mode in cell
        if mode != "off"
    )
    print(f"  {name}{model.suffix}: {', '.join(ratios)}, {num_differences} answers differ", flush=True)
    return {"loads": cells, "different": num_differences}


def measure_model(model: Model, record: dict[str, Any], options: argparse.Namespace) -> None:
    """Adds what the servers do with one model to the record's repeats, and the answers with every kind of sampling."""
    words, ports = model.words(), dict[str, dict[str, int]]()
    with contextlib.ExitStack() as stack:
        for name in options.only:
            ports[name] = {}
            for mode, server in modes_of(name, model, options).items():
                port = ports[name][mode] = free_port()
                stack.enter_context(running(server, port))
                SERVERS[name][1](port, form(words, random.Random("warm-up")))
        for mode, port in ports.get("penstock", {}).items():
            if mode != "off":
                run(port, model.dialect(), stream_load(NUM_STREAMS, 1), words, "warm-up")
        for number, repeat in enumerate(record["repeats"]):
            for name in ports:
                repeat[name + model.suffix] = measure_server(
                    name, ports[name], model, number, options.requests_per_load
                )
        if "penstock" in ports and options.requests:
            sampled = sampled_requests(words, options.requests)
            with ThreadPoolExecutor(8) as threads:
                without, *others = (
                    list(threads.map(partial(answer, port), sampled)) for port in ports["penstock"].values()
                )
            different = sum(num_different(without, answers) for answers in others)
            record["sampled" + model.suffix] = {"requests": len(sampled), "different": different}


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--only", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--requests", type=int, default=1000, help="to each model with every kind of sampling")
    parser.add_argument("--requests-per-load", type=int, default=4)
    parser.add_argument("--weights", choices=list(WEIGHTS), default="bf16", help="of the embedded model")
    parser.add_argument("--heads", type=Path, default=FOLDER, help="folder of Medusa heads for the embedded model")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that all servers are stopped

    record: dict[str, Any] = {**heading(), "machine": machine(), "speculate": SPECULATE, "weights": options.weights}
    record["repeats"] = [{} for _ in range(options.repeats)]
    for name in options.models:
        measure_model(MODELS[name], record, options)
    keep(record, "speculation", title(record) + table_of(speculation(record)), options.out)


if __name__ == "__main__":
    main()
