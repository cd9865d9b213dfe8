"""Models that read images against transformers: logits and greedy tokens, in chunks and batches, on several ranks."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from engine_run import BLOCK_TOKENS, MAX_STEP_TOKENS, EngineRun
from image_cases import IMAGE_CASES, file_of, make_image_model, picture, stacked
from model_driver import DrivenSequence, ModelDriver
from near_tie import assert_greedy
from penstock_server.errors import ConfigError, ImageError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import read_spec
from penstock_server.models.support import support_of
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Image, ImageSpan, NewSequence, Sampling
from penstock_server.vision import encoder as encoder_module
from penstock_server.vision import tower
from penstock_server.vision.crops import CropProcessor
from penstock_server.vision.encoded import EncodedImage
from penstock_server.vision.encoder import ImageEncoder, PlacedImage
from penstock_server.vision.family import FAMILIES
from penstock_server.vision.patches import PatchProcessor
from penstock_server.vision.processor import own_processor
from penstock_server.vision.reader import Arrays, ImageReader
from penstock_server.vision.tiles import TileProcessor
from penstock_server.vision.tower import VisionTower, tower_dtype
from plans import Advance, plan, step
from rank_threads import run_native_ranks
from tested_device import DEVICE
from tiny_models import prompts
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

PICTURES = [picture(1, 40, 64), picture(2, 90, 30), picture(3, 32, 32)]
IMAGES = [Image(hashlib.sha256(data).digest(), data) for data in map(file_of, PICTURES)]

BLOCKS_OF_16 = (
    "lfm2-vl",
    "phi4-multimodal",
    "qwen3.5",
    "qwen3.5-moe",
)  # for native attention, and the chunks of states


@dataclass
class Prompt:
    """Token ids with the images among them."""

    token_ids: list[int]
    images: list[int]  # indices of IMAGES
    offsets: list[int]

    @property
    def spans(self) -> list[ImageSpan]:
        return [ImageSpan(IMAGES[i], offset) for i, offset in zip(self.images, self.offsets, strict=True)]


@dataclass
class Made:
    name: str
    reference: transformers.PreTrainedModel
    folder: Path

    def load(self, group: RankGroup | None = None, dtype: torch.dtype = torch.float32) -> tuple[Decoder, ImageEncoder]:
        model = load_model(LoadOptions(self.folder, dtype, DEVICE, 16), group or RankGroup())
        assert isinstance(model, Decoder)
        assert model.images is not None
        return model, model.images

    @functools.cached_property
    def loaded(self) -> tuple[Decoder, ImageEncoder]:
        return self.load()

    def inputs(self, pictures: list[Any]) -> dict[str, torch.Tensor]:
        """What the model's image processor makes of pictures."""
        if (own := own_processor(self.folder)) is not None:
            made = [own([picture]) for picture in pictures]
            if isinstance(own, CropProcessor):
                return stacked(made)
            names = FAMILIES[self.reference.config.model_type].inputs
            return {name: torch.cat([torch.from_numpy(each[name]) for each in made]) for name in names}
        processor = transformers.AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        if self.reference.config.model_type == "mllama":
            pictures = [pictures]
        return dict(processor(images=pictures, return_tensors="pt", **IMAGE_CASES[self.name].options))

    @torch.inference_mode()
    def logits(self, prompt: Prompt, more: list[int] = ()) -> torch.Tensor:  # type: ignore[assignment]
        """[tokens, vocab], by transformers from the pixel values of its own image processor."""
        inputs = {}
        if prompt.images:
            inputs = self.inputs([PICTURES[i] for i in prompt.images])
            inputs.pop("num_patches", None)
            inputs.pop("num_crops", None)
        ids = torch.tensor([[*prompt.token_ids, *more]])
        if getattr(self.reference, "_hf_peft_config_loaded", False):  # Phi-4-multimodal
            self.reference.enable_adapters() if prompt.images else self.reference.disable_adapters()
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == self.reference.config.image_token_id).int()
            self.reference.model.rope_deltas = None  # it would be that of the last prompt
        if self.reference.config.model_type == "mllama" and prompt.images:
            return mllama_logits(self.reference, ids, prompt.offsets, inputs)
        if self.reference.config.model_type == "gemma3":
            inputs["token_type_ids"] = (ids == self.reference.config.image_token_id).int()
        if self.reference.config.model_type == "paligemma":
            inputs["token_type_ids"] = (torch.arange(ids.shape[1]) >= len(prompt.token_ids)).int()[None]
        logits = self.reference(input_ids=ids, use_cache=False, **inputs).logits[0]
        # COMPAT: since version 5, transformers leaves the scale of Aya Vision's text model out.
        is_scaled = self.reference.config.model_type == "aya_vision"
        return logits * self.reference.config.text_config.logit_scale if is_scaled else logits


