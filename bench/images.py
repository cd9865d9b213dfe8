"""Measures images on a model of a published shape, SmolVLM-256M, with random weights: what encoding takes, the time to
the first token with images that are new and that were sent before, and the gaps between the tokens of eight text
streams while images are encoded, to the gaps without.

It also asks every question alone and in one batch with text streams, and counts the answers whose tokens differ.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from compare import Running, embedded_folder, free_port, penstock_server, running
from figure import images, table_of
from latency import NUM_STREAMS, STREAM_INPUT_TOKENS, common_gaps
from load import PENSTOCK, Dialect, Load, LoadError, _run, ask, run
from openai import OpenAI
from PIL import Image
from result import heading, keep, machine, option_parser, title
from tokenizers import Tokenizer

NAME = "SmolVLM-256M"
TEXT = {
    "model_type": "llama",
    "vocab_size": 49280,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 2,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
TILE = VISION["image_size"]
SPECIAL = [
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}<end_of_utterance>\n{% endfor %}Assistant:"
)
QUESTIONS = ("What is in the picture?", "Which colours are there?", "Where was it taken?")
ANSWER_TOKENS = 16
NUM_IMAGES = (1, 4)
MAX_PICTURES = 256  # while streams run
ENCODED = re.compile(r"encoded an image of \d+ bytes into (\d+) tokens: read in ([\d.]+) s, encoded in ([\d.]+) s")
# One event for each token, although the text of random weights is seldom whole characters; and no early end.
STREAM = Dialect(
    PENSTOCK.path,
    lambda prompt, num: {
        "inputs": prompt,
        "parameters": {"max_new_tokens": num, "min_tokens": num, "do_sample": False, "details": True},
    },
    PENSTOCK.counts,
)
# Encodes an image without computing a step.
ENCODE = Dialect("/tokenize", lambda uri, _: {"inputs": f"![]({uri})"}, PENSTOCK.counts)
CHAT = Dialect("/v1/chat/completions", lambda uri, _: chat([uri], QUESTIONS[0], 1), PENSTOCK.counts)
DISTURBANCES: dict[str, Dialect | None] = {"without": None, "encoding": ENCODE, "chats": CHAT}


def make_model(folder: Path, text_folder: Path, max_side: int, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """A model folder with random weights, and the tokenizer of `text_folder`. The image processor enlarges or shrinks
    images to `max_side` pixels."""
    import transformers

    tokenizer = Tokenizer.from_file(str(text_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((text_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}), encoding="utf-8")
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.token_to_id("<image>"),
        scale_factor=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": max_side}, max_image_size={"longest_edge": vision["image_size"]}
    ).save_pretrained(folder)


def picture(seed: str) -> str:
    """A data URI of a photograph's size: a JPEG of 640 × 480 pixels, different for each seed."""
    colours = np.random.default_rng(list(seed.encode())).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((640, 480)).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def chat(uris: Sequence[str], question: str, num_tokens: int) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    return {"model": "any", "messages": [message], "max_tokens": num_tokens, "temperature": 0, "stream": True}


def ttft_s(client: OpenAI, uris: Sequence[str], question: str) -> float:
    """Seconds from the request to the first chunk with a token."""
    sent = time.perf_counter()
    with client.chat.completions.create(**chat(uris, question, 1), extra_body={"ignore_eos": True}) as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].finish_reason:
                return time.perf_counter() - sent
    raise LoadError("the chat ended without a token")


def token_ids(client: OpenAI, uris: Sequence[str], question: str, cache_salt: str) -> list[int]:
    body = {**chat(uris, question, ANSWER_TOKENS), "stream": False}
    extra = {"ignore_eos": True, "return_token_ids": True, "cache_salt": cache_salt}
    answer = client.chat.completions.create(**body, extra_body=extra)
    found: list[int] = answer.choices[0].model_extra["token_ids"]
    return found


