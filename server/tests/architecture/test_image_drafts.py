"""Drafts change no bit of sequences with images, which share their steps with sequences of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from image_cases import DRAFTING_NORMS, make_image_model
from penstock_server.engine import Engine
from penstock_server.engine.drafting import ngram
from penstock_server.engine.drafting.head import HeadDrafter
from penstock_server.engine.drafting.load import load_drafter
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import WarmUpConfig
from penstock_server.protocol.plan import Sampling
from plans import Token
from safetensors.torch import load_file
from test_drafts import BLOCK_TOKENS, NUM_BLOCKS, Drafts, generate
from test_eagle import Recorded
from test_images import PICTURES, Made, Prompt, prompts_of

pytestmark = pytest.mark.native

SAMPLINGS = [
    Sampling(top_n=2),
    Sampling(do_sample=True, seed=1, top_p=0.9),
    Sampling(do_sample=True, seed=2, frequency_penalty=0.5),
    Sampling(repetition_penalty=1.3),
]


# Positions of their own, also with states, layers that attend to images, and image tokens that attend to each other.
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3.5", "mllama", "gemma3"])
def test_drafts_change_no_bit_of_sequences_with_images(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_drafts.SAMPLINGS", SAMPLINGS)
    make_image_model(name, tmp_path)
    cpu = torch.device("cpu")
    options = LoadOptions(tmp_path, torch.bfloat16, cpu, BLOCK_TOKENS)
    model = load_model(options, RankGroup())
    engine = Engine(model, RankGroup(), cpu, BLOCK_TOKENS)
    engine.warm_up(WarmUpConfig(256, 64, num_blocks=NUM_BLOCKS, num_state_slots=8, proven=True))

    def generated(max_drafts: int) -> tuple[list[list[int]], list[list[Token]], int]:
        assert model.images is not None
        prompts = prompts_of(model.images)
        texts, images = [prompt.token_ids for prompt in prompts], [prompt.spans for prompt in prompts]
        return texts, *generate(engine, texts, 0, max_drafts, images=images)

    texts, plain, num_plain_steps = generated(max_drafts=0)
    known = [text + [token.id for token in tokens] for text, tokens in zip(texts, plain, strict=True)]
    monkeypatch.setattr(ngram, "continuation", Drafts(known, model.traits.vocab_size))
    _, drafted, num_steps = generated(max_drafts=6)
    assert drafted == plain
    assert num_steps < num_plain_steps, "some drafts are right"
    engine.close()


@torch.inference_mode()
def draft_of(made: Made, prompt: Prompt, text: list[int], num_drafts: int) -> list[int]:
    """What the drafting layer predicts behind a text that begins with a prompt, over all of it for each draft."""
    whole, tensors = made.reference, load_file(made.folder / "model.safetensors")
    model, ids = whole.model, list(text)
    text_model = model.language_model
    inputs = made.inputs([PICTURES[i] for i in prompt.images]) if prompt.images else {}
    outputs = torch.zeros(0)
    while len(ids) < len(text) + num_drafts:
        tokens = torch.tensor([ids])
        is_image = tokens == whole.config.image_token_id
        model.rope_deltas = None  # it would be that of the last call
        if not len(outputs):
            found = model(input_ids=tokens, mm_token_type_ids=is_image.int(), use_cache=False, **inputs)
            outputs = found.last_hidden_state[0, :-1]
        embedded, positions = text_model.embed_tokens(tokens)[0], torch.arange(len(ids)).expand(3, 1, -1)
        if inputs:
            embedded[is_image[0]] = torch.cat(tuple(model.get_image_features(**inputs).pooler_output))
            grids = inputs["image_grid_thw"]
            positions, _ = model.get_rope_index(tokens, image_grid_thw=grids, mm_token_type_ids=is_image.int())

        def normed(name: str, x: torch.Tensor) -> torch.Tensor:
            weight = tensors[f"mtp.{name}.weight"] + 1
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + text_model.config.rms_norm_eps) * weight

        of_token, of_output, last = DRAFTING_NORMS
        joined = torch.cat((normed(of_token, embedded[1:]), normed(of_output, outputs)), 1)
        x = (joined @ tensors["mtp.fc.weight"].T)[None]
        later = torch.ones(len(joined), len(joined)).triu(1).bool()
        mask = torch.zeros(later.shape).masked_fill(later, float("-inf"))[None, None]
        rotation = text_model.rotary_emb(x, positions[:, :, :-1])
        x = text_model.layers[-1](x, attention_mask=mask, position_embeddings=rotation)
        output = normed(last, (x[0] if isinstance(x, tuple) else x)[0, -1])
        ids.append(int(whole.lm_head(output).argmax()))
        outputs = torch.cat((outputs, output[None]))
    return ids[len(text) :]


def test_a_drafting_layer_sees_images_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_drafts.SAMPLINGS", [Sampling()])
    made = Made("qwen3.5", make_image_model("qwen3.5", tmp_path), tmp_path)
    cpu, found, drafts = torch.device("cpu"), [], []
    for drafts_with_mtp in (False, True):
        options = LoadOptions(tmp_path, torch.float32, cpu, BLOCK_TOKENS, drafts_with_mtp=drafts_with_mtp)
        model = load_model(options, RankGroup())
        drafter = load_drafter(None, model, options, load_model, RankGroup())
        if isinstance(drafter, HeadDrafter):
            drafter = Recorded(drafter.model, cpu)
            drafts = drafter.drafts
        engine = Engine(model, RankGroup(), cpu, BLOCK_TOKENS, drafter=drafter)
        engine.warm_up(WarmUpConfig(256, 64, num_blocks=NUM_BLOCKS, num_state_slots=8, proven=True))
        drafts.clear()
        assert model.images is not None
        prompts = prompts_of(model.images)
        texts, images = [prompt.token_ids for prompt in prompts], [prompt.spans for prompt in prompts]
        found.append(generate(engine, texts, 0, 3 if drafts_with_mtp else 0, images=images)[0])
        engine.close()
    assert found[0] == found[1]
    assert len(drafts) > 20
    for text, draft in drafts[::3]:
        (prompt,) = [each for each in prompts if text[: len(each.token_ids)] == each.token_ids]
        assert draft == draft_of(made, prompt, text, len(draft))