def mllama_logits(
    model: transformers.PreTrainedModel, ids: torch.Tensor, offsets: Sequence[int], inputs: dict[str, Any]
) -> torch.Tensor:
    """[tokens, vocab] of a prompt with images at these offsets."""
    image_token, num_tiles = model.config.image_token_index, inputs.pop("num_tiles")
    ids[:, offsets] = image_token
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(ids[0].tolist(), image_token)], num_tiles, 4, ids.shape[1]
    )

    def hide(_: Any, __: Any, output: Any) -> Any:
        """COMPAT: in the publisher's code tokens before the first image see none; in transformers they see all."""
        output[0][:, : offsets[0]] = 0
        return output

    layers = model.model.language_model.layers
    hooks = [layer.cross_attn.register_forward_hook(hide) for layer in layers if hasattr(layer, "cross_attn")]
    logits: torch.Tensor = model(
        input_ids=ids, cross_attention_mask=torch.from_numpy(mask), use_cache=False, **inputs
    ).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.fixture(scope="module", autouse=True)
def shared_work() -> Iterator[None]:
    """The process that reads files starts once for each model; `test_hostile_images` tests it. Ranks that are threads
    load their towers one after the other, because transformers changes torch for all threads while it loads."""
    read, results = ImageReader.read, {}
    load, lock = VisionTower.load, threading.Lock()

    def remembering(reader: ImageReader, data: bytes) -> Arrays:
        key = (*reader._command, data)
        if key not in results:
            results[key] = read(reader, data)
        return results[key]

    def one_at_a_time(*arguments: Any) -> VisionTower:
        with lock:
            return load(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageReader, "read", remembering)
        patch.setattr(VisionTower, "load", one_at_a_time)
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=(pytest.mark.xdist_group(name), *([pytest.mark.native] if "phi4" in name else [])))
        for name in IMAGE_CASES
    ],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    return Made(request.param, make_image_model(request.param, folder), folder)


def text(seed: int, length: int) -> list[int]:
    return prompts(seed, [length], 256)[0]


def prompts_of(encoder: ImageEncoder) -> list[Prompt]:
    """One image, two images next to each other (not where the template has tokens between), none, and one again."""
    encoded = encoder.encode(IMAGES)

    def prompt(*parts: list[int] | int) -> Prompt:
        ids: list[int] = []
        images, offsets = [], []
        for part in parts:
            if isinstance(part, int):
                images.append(part)
                offsets.append(len(ids))
            ids += encoded[part].token_ids.tolist() if isinstance(part, int) else part
        return Prompt(ids, images, offsets)

    return [
        prompt(text(1, 5), 0, text(2, 4)),
        prompt(text(3, 3), 1, text(8, 1 if encoder.family.has_grid else 0), 2, text(4, 6)),
        prompt(text(5, 30)),
        prompt(2, text(6, 9)),
    ]


def driven(driver: ModelDriver, encoder: ImageEncoder, prompt: Prompt) -> DrivenSequence:
    sequence = driver.sequence(prompt.token_ids)
    sequence.images = encoder.placed(prompt.spans)
    if sequence.images and (adapters := driver.model.adapters) is not None and adapters.own is not None:
        sequence.adapter = adapters.get(adapters.own)
    sequence.num_whole = len(prompt.token_ids) if encoder.family.is_prompt_whole else 0
    return sequence