def num_different(client: OpenAI, port: int, words: Sequence[str], seed: str) -> tuple[int, int]:
    """The number of questions whose answers differ between a batch with text streams and a run alone, and the number of
    all questions. Questions have no image, one or several."""
    questions = [
        ([picture(f"{seed}/{index}") for index in range(num)], question)
        for question in QUESTIONS
        for num in (0, *NUM_IMAGES)
    ]
    # With a salt of its own: otherwise the batch would find the prompts in the prefix cache.
    alone = [token_ids(client, *each, "alone") for each in questions]
    with ThreadPoolExecutor(len(questions) + 1) as threads:
        text = threads.submit(run, port, STREAM, Load("text", NUM_STREAMS, 1, STREAM_INPUT_TOKENS, 64), words, seed)
        together = list(threads.map(lambda each: token_ids(client, *each, "together"), questions))
        text.result()
    return sum(one != other for one, other in zip(alone, together, strict=True)), len(questions)


async def _gaps(port: int, load: Load, words: Sequence[str], seed: str, other: Dialect | None) -> dict[str, Any]:
    """The gaps of the streams while the requests of a client with new images are answered one after the other."""
    # Made beforehand: it would block the event loop that takes the times.
    uris = [picture(f"{seed}/{number}") for number in range(0 if other is None else MAX_PICTURES)]
    streams, num_answered = asyncio.create_task(_run(port, STREAM, load, words, seed)), 0
    while other is not None and not streams.done():
        if num_answered == MAX_PICTURES:
            raise LoadError(f"more than {MAX_PICTURES} images were encoded before the streams ended")
        exchange = await ask(port, other, uris[num_answered], 1)
        if exchange.parser.status != 200:
            raise LoadError(f"{other.path} answered {exchange.parser.status}: {bytes(exchange.parser.body[:300])!r}")
        num_answered += 1
    gaps = common_gaps((await streams).samples)
    return {"gaps_us": [round(gap * 1e6) for gap in gaps], "num_answered": num_answered}


def measure(server: Running, port: int, words: Sequence[str], seed: str, num_tokens: int) -> dict[str, Any]:
    """One repeat."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0)
    num_logged = len(server.logged())
    ttft: dict[str, Any] = {}
    for num in NUM_IMAGES:
        uris = [picture(f"{seed}/{num}/{index}") for index in range(num)]
        fresh, again = (ttft_s(client, uris, question) for question in QUESTIONS[:2])
        ttft[str(num)] = {"fresh": fresh, "again": again}
    encoded = [
        {"num_tokens": int(tokens), "read_s": float(read), "encode_s": float(encode)}
        for tokens, read, encode in ENCODED.findall(server.logged()[num_logged:])
    ]
    different, asked = num_different(client, port, words, seed)
    load = Load("streams", NUM_STREAMS, 1, STREAM_INPUT_TOKENS, num_tokens)
    loads = {
        name: asyncio.run(_gaps(port, load, words, f"{seed}/{name}", other)) for name, other in DISTURBANCES.items()
    }
    return {"ttft_s": ttft, "encoded": encoded, "num_different": different, "num_asked": asked, "loads": loads}


def main() -> None:
    parser = option_parser(__doc__, num_repeats=3)
    parser.add_argument("--tokens", type=int, default=256, help="tokens generated per stream")
    parser.add_argument("--max-side", type=int, default=2 * TILE, help="pixels; the published processor has 2,048")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the server is stopped

    words, port, repeats = peers.prompt_words(), free_port(), []
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        make_model(Path(folder), embedded_folder(), options.max_side, TEXT, VISION)
        flags = ["--model-id", folder, "--served-model-name", NAME, "--payload-limit", str(10**7)]
        with running(penstock_server(flags, dequantize=False), port) as server:
            measure(server, port, words, "warm-up", 16)
            for repeat in range(options.repeats):
                repeats.append(measure(server, port, words, str(repeat), options.tokens))
                print(f"  {table_of(images({'repeats': repeats[-1:]}))}", flush=True)
    record = {
        **heading(),
        "machine": machine(),
        "model": f"{NAME} with random weights",
        "load": {"streams": NUM_STREAMS, "tokens": options.tokens, "max_side": options.max_side},
        "repeats": repeats,
    }
    keep(record, "images", f"{title(record)}{record['model']}\n\n{table_of(images(record))}", options.out)


if __name__ == "__main__":
    main()
