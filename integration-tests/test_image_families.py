"""Families whose images differ from LLaVA's, on the real server: positions in a grid, tokens that see each other,
layers that attend to images, and layers that keep a state."""

from __future__ import annotations

import base64
import gc
import os
from pathlib import Path

import pytest
import torch
import transformers
from binary import start
from client import ask
from fault.probe import metric
from image_cases import IMAGE_CASES, file_of, make_image_model, picture, token_id
from penstock_server.vision.family import FAMILIES
from penstock_server.vision.processor import own_processor
from test_worker_death import Stream, answers_across_a_kill
from tokenizers import Tokenizer

pytestmark = [pytest.mark.native, pytest.mark.xdist_group("images")]

NUM_TOKENS = 12
# The shape of Qwen2.5-VL 3B: 3.8 billion weights, whose images have as many as 16,384 tokens.
QWEN_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
}
QWEN_VISION = {
    "hidden_size": 1280,
    "out_hidden_size": 2048,
    "depth": 32,
    "num_heads": 16,
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
# Difference of a logprob: activations have 8 bits of mantissa, in the server only.
LOGPROB_TOLERANCE = 0.1
# What an image and "What?" become; {} is the image's tokens. The second is how many these are.
PROMPTS = {
    "qwen3-vl": ("<|vision_start|>{}<|vision_end|>What?", 4),
    "llama4": ("<|image_start|><|image|>{}<|image_end|>What?", 4),
    "gemma3": ("\n\n<start_of_image>{}<end_of_image>\n\nWhat?", 9),
    "paligemma": ("{}<bos>What?\n", 9),
    "mllama": ("{}What?", 1),
    "qwen3.5": ("<|vision_start|>{}<|vision_end|>What?", 4),
    "lfm2-vl": ("<|image_start|>{}<|image_end|>What?", 4),
}


@torch.inference_mode()
def greedy(model: transformers.PreTrainedModel, folder: Path, prompt: list[int], seed: int = 3) -> list[int]:
    """The tokens of transformers after a prompt with one image. seed: of the picture."""
    if (own := own_processor(folder)) is not None:
        made, names = own([picture(seed, 32, 32)]), FAMILIES[model.config.model_type].inputs
        inputs = {name: torch.from_numpy(made[name]) for name in names}
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        inputs = dict(processor(images=[picture(seed, 32, 32)], return_tensors="pt"))
    inputs.pop("num_crops", None)
    num_tiles = inputs.pop("num_tiles", None)
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens = torch.tensor([ids])
        is_image = (tokens == model.config.image_token_id).int()
        match model.config.model_type:
            case "qwen3_vl" | "qwen3_5":
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
        pytest.param("lfm2-vl", marks=pytest.mark.slow),
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 20e9, reason="the reference in float32 takes 15 GB"
)
def test_a_published_shape_predicts_what_transformers_predicts(tmp_path: Path) -> None:
    """No package has the weights of a small model that reads images, so these are random ones."""
    case = IMAGE_CASES["qwen2.5-vl"]
    make_image_model("qwen2.5-vl", tmp_path)  # its tokenizer and image processor
    values = {**case.values, "image_token_id": token_id(case.image_token), "tie_word_embeddings": True}
    config = transformers.Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION, **values)
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=14, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    )
    processor.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.8 / parameter[0].numel() ** 0.5)
    model.save_pretrained(tmp_path)
    seen = picture(1, 448, 336)
    inputs = dict(processor(images=[seen], return_tensors="pt"))
    text = "<|vision_start|>" + case.image_token * (16 * 12) + "<|vision_end|>What?"
    prompt = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    tokens = torch.tensor([prompt])
    inputs["mm_token_type_ids"] = (tokens == config.image_token_id).int()
    with torch.inference_mode():
        expected = model.float()(input_ids=tokens, use_cache=False, **inputs).logits[0, -1].log_softmax(-1)
    del model
    gc.collect()

    uri = "data:image/png;base64," + base64.b64encode(file_of(seen)).decode()
    parameters = {"max_new_tokens": NUM_TOKENS, "details": True, "top_n_tokens": 5, "ignore_eos": True}
    request = {"inputs": f"![]({uri})What?", "parameters": parameters}
    server = start("--model-id", str(tmp_path), "--standby", "off", timeout_s=600)
    try:
        found = ask(server, "/generate", request)
        assert found.status == 200, found.text
        assert int(found.headers["x-prompt-tokens"]) == len(prompt)
        details = found.json["details"]
        for token in details["top_tokens"][0]:
            assert token["logprob"] == pytest.approx(expected[token["id"]].item(), abs=LOGPROB_TOLERANCE)
        assert expected[details["tokens"][0]["id"]] >= expected.max() - 2 * LOGPROB_TOLERANCE
        alone = [(token["id"], token["logprob"]) for token in details["tokens"]]
        for tokens, _ in [stream.result() for stream in [Stream(server, request) for _ in range(2)]]:
            assert [(id_, logprob) for id_, logprob, _ in tokens] == alone
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


def test_states_continue_behind_the_same_image_only(tmp_path: Path) -> None:
    """Snapshots of states belong to the text and images before them."""
    name = "qwen3.5"
    model = make_image_model(name, tmp_path)
    text, num_embeddings = PROMPTS[name]
    image = text.removesuffix("What?").format(IMAGE_CASES[name].image_token * num_embeddings)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    server = start("--model-id", str(tmp_path), "--dtype", "float32", "--standby", "off")
    try:
        hits = []
        for number, seed in enumerate((3, 3, 4, 3)):
            uri = "data:image/png;base64," + base64.b64encode(file_of(picture(seed, 32, 32))).decode()
            question = f"{'Who is seen here, and where do they go? ' * 4}And {number}?"
            parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
            before = metric(server, "penstock_prefix_hit_tokens")
            found = ask(server, "/generate", {"inputs": f"![]({uri}){question}", "parameters": parameters})
            assert found.status == 200, found.text
            hits.append(metric(server, "penstock_prefix_hit_tokens") - before)
            expected = greedy(model, tmp_path, tokenizer.encode(image + question).ids, seed)
            assert [token["id"] for token in found.json["details"]["tokens"]] == expected
        assert hits[0] == hits[2] == 0
        assert hits[3] >= 128
    finally:
        assert server.stop() == 0, server.last_lines()