def whole_end(images: Sequence[PlacedImage], num_whole: int, end: int) -> int:
    """The end of a step that would end inside of tokens that attend to each other: those of an image, or the first
    `num_whole`."""
    return max(num_whole, next((placed.end for placed in images if placed.is_split_at(end)), end))


def logits_of(
    model: Decoder, encoder: ImageEncoder, batch: list[Prompt], chunk: int, adapters: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """[tokens, vocab] of each prompt, computed together in chunks. adapters: of the prompts; empty: none."""
    driver = ModelDriver(model, block_tokens=16)
    sequences = [driven(driver, encoder, prompt) for prompt in batch]
    for sequence, adapter in zip(sequences, adapters, strict=False):
        sequence.adapter = adapter or sequence.adapter
    found: list[list[torch.Tensor]] = [[] for _ in batch]
    while any(s.num_computed < len(s.token_ids) for s in sequences):
        advances = [
            (index, whole_end(s.images, s.num_whole, min(s.num_computed + chunk, len(s.token_ids))) - s.num_computed)
            for index, s in enumerate(sequences)
            if s.num_computed < len(s.token_ids)
        ]
        logits = driver.step([(sequences[index], num) for index, num in advances], every_row=True)
        for (index, _), part in zip(advances, logits.split([num for _, num in advances]), strict=True):
            found[index].append(part)
    return [torch.cat(parts) for parts in found]


def test_logits_are_those_of_transformers_also_in_chunks_through_an_image(made: Made) -> None:
    model, encoder = made.loaded
    batch = prompts_of(encoder)
    expected = [made.logits(prompt) for prompt in batch]
    for chunk in (7, 1 << 20):
        for logits, wanted in zip(logits_of(model, encoder, batch, chunk), expected, strict=True):
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    without = Prompt(batch[0].token_ids, [], [])
    assert not torch.allclose(logits_of(model, encoder, [without], 1 << 20)[0], expected[0], atol=1e-2)


def test_greedy_tokens_are_those_of_transformers(made: Made) -> None:
    """In chunks and batches, with a shared prefix and a preemption; see `test_parity`."""
    run = EngineRun(
        made.folder,
        max_step_tokens=160 if "paligemma" in made.name else MAX_STEP_TOKENS,  # whole prompts are not cut into chunks
        block_tokens=16 if made.name in BLOCKS_OF_16 else BLOCK_TOKENS,
    )
    assert run.engine.model.images is not None
    one, two, none, _ = prompts_of(run.engine.model.images)
    shared = len(two.token_ids) - 6
    is_whole = run.engine.model.images.family.is_prompt_whole  # only equal prompts share their blocks
    again = two if is_whole else Prompt([*two.token_ids[:shared], *text(7, 4)], two.images, two.offsets)
    of_text = {tuple(prompt.token_ids): prompt.spans for prompt in (one, two, again, none)}
    run.images = lambda token_ids: of_text[tuple(token_ids)]
    encoder = run.engine.model.images
    run.end = lambda token_ids, end: whole_end(
        encoder.placed(of_text[tuple(token_ids)]), len(token_ids) if is_whole else 0, end
    )
    # Transformers cannot read it as text. Mllama's has no row in the head.
    image_token = min(encoder.image_token_id, run.engine.model.traits.vocab_size - 1)
    run.sampling = Sampling(logit_bias=[(image_token, -1e4)])
    texts = [one, two, again]
    num_shared = 0 if run.engine.model.states is not None else shared  # it would need a snapshot
    found = run.greedy([prompt.token_ids for prompt in texts], 64, shared_tokens=num_shared, chunk=7)
    for prompt, tokens in zip(texts, found, strict=True):
        logits = made.logits(prompt, tokens)[len(prompt.token_ids) - 1 : -1].clone()
        logits[:, image_token] = -torch.inf
        assert_greedy(logits, tokens)
    run.engine.close()


@pytest.mark.native
def test_a_prompt_has_the_same_bits_alone_and_in_a_batch_and_on_two_ranks(made: Made) -> None:
    model, encoder = made.load(dtype=torch.bfloat16)
    batch = prompts_of(encoder)
    together = logits_of(model, encoder, batch, 7)
    for prompt, expected in zip(batch, together, strict=True):
        assert torch.equal(logits_of(model, encoder, [prompt], 1 << 20)[0], expected)
    sizes = [size.num_bytes for size in encoder.encode(IMAGES)]
    encoder.close()

    def on_rank(group: RankGroup) -> list[torch.Tensor]:
        model, encoder = made.load(group, torch.bfloat16)
        found = logits_of(model, encoder, prompts_of(encoder), 7)
        assert [size.num_bytes for size in encoder.encode(IMAGES)] == sizes
        encoder.close()
        return found

    for of_rank in run_native_ranks(2, on_rank):
        for found, expected in zip(of_rank, together, strict=True):
            assert torch.equal(found, expected)


def test_every_family_has_a_case() -> None:
    tested = {getattr(transformers, case.config).model_type for case in IMAGE_CASES.values()}
    assert tested == set(FAMILIES)


PROCESSORS = {
    "aya-vision": ("AyaVisionProcessor", {"patch_size": 8, "img_size": 32, "downsample_factor": 2}),
    "granite4-vision": (
        "Granite4VisionProcessor",
        {"patch_size": 8, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
    ),
    "idefics2": ("Idefics2Processor", {"image_seq_len": 5}),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}),
    "llava": ("LlavaProcessor", {"patch_size": 8, "vision_feature_select_strategy": "default"}),
    "paligemma": ("PaliGemmaProcessor", {}),
    "llava-next": ("LlavaNextProcessor", {"patch_size": 8, "vision_feature_select_strategy": "default"}),
}


