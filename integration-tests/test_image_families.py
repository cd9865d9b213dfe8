"""Families whose images differ from LLaVA's, on the real server: positions in a grid, tokens that see each other, and
layers that attend to images."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import pytest
import torch
import transformers
from binary import start
from client import ask
from test_worker_death import Stream, answers_across_a_kill

sys.path.append(str(Path(__file__).parent.parent / "server" / "tests"))
from image_cases import IMAGE_CASES, file_of, make_image_model, picture
from penstock_server.vision.tiles import TileProcessor
from tokenizers import Tokenizer

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("images")]

NUM_TOKENS = 12
# What an image and "What?" become; {} is the image's tokens. The second is how many these are.
PROMPTS = {
    "qwen3-vl": ("<|vision_start|>{}<|vision_end|>What?", 4),
    "llama4": ("<|image_start|><|image|>{}<|image_end|>What?", 4),
    "gemma3": ("\n\n<start_of_image>{}<end_of_image>\n\nWhat?", 9),
    "paligemma": ("{}<bos>What?\n", 9),
    "mllama": ("{}What?", 1),
}


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, folder: Path, prompt: list[int]) -> list[int]:
    """The tokens of transformers after a prompt with one image."""
    if (tiles := TileProcessor.of(folder)) is not None:
        inputs = {"pixel_values": torch.from_numpy(tiles([picture(3, 32, 32)])["pixel_values"])}
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        inputs = dict(processor(images=[picture(3, 32, 32)], return_tensors="pt"))
    inputs.pop("num_crops", None)
    num_tiles = inputs.pop("num_tiles", None)
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens = torch.tensor([ids])
        is_image = (tokens == model.config.image_token_id).int()
        match model.config.model_type:
            case "qwen3_vl":
                inputs["mm_token_type_ids"] = is_image
                model.model.rope_deltas = None  # it would be that of the last call
            case "gemma3":
                inputs["token_type_ids"] = is_image
            case "paligemma":
                inputs["token_type_ids"] = (torch.arange(len(ids)) >= len(prompt)).int()[None]
            case "mllama":
                has_picture = torch.arange(4) < num_tiles[0][0]
                inputs["cross_attention_mask"] = has_picture.long().expand(1, len(ids), 1, 4)
        ids.append(int(model(input_ids=tokens, use_cache=False, **inputs).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-vl",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("llama4", marks=pytest.mark.slow),
        "paligemma",
    ],
)
def test_a_prompt_with_an_image_has_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_image_model(name, tmp_path)
    text, num_embeddings = PROMPTS[name]
    text = text.format(IMAGE_CASES[name].image_token * num_embeddings)
    prompt = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    uri = "data:image/png;base64," + base64.b64encode(file_of(picture(3, 32, 32))).decode()
    server = start("--model-id", str(tmp_path), "--dtype", "float32")
    try:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        found = ask(server, "/generate", {"inputs": f"![]({uri})What?", "parameters": parameters})
        assert found.status == 200, found.text
        details = found.json["details"]
        assert int(found.headers["x-prompt-tokens"]) == len(prompt)
        assert [token["id"] for token in details["tokens"]] == greedy(model, tmp_path, prompt)
    finally:
        assert server.stop() == 0, server.last_lines()


def test_layers_attend_to_images_also_after_a_workers_death(tmp_path: Path) -> None:
    name, sees = "mllama", picture(3, 32, 32)
    model = make_image_model(name, tmp_path)
    text, num_embeddings = PROMPTS[name]
    text = text.format(IMAGE_CASES[name].image_token * num_embeddings)
    prompt = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    one, two = (
        "data:image/png;base64," + base64.b64encode(file_of(each)).decode() for each in (sees, picture(1, 40, 64))
    )
    inputs = [f"![]({one})What?", f"first ![]({two})![]({one}) and ![]({two})", "no image"]
    parameters = {"max_new_tokens": 200, "do_sample": False, "ignore_eos": True}
    requests = [{"inputs": each, "parameters": parameters} for each in inputs]
    server = start("--model-id", str(tmp_path), "--dtype", "float32")
    try:
        undisturbed = [stream.result() for stream in [Stream(server, request) for request in requests]]
        found = ask(server, "/generate", requests[0] | {"parameters": {"max_new_tokens": NUM_TOKENS, "details": True}})
        assert found.status == 200, found.text
        assert [token["id"] for token in found.json["details"]["tokens"]] == greedy(model, tmp_path, prompt)
        assert answers_across_a_kill(server, requests) == undisturbed
    finally:
        assert server.stop() == 0, server.last_lines()
