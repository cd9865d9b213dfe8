"""Images in requests: the real server against transformers, with the clients of TGI and OpenAI, and killed workers."""

from __future__ import annotations

import base64
import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from binary import Server, start
from client import ask, events
from fault.probe import health, metric, wait_until
from huggingface_hub import InferenceClient
from test_worker_death import Stream, answers_across_a_kill

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("images")]

TEMPLATE = """\
{%- for message in messages %}{{ message.role[0] }}:
{%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endfor %}a:"""
NUM_TOKENS = 12
LONG = {"max_new_tokens": 220, "do_sample": False, "ignore_eos": True}  # almost the model's context
IMAGE_TOKENS = 16  # tokens of an image of 32 × 32 pixels in patches of 8 × 8


@dataclass
class Reference:
    """The model of the server in transformers."""

    model: Any
    folder: Path
    pictures: list[Any]
    uris: list[str]

    def ids(self, text: str) -> list[int]:
        from tokenizers import Tokenizer

        one = [
            token for piece in text.split("<image>") for token in (self.tokenizer(Tokenizer).encode(piece).ids, None)
        ]
        image = [self.model.config.image_token_id] * IMAGE_TOKENS
        return [token for part in one[:-1] for token in (image if part is None else part)]

    def tokenizer(self, kind: Any) -> Any:
        return kind.from_file(str(self.folder / "tokenizer.json"))

    def greedy(self, text: str, images: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """text: with `<image>` in the places of the images, given by their numbers."""
        import torch
        import transformers

        ids, inputs = self.ids(text), {}
        if images:
            processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
            inputs = dict(processor(images=[self.pictures[i] for i in images], return_tensors="pt"))
        with torch.inference_mode():
            for _ in range(num_tokens):
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[0, -1]
                ids.append(int(logits.argmax()))
        return ids[-num_tokens:]


class Phi(Reference):
    """Phi-4-multimodal in transformers."""

    processor: Any = None

    def greedy_after(self, ids: list[int], images: tuple[int, ...]) -> list[int]:
        """At most one image."""
        import torch

        self.model.enable_adapters() if images else self.model.disable_adapters()
        inputs = {}
        for image in images:
            made = self.processor([self.pictures[image]])
            num_tokens = int(made.pop("num_image_tokens").item())
            assert ids.count(self.model.config.vision_config.image_token_id) == num_tokens
            inputs = {name: torch.from_numpy(array).contiguous() for name, array in made.items()}
        found = list(ids)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                logits = self.model(input_ids=torch.tensor([found]), use_cache=False, **inputs).logits[0, -1]
                found.append(int(logits.argmax()))
        return found[len(ids) :]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from image_cases import file_of, make_image_model, picture

    folder = tmp_path_factory.mktemp("model")
    model = make_image_model("llava", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    pictures = [picture(1, 40, 64), picture(2, 90, 30), picture(3, 32, 32)]
    uris = ["data:image/png;base64," + base64.b64encode(file_of(each)).decode() for each in pictures]
    return Reference(model, folder, pictures, uris)


@pytest.fixture(scope="module")
def server(reference: Reference) -> Iterator[Server]:
    flags = ["--model-id", str(reference.folder), "--dtype", "float32"]
    running = start(*flags, "--allow-image-urls", "--allowed-image-hosts", "127.0.0.1")
    yield running
    assert running.stop() == 0, running.last_lines()


@pytest.fixture(scope="module")
def urls(reference: Reference) -> Iterator[list[str]]:
    """The images of the reference on a server of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, data = reference.uris[int(self.path[1:])].partition("base64,")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(base64.b64decode(data))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield [f"http://127.0.0.1:{files.server_port}/{number}" for number in range(len(reference.uris))]
        files.shutdown()


def chat(reference: Reference, *parts: str | int, **fields: Any) -> dict[str, Any]:
    """A request with texts and images, which are given by their numbers."""

    def part(of: str | int) -> dict[str, Any]:
        if isinstance(of, str):
            return {"type": "text", "text": of}
        return {"type": "image_url", "image_url": {"url": reference.uris[of], "detail": "low"}}

    message = {"role": "user", "content": [part(each) for each in parts]}
    return {"messages": [message], "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True, **fields}


def answer(server: Server, body: dict[str, Any]) -> Any:
    found = ask(server, "/v1/chat/completions", body)
    assert found.status == 200, found.text
    return found.json


@pytest.mark.parametrize(
    ("parts", "images"), [((0, "What?"), [0]), (("a ", 1, " b ", 2, 0, " c"), [1, 2, 0]), (("no image",), [])]
)
def test_a_chat_with_images_has_the_tokens_of_transformers(
    server: Server, reference: Reference, parts: tuple[str | int, ...], images: list[int]
) -> None:
    text = "u:" + "".join("<image>" if isinstance(part, int) else part for part in parts) + "a:"
    found = answer(server, chat(reference, *parts))
    assert found["prompt_token_ids"] == reference.ids(text)
    assert found["choices"][0]["token_ids"] == reference.greedy(text, images)
    assert found["usage"]["prompt_tokens"] == len(reference.ids(text))


def test_images_of_every_turn_are_seen(server: Server, reference: Reference) -> None:
    first, second = chat(reference, 0, "x")["messages"][0], chat(reference, "y", 1)["messages"][0]
    turns = [first, {"role": "assistant", "content": "ok"}, second]
    found = answer(server, {**chat(reference), "messages": turns})
    assert found["choices"][0]["token_ids"] == reference.greedy("u:<image>xa:oku:y<image>a:", [0, 1])


def test_tgis_images_are_part_of_the_text(server: Server, reference: Reference) -> None:
    body = {
        "inputs": f"![]({reference.uris[2]})What is it?",
        "parameters": {"max_new_tokens": NUM_TOKENS, "details": True},
    }
    expected = reference.greedy("<image>What is it?", [2])
    details = ask(server, "/generate", body).json["details"]
    assert [token["id"] for token in details["tokens"]] == expected
    assert [event["token"]["id"] for event in events(server, "/generate_stream", body)] == expected


def test_messages_and_responses_take_images(server: Server, reference: Reference) -> None:
    _, _, data = reference.uris[0].partition("base64,")
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    expected = answer(server, chat(reference, 0, "What?"))["choices"][0]["message"]["content"]
    body: dict[str, Any] = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": blocks}],
    }
    message = ask(server, "/v1/messages", {"model": "tgi", **body})
    assert message.json["content"][0]["text"] == expected
    parts = [{"type": "input_image", "image_url": reference.uris[0]}, {"type": "input_text", "text": "What?"}]
    request = {"model": "tgi", "input": [{"role": "user", "content": parts}], "max_output_tokens": NUM_TOKENS}
    response = ask(server, "/v1/responses", {**request, "temperature": 0})
    assert response.json["output"][0]["content"][0]["text"] == expected
    counted = ask(server, "/v1/messages/count_tokens", {"model": "tgi", "messages": body["messages"]}).json
    assert counted == {"input_tokens": len(reference.ids("u:<image>What?a:"))}


def test_images_are_fetched_from_urls_that_the_operator_allows(
    server: Server, reference: Reference, urls: list[str]
) -> None:
    expected = answer(server, chat(reference, 0, 1, "Which?"))["choices"][0]["token_ids"]
    body = chat(reference, 0, 1, "Which?")
    for part, url in zip(body["messages"][0]["content"], urls[:2], strict=False):
        part["image_url"]["url"] = url
    num_fetched = metric(server, 'penstock_image_fetches{outcome="fetched"}')
    assert answer(server, body)["choices"][0]["token_ids"] == expected
    assert metric(server, 'penstock_image_fetches{outcome="fetched"}') == num_fetched + 2
    text = {"inputs": f"![]({urls[2]})What is it?", "parameters": {"max_new_tokens": NUM_TOKENS, "details": True}}
    tokens = ask(server, "/generate", text).json["details"]["tokens"]
    assert [token["id"] for token in tokens] == reference.greedy("<image>What is it?", [2])
    body["messages"][0]["content"][0]["image_url"]["url"] = urls[0].replace("127.0.0.1", "127.0.0.2")
    refused = ask(server, "/v1/chat/completions", body)
    message = "messages[0].content[0].image_url: 127.0.0.2 has no public address"
    assert message in refused.json["error"]["message"]


def test_hugging_faces_client_sends_images(server: Server, reference: Reference) -> None:
    body = chat(reference, 1, "Which?")
    found = InferenceClient(server.url).chat_completion(body["messages"], max_tokens=NUM_TOKENS, temperature=0)
    assert found.choices[0].message.content == answer(server, body)["choices"][0]["message"]["content"]


def test_prompts_share_their_prefix_up_to_the_first_different_image(server: Server, reference: Reference) -> None:
    def cached(*parts: str | int) -> int:
        return answer(server, chat(reference, *parts))["usage"]["prompt_tokens_details"]["cached_tokens"]

    long = "a text of two blocks, which is here"
    assert cached(long, 0, "?") == 0
    assert cached(long, 0, "?") >= 48
    assert cached(long, 1, "?") == 32, "the text before another image with the same tokens"
    assert cached(long, 1, "?") >= 48
    assert cached(long, 0, "and a second image", 2) >= 48, "all before the second image"


def test_images_have_the_models_own_adapter_and_text_has_the_plain_weights(
    reference: Reference, tmp_path: Path
) -> None:
    """Phi-4-multimodal, whose published template supports only strings."""
    from image_cases import make_image_model
    from penstock_server.vision.crops import CropProcessor

    phi = Phi(make_image_model("phi4-multimodal", tmp_path), tmp_path, reference.pictures, reference.uris)
    template = "{%- for message in messages %}{{ message.role[0] + ':' + message.content }}{% endfor %}a:"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    phi.processor = CropProcessor.of(tmp_path)
    running = start("--model-id", str(tmp_path), "--dtype", "float32")
    long = "a text of two blocks, which is here"
    for images, num_cached in (((), 0), ((0,), 0), ((), 32), ((1,), 32)):
        found = answer(running, chat(phi, long, *images, "?"))
        ids = found["prompt_token_ids"]
        assert found["choices"][0]["token_ids"] == phi.greedy_after(ids, images), images
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    refused = ask(running, "/v1/chat/completions", {"messages": [{"role": "user", "content": [audio]}]})
    assert "input_audio" in refused.json["error"]["message"]
    assert running.stop() == 0, running.last_lines()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://127.0.0.1/a.png", "messages[0].content[1].image_url: an image must be a data URI"),
        ("data:image/png;base64,AAAA", "image 2 is not an image file"),
        ("data:image/png,AAAA", "messages[0].content[1].image_url: the data of a data URI must be base64"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(server: Server, reference: Reference, uri: str, message: str) -> None:
    good = answer(server, chat(reference, 0, "What?"))
    body = chat(reference, 0, "What?")
    body["messages"][0]["content"].insert(1, {"type": "image_url", "image_url": {"url": uri}})
    refused = ask(server, "/v1/chat/completions", body)
    assert refused.status == 400
    assert message in refused.json["error"]["message"]
    assert answer(server, chat(reference, 0, "What?"))["choices"] == good["choices"]


@pytest.mark.parametrize("num_files", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_hostile_images_are_refused_and_change_no_token_of_a_stream(
    server: Server, reference: Reference, num_files: int
) -> None:
    from hostile_files import hostile_file

    draw = random.Random(3)
    files = [hostile_file(draw) for _ in range(num_files)]
    normal = {"inputs": f"![]({reference.uris[0]})one", "parameters": LONG}
    alone = Stream(server, normal).result()

    def ask_about(data: bytes) -> Any:
        body = chat(reference, 0, "What?", max_tokens=1)
        uri = "data:image/png;base64," + base64.b64encode(data).decode()
        body["messages"][0]["content"][0]["image_url"]["url"] = uri
        return ask(server, "/v1/chat/completions", body)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask_about, data) for data in files]
        while not all(each.done() for each in asked):
            assert Stream(server, normal).result() == alone
    refused = [found for found in (each.result() for each in asked) if found.status != 200]
    # An image is named by its number, or by its place in the request if it is not even read.
    names = re.compile(r"image 1 |messages\[0\]\.content\[0\]\.image_url: ")
    for found in refused:
        assert (found.status, bool(names.search(found.json["error"]["message"]))) == (400, True), found.text
    assert num_files // 4 < len(refused) < num_files * 3 // 4
    assert Stream(server, normal).result() == alone


def test_a_placeholder_in_a_text_is_no_image(server: Server, reference: Reference) -> None:
    refused = ask(server, "/v1/chat/completions", chat(reference, 0, "What is <image>?"))
    assert "the prompt has 2 places for images, but 1 images were given" in refused.json["error"]["message"]
    body = {"inputs": f"![]({reference.uris[0]})a", "parameters": {"truncate": 4}}
    assert "`truncate` cannot be combined with images" in ask(server, "/generate", body).json["error"]


@pytest.fixture(scope="module")
def long_requests(reference: Reference) -> list[dict[str, Any]]:
    """Each with an image of its own."""
    texts = ["one", "two", "three"]
    return [
        {"inputs": f"![]({uri}){text}", "parameters": LONG} for uri, text in zip(reference.uris, texts, strict=True)
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server, long_requests: list[dict[str, Any]]) -> list[tuple]:
    return [stream.result() for stream in [Stream(server, request) for request in long_requests]]


def test_a_worker_that_replaces_another_sees_the_images_of_open_requests(
    server: Server, long_requests: list[dict[str, Any]], undisturbed: list[tuple]
) -> None:
    assert answers_across_a_kill(server, long_requests) == undisturbed
    wait_until(lambda: health(server) == 200)


def test_two_ranks_answer_as_one_does_although_one_of_them_is_killed(
    reference: Reference, long_requests: list[dict[str, Any]], undisturbed: list[tuple]
) -> None:
    running = start("--model-id", str(reference.folder), "--dtype", "float32", "--num-shard", "2")
    assert answers_across_a_kill(running, long_requests) == undisturbed
    assert running.stop() == 0, running.last_lines()