def test_an_image_becomes_the_tokens_of_transformers(made: Made) -> None:
    """For families whose processor needs no other library."""
    if made.name not in PROCESSORS:
        pytest.skip("the processor of transformers needs torchvision or num2words")
    _, encoder = made.loaded
    class_name, values = PROCESSORS[made.name]
    if class_name.startswith("Llava"):
        values = {**values, "num_additional_image_tokens": 1}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(made.folder / "tokenizer.json"), pad_token="<global-img>", bos_token="<bos>"
    )
    images = transformers.AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    if class_name == "PaliGemmaProcessor":
        (placed,) = encoder.placed([ImageSpan(IMAGES[0], 0)])
        images.image_seq_length = len(placed.image.embeddings)  # a setting of the published processors
    processor = getattr(transformers, class_name)(images, tokenizer, **values)
    for image, encoded in zip(PICTURES, encoder.encode(IMAGES), strict=True):
        expected = processor(text=[f"a{encoder.template_text or encoder.placeholder} b"], images=[image])["input_ids"][
            0
        ]
        # PaliGemma's puts a token after the images, and a line break at the end.
        num_behind = 4 if class_name == "PaliGemmaProcessor" else 2
        assert list(expected)[1:-num_behind] == encoded.token_ids.tolist()


def test_tiles_become_the_tokens_of_transformers(made: Made) -> None:
    """For families whose processors need torchvision for anything else."""
    own = own_processor(made.folder)
    if not isinstance(own, PatchProcessor | TileProcessor):
        pytest.skip("the processor of transformers needs no torchvision")
    _, encoder = made.loaded
    names = {"image_token": "<image>", "image_thumbnail_token": "<|img_thumbnail|>"}
    names |= {f"image_{end}_token": f"<|image_{end}|>" for end in ("start", "end")}
    for image, encoded in zip(PICTURES, encoder.encode(IMAGES), strict=True):
        if isinstance(own, TileProcessor):
            text = transformers.Llama4Processor._prompt_split_image(None, own.canvas(image.width, image.height), 4)
        else:
            columns, rows = own.grid(image.width, image.height)
            width, height = own.whole(image.width, image.height)
            text = Lfm2VlProcessor._build_image_tokens(
                SimpleNamespace(**names), rows, columns, 4, width * height // own.unit**2, True, True
            )
        assert encoder._tokenizer.encode(text).ids == encoded.token_ids.tolist()


def test_the_images_that_were_used_last_are_kept(made: Made) -> None:
    if made.name != "llava":
        pytest.skip("the same for every family")
    _, encoder = made.load()

    def are_kept(*images: int) -> list[bool]:
        return [IMAGES[i].hash in encoder._alive for i in images]

    first = encoder.encode(IMAGES[:2])
    kept = [encoder._alive[image.hash] for image in IMAGES[:2]]
    encoder.encode(IMAGES[:2])
    assert [encoder._alive[image.hash] is each for image, each in zip(IMAGES, kept, strict=False)] == [True, True]
    with pytest.raises(ImageError, match="image 2 is not an image file"):
        encoder.encode([IMAGES[1], Image(b"bad", b"no image")])
    encoder.kept_bytes = first[0].num_bytes * 2
    used = encoder.placed([ImageSpan(IMAGES[0], 0)])
    assert used[0].image is kept[0]
    del kept
    encoder.encode([IMAGES[2]])
    assert are_kept(0, 1, 2) == [True, False, True], "the second one was used longest ago"
    encoder.encode([IMAGES[1]])
    assert are_kept(0, 1) == [True, True], "the first one is in use"
    assert len(encoder.encode([IMAGES[1], IMAGES[2]])) == 2
    assert are_kept(0, 1, 2) == [True, False, True], "a request with more than fit is not refused here"
    used.clear()
    assert len(encoder.encode([IMAGES[1], IMAGES[2]])) == 2
    assert len(encoder.placed([ImageSpan(IMAGES[0], 0)])) == 1, "encoded again, from the data of the span"
    encoder.close()


def test_a_step_encodes_no_image_that_requests_wait_for_while_others_can_be_forgotten(
    monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    if made.name != "llava":
        pytest.skip("the same for every family")
    _, encoder = made.load()
    encode, encoded = ImageEncoder._encode, []

    def counted(self: ImageEncoder, data: bytes) -> EncodedImage:
        encoded.append(data)
        return encode(self, data)

    monkeypatch.setattr(ImageEncoder, "_encode", counted)
    waiting = IMAGES[0]
    (first,) = encoder.encode([waiting])
    encoder.kept_bytes = first.num_bytes * 4
    del first
    others = [Image(bytes([number]), IMAGES[2].data) for number in range(6)]
    for other in others:
        encoder.encode([other])
        encoder.placed([ImageSpan(other, 0)])
    assert len(encoded) == 7
    encoder.placed([ImageSpan(waiting, 0)])
    assert len(encoded) == 7, "the others were used later, but no request waits for them"
    # Images of requests that have ended do not take the place of those in use.
    for number in range(6, 12):
        encoder.encode([Image(bytes([number]), IMAGES[2].data)])
    encoder.placed([ImageSpan(others[-1], 0), ImageSpan(waiting, 0)])
    assert len(encoded) == 13
    encoder.close()


def test_a_call_is_refused_while_many_wait(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Each of them blocks a thread of the service, which must still answer Health."""
    if made.name != "llava":
        pytest.skip("the same for every family")
    _, encoder = made.loaded
    monkeypatch.setattr(encoder_module, "MAX_WAITING", 1)
    gate = threading.Event()
    encoder._thread.submit(gate.wait, 240)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(encoder.encode, IMAGES[:1]) for _ in range(2)]
        refused = next(as_completed(waiting))
        gate.set()
        assert "the images of 1 requests are being encoded already" in str(refused.exception())
    assert [future.exception() for future in waiting if future is not refused] == [None]


def gate_encoder(monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], threading.Event, threading.Event]:
    """Stops encoders at each image until a gate opens. Returns the images that they began with, whether they began with
    one, and the gate."""
    encode, has_begun, gate = ImageEncoder._encode, threading.Event(), threading.Event()
    order: list[bytes] = []

    def gated(self: ImageEncoder, data: bytes) -> EncodedImage:
        order.append(data)
        has_begun.set()
        assert gate.wait(240)
        return encode(self, data)

    monkeypatch.setattr(ImageEncoder, "_encode", gated)
    return order, has_begun, gate


def test_a_step_waits_for_no_image_of_other_requests_but_the_one_that_is_being_encoded(
    monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    if made.name != "llava":
        pytest.skip("the same for every family")
    _, encoder = made.load()
    encoder.encode(IMAGES[:1])
    order, has_begun, gate = gate_encoder(monkeypatch)
    others = [Image(bytes([number]), IMAGES[2].data) for number in range(3)]
    with ThreadPoolExecutor(2) as threads:
        of_others = threads.submit(encoder.encode, others)
        assert has_begun.wait(240)
        assert encoder.placed([ImageSpan(IMAGES[0], 0)])[0].offset == 0, "kept: it waits for nothing"
        of_step = threads.submit(encoder.placed, [ImageSpan(IMAGES[1], 0)])
        with encoder._turns:
            assert encoder._turns.wait_for(lambda: encoder._num_urgent == 1, 240)
        gate.set()
        assert len(of_step.result(240)) == 1
        assert len(of_others.result(240)) == 3
    assert order == [IMAGES[2].data, IMAGES[1].data, IMAGES[2].data, IMAGES[2].data]
    encoder.close()


def test_streams_advance_while_an_image_is_encoded_and_their_steps_encode_none(
    monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    if made.name != "llava":
        pytest.skip("the same for every family")
    engine = EngineRun(made.folder).engine
    encoded, has_begun, gate = gate_encoder(monkeypatch)
    stream = NewSequence(1, [1, 2, 3], 3)
    step(engine, plan(1, (), [stream], [Advance(1, 3, [0, 1, 2], sample=True)]))
    with ThreadPoolExecutor(1) as threads:
        encoding = threads.submit(engine.encode_images, IMAGES[:2])
        assert has_begun.wait(240)
        for number in range(2, 6):
            (output,) = step(engine, plan(number, advances=[Advance(1, 1, sample=True)]))
            assert len(output.tokens) == 1
        assert len(encoded) == 1, "the first image is still being encoded"
        gate.set()
        images = encoding.result(240)
    # The steps in which their tokens are computed encode nothing either.
    ids = [1, 2, *(token for image in images for token in image.token_ids.tolist()), 3]
    offsets = [2, 2 + len(images[0].token_ids)]
    spans = [ImageSpan(image, offset) for image, offset in zip(IMAGES, offsets, strict=False)]
    new = NewSequence(2, ids, len(ids), images=spans)
    for number, start in enumerate(range(0, len(ids), 16), 6):
        num_tokens, blocks = min(16, len(ids) - start), range(3 + start // 4, 7 + start // 4)
        advances = [Advance(1, 1, sample=True), Advance(2, num_tokens, blocks, sample=start + num_tokens == len(ids))]
        outputs = step(engine, plan(number, (), [new] if start == 0 else [], advances))
        assert [output.error for output in outputs if output.error] == []
    assert [len(output.tokens) for output in outputs] == [1, 1]
    assert encoded == [image.data for image in IMAGES[:2]]
    engine.close()


def test_a_folder_without_an_image_processor_is_refused(made: Made, tmp_path: Path) -> None:
    if made.name != "llava":
        pytest.skip("the same for every family")
    folder = shutil.copytree(made.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("preprocessor_config.json"))
    with pytest.raises(ConfigError, match=r"holds no preprocessor_config\.json"):
        load_model(LoadOptions(folder, torch.float32, DEVICE, 16), RankGroup())


def test_a_sequence_names_images_that_are_encoded_where_their_tokens_are(made: Made) -> None:
    if made.name != "llava":
        pytest.skip("the same for every family")
    run = EngineRun(made.folder)
    encoder = run.engine.model.images
    assert encoder is not None
    (encoded,) = run.engine.encode_images(IMAGES[:1])
    ids = [1, 2, *encoded.token_ids.tolist(), 3]
    wrong = {
        "at token 3": ImageSpan(IMAGES[0], 3),
        "image 1 is not an image file": ImageSpan(Image(b"bad", b"no image"), 2),
    }
    for number, (reason, span) in enumerate(wrong.items(), 1):
        new = NewSequence(number, ids, len(ids), images=[span])
        (output,) = step(run.engine, plan(number, (), [new], [Advance(number, 1, [0, 1, 2, 3, 4, 5, 6, 7])]))
        assert reason in output.error
    run.engine.close()


def test_an_advance_that_ends_inside_of_an_image_whose_tokens_attend_to_each_other_fails(made: Made) -> None:
    if made.name != "gemma3":
        pytest.skip("the only such family")
    run = EngineRun(made.folder)
    (encoded,) = run.engine.encode_images(IMAGES[:1])
    ids = [1, 2, *encoded.token_ids.tolist(), 3]
    for number, (end, reason) in enumerate([(2, ""), (3, ""), (4, "inside of an image"), (12, ""), (13, "")], 1):
        new = NewSequence(number, ids, len(ids), images=[ImageSpan(IMAGES[0], 2)])
        blocks = [4 * number + place for place in range(4)]
        outputs = step(run.engine, plan(number, (), [new], [Advance(number, end, blocks, sample=False)]))
        assert [reason in output.error for output in outputs if output.error] == [True] * bool(reason)
    run.engine.close()


def test_a_paligemma_whose_prompts_are_not_seen_as_a_whole_is_refused(made: Made, tmp_path: Path) -> None:
    if made.name != "paligemma":
        pytest.skip("the only such family")
    values = json.loads((made.folder / "config.json").read_text())
    values["text_config"]["use_bidirectional_attention"] = False
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="use_bidirectional_attention is false; prompts of this type are seen as"):
        read_spec(tmp_path)


def test_sections_of_the_rope_are_those_of_transformers_where_none_are_given(made: Made, tmp_path: Path) -> None:
    if made.name != "qwen3.5":
        pytest.skip("the same for every family that has them")
    specs = []
    for sections in ({"mrope_section": [11, 11, 10], "mrope_interleaved": True}, {}):
        values = json.loads((made.folder / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, **sections}
        values["text_config"] |= {"head_dim": 128, "rope_parameters": rope}
        (tmp_path / "config.json").write_text(json.dumps(values))
        specs.append(read_spec(tmp_path)[0])
    assert specs[0] == specs[1]
    rope = specs[0].layers[3].plain_attention.rope
    assert rope is not None
    assert rope.axes[:6] == (0, 1, 2, 0, 1, 2)


def test_features_for_a_layer_that_is_not_there_are_refused(made: Made, tmp_path: Path) -> None:
    if made.name != "granite4-vision":
        pytest.skip("the only family that names layers")
    values = json.loads((made.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "spatial_target_layers": [1, 4]}))
    with pytest.raises(ConfigError, match="image features for layer 4 need more than 4 layers"):
        read_spec(tmp_path)


def test_other_image_models_are_refused_by_name() -> None:
    config = transformers.Glm4vConfig()
    assert "supported: aya_vision, gemma3, granite4_vision, idefics2" in support_of(config.model_type, config.to_dict())


def test_a_tower_computes_in_16_bits_where_the_chosen_instructions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this CPU has: with one `--cpu-isa`, all machines compute in one data type."""
    monkeypatch.setattr(tower, "find_build", lambda device, dtype, isa: SimpleNamespace(isa=SimpleNamespace(name=isa)))
    cpu, half = torch.device("cpu"), (torch.bfloat16, torch.float16)
    found = {isa: [tower_dtype(dtype, cpu, isa) for dtype in half] for isa in ("amx", "avx512-bf16", "avx512-vnni")}
    assert found == {
        "amx": [*half],
        "avx512-bf16": [torch.bfloat16, torch.float32],
        "avx512-vnni": [torch.float32, torch.float32],
    }
    assert tower_dtype(torch.float32, cpu, "amx") == torch.float32
    monkeypatch.setattr(tower, "find_build", None)
    assert tower_dtype(torch.float16, torch.device("cuda", 0)) == torch.float16, "asks nothing of a CPU"
