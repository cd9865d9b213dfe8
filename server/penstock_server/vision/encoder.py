"""Encodes images beside the steps, and keeps the embeddings of those that were used last."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.errors import ConfigError, ImageError, ImagesOverloadError
from penstock_server.host.background import enter_background
from penstock_server.protocol.plan import Image, ImageSpan
from penstock_server.vision.crops import CropProcessor
from penstock_server.vision.encoded import EncodedImage, ImageSize, ImageStates
from penstock_server.vision.family import Arrays, ImageFamily, image_token_id
from penstock_server.vision.patches import PatchProcessor
from penstock_server.vision.processor import own_processor
from penstock_server.vision.reader import ImageReader
from penstock_server.vision.states import ImageGroup, ImageKvPool
from penstock_server.vision.stored import stored_max_pixels
from penstock_server.vision.stream import ImageStream
from penstock_server.vision.tower import VisionTower

logger = logging.getLogger(__name__)

MAX_WAITING = 24  # concurrent calls of `encode`, each of which blocks a thread
_KEPT_BYTES = 1 << 30
# Bytes of the keys and values of images that are attended to. On a GPU, an eighth of its memory if that is more.
_POOL_BYTES = 1 << 30
_POOL_IMAGES = 64
_READING_BYTES = 1 << 29  # memory of the process that reads files; more only for huge ones
_ACTIVATIONS = 1 << 28  # elements, of the tower


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image among the tokens of a sequence."""

    offset: int  # place of its first token
    image: EncodedImage
    position: int  # position of its first token
    group: ImageGroup | None = None  # that it is in, if it is attended to
    num_seen: int = 0  # states of the group up to the image's last one

    @property
    def end(self) -> int:
        return self.offset + len(self.image.token_ids)

    @property
    def shift(self) -> int:
        """What the positions of the tokens after the image are smaller by than their number."""
        return self.end - self.position - self.image.num_positions

    def is_split_at(self, end: int) -> bool:
        """Whether a token before `end`, which is computed with it, attends to one behind it."""
        return self.image.ends is not None and self.offset < end < self.end and self.ends(end - 1, end)[0] > end

    def ends(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """[tokens] the ends of what these tokens of the sequence, which are the image's, attend to."""
        assert self.image.ends is not None
        return self.offset + self.image.ends[first - self.offset : last - self.offset]

    def positions(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """[tokens, 3]: the positions in time, row and column of these tokens of the sequence, which are the image's."""
        assert self.image.grid is not None
        index = np.arange(first - self.offset, last - self.offset)
        return self.position + np.stack((0 * index, index // self.image.grid[1], index % self.image.grid[1]), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """The image tokens of a step."""

    places: npt.NDArray[np.int64]  # [image tokens] rows of the batch
    embeddings: Tensor  # [image tokens, hidden or wider]
    positions: npt.NDArray[np.int64] | None  # [image tokens, 3]; None: those of text
    ends: npt.NDArray[np.int32] | None  # see `StepBatch`


def image_tokens(
    images: Sequence[Sequence[PlacedImage]], computed: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64]
) -> StepImages | None:
    """The image tokens of a step that advances each sequence from `computed` to `contexts` tokens. None: it has none.

    images, computed, contexts [sequences]
    """
    starts = np.cumsum(contexts - computed) - contexts
    places, embeddings, positions = [], [], []
    counts = contexts - computed
    ends = np.arange(1, counts.sum() + 1) - np.repeat(starts, counts)
    has_ends = False
    for of_sequence, start, begin, end in zip(
        images, starts.tolist(), computed.tolist(), contexts.tolist(), strict=True
    ):
        for placed in of_sequence:
            first, last = max(begin, placed.offset), min(end, placed.end)
            if first < last:
                before = placed.image.before[first - placed.offset : last - placed.offset + 1]
                places.append(start + first + np.flatnonzero(np.diff(before)))
                embeddings.append(placed.image.embeddings[before[0] : before[-1]])
                if placed.image.grid is not None:
                    positions.append(placed.positions(first, last))
                if placed.image.ends is not None:
                    has_ends = True
                    ends[start + first : start + last] = placed.ends(first, last)
    if not any(map(len, places)):
        return None
    return StepImages(
        np.concatenate(places),
        torch.cat(embeddings),
        np.concatenate(positions) if positions else None,
        ends.astype(np.int32) if has_ends else None,
    )


def text_positions(images: Sequence[PlacedImage], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The positions of these tokens of a sequence, given by their number; those of image tokens are meaningless."""
    ends = [placed.end for placed in images]
    shifts = np.array([0, *(placed.shift for placed in images)])
    return tokens - shifts[np.searchsorted(ends, tokens, side="right")]


def _num_activations(folder: Path, config: Any, family: ImageFamily, max_tokens: int) -> int:
    """Elements that the tower has at most while it encodes an image of up to `max_tokens` tokens."""
    tower = config.vision_config
    if family.has_grid:
        max_patches = stored_max_pixels(folder) // tower.patch_size**2
        num_patches = min(max_patches, max_tokens * tower.spatial_merge_size**2)
        return max(_ACTIVATIONS, num_patches * _activations_per_patch(tower))
    # A tower that encodes all crops of an image at once has the most in an MLP: its input, the residual, and two of its
    # wider rows for each patch.
    processor = own_processor(folder)
    if not isinstance(processor, CropProcessor | PatchProcessor):
        return _ACTIVATIONS
    return max(_ACTIVATIONS, 2 * processor.max_patches * (tower.hidden_size + tower.intermediate_size))


def _activations_per_patch(tower: Any) -> int:
    """Elements for each patch in Qwen's towers: pixels as they are read and converted, and the larger one of attention,
    which rotates queries and keys, and an MLP, with four of its wider rows.

    By hand, for 2,048 patches through two layers in float32 on a CPU, without pixels: 21,168 for Qwen2-VL, 15,374 for
    Qwen2.5-VL, 13,184 for Qwen3-VL, where this allows 23,040, 16,240 and 19,520."""
    width = getattr(tower, "embed_dim", tower.hidden_size)
    inner = getattr(tower, "intermediate_size", None) or int(width * tower.mlp_ratio)
    num_pixels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    return 4 * num_pixels + max(10 * width, 2 * width + 4 * inner)


class ImageEncoder:
    """The images of one rank. Thread-safe. A thread of low priority encodes them one by one, on a GPU on a stream of
    its own. A step that needs an image which is not kept waits for the one that is being encoded, and encodes its
    own."""

    def __init__(self, folder: Path, config: Any, family: ImageFamily, tower: VisionTower) -> None:
        """config: of transformers. Raises ConfigError if the tokenizer lacks the model's image token."""
        from tokenizers import Tokenizer

        self.family = family
        self.max_tokens = sys.maxsize
        """Most tokens of an image; the longest sequence of the server."""
        self._folder = folder
        self._config = config
        self._tower = tower
        self._stream = ImageStream(tower.device)
        self._reader = ImageReader(folder, family.options(config))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.image_token_id = image_token_id(config)
        image_token: str | None = self._tokenizer.id_to_token(self.image_token_id)
        if image_token is None:
            raise ConfigError(f"{folder}/tokenizer.json lacks the image token, {self.image_token_id}")
        self._image_token = image_token
        self.placeholder = family.placeholder.format(image=image_token)
        self.template_text = family.template_text
        # The token that stands for an image in a prompt.
        stands_for = self.template_text if self.template_text in self.placeholder else ""
        placeholder_id: int | None = self._tokenizer.token_to_id(stands_for or image_token)
        if placeholder_id is None:
            raise ConfigError(f"{folder}/tokenizer.json lacks the token {stands_for}")
        self.placeholder_id = placeholder_id
        # For images that are attended to, set by the decoder: the pool and the image token's embedding, [1, hidden].
        # Sequences hold the largest vocabulary id instead, because the image token may have no row in the head.
        self.pool: ImageKvPool | None = None
        self.token_embedding: Tensor | None = None
        self._last_id: int = config.get_text_config().vocab_size - 1
        # The image that was used last is the last one.
        self._kept: dict[bytes, EncodedImage] = {}  # images that a step has used
        self._awaited: dict[bytes, EncodedImage] = {}  # their requests have not reached a step, as far as is known
        self._alive: WeakValueDictionary[bytes, EncodedImage] = WeakValueDictionary()  # kept, or in use by sequences
        self._num_waiting = 0
        self._lock = threading.Lock()  # guards what is kept, and the number that waits
        self._turns = threading.Condition()
        self._is_encoding = False
        self._num_urgent = 0  # threads that wait for their turn on behalf of a step
        self._thread = ThreadPoolExecutor(1, "images", initializer=enter_background, initargs=(tower.device,))
        self.kept_bytes = _KEPT_BYTES
        """What images that are kept or in use may take."""
        self.later_bytes = 0
        """Bytes of the pool of images that are attended to, whose pages are not touched yet."""

    @property
    def max_bytes(self) -> int:
        """What images may take in all, with at most `max_tokens` tokens each."""
        num_activations = _num_activations(self._folder, self._config, self.family, self.max_tokens)
        return _KEPT_BYTES + _READING_BYTES + num_activations * self._tower.computed_in.itemsize + self.later_bytes

    @property
    def weight_bytes(self) -> int:
        return self._tower.num_bytes

    @property
    def room_bytes(self) -> int:
        """What the images of all sequences that the worker knows may take."""
        return self.kept_bytes if self.pool is None else self.pool.room_bytes

    def num_pool_blocks(self, block_bytes: int, max_states: int, block_tokens: int) -> int:
        """Blocks for the states of images: of `_POOL_IMAGES` of the largest ones, if these fit. block_bytes: of a block
        in all caches."""
        device, num_bytes = self._tower.device, _POOL_BYTES
        if device.type == "cuda":
            num_bytes = max(num_bytes, torch.cuda.get_device_properties(device).total_memory // 8)
        return min(_POOL_IMAGES * -(-max_states // block_tokens), num_bytes // block_bytes)

    def encode(self, images: Sequence[Image], is_awaited: Callable[[], bool] = lambda: True) -> list[ImageSize]:
        """Encodes the images that are not kept, one after the other, while the caller awaits them. Raises ImageError,
        which names the image that cannot be encoded by its number, or ImagesOverloadError."""
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                raise ImagesOverloadError(
                    f"the images of {self._num_waiting} requests are being encoded already; try again later"
                )
            self._num_waiting += 1
        try:
            # One image at a time, so that requests take turns.
            submit = self._thread.submit
            return [submit(self._size, number, image, is_awaited).result() for number, image in enumerate(images, 1)]
        finally:
            with self._lock:
                self._num_waiting -= 1

    def placed(self, spans: Sequence[ImageSpan]) -> list[PlacedImage]:
        """The images of a sequence. Those that are not kept, as after the loss of a worker, are encoded now, before
        those that `encode` waits for. Raises ImageError."""
        if self.pool is not None:
            return self._attended(self.pool, spans)
        found: list[PlacedImage] = []
        shift = 0
        for number, span in enumerate(spans, 1):
            image = self._found(number, span.image, is_urgent=True)
            found.append(PlacedImage(span.offset, image, span.offset - shift))
            shift = found[-1].shift
        return found

    def close(self) -> None:
        """Ends the thread and the process."""
        self._thread.shutdown()
        self._reader.close()

    def _size(self, number: int, image: Image, is_awaited: Callable[[], bool]) -> ImageSize:
        """What the router learns of image `number` of a request, which is encoded now unless it is kept. Raises
        ImageError."""
        if not is_awaited():
            raise ImageError(f"image {number} is not awaited any more")
        found = self._found(number, image)
        states = found.states
        if self.pool is None or states is None:
            return ImageSize(found.token_ids, found.num_bytes)
        if states.kv is None and not self.pool.has_written(image.hash):
            with self._turn(is_urgent=False), _naming_image(number, RuntimeError):
                self._project(self.pool, states)
        return ImageSize(found.token_ids, self.pool.room_of(len(states)))

    @torch.inference_mode()
    def _project(self, pool: ImageKvPool, states: ImageStates) -> None:
        """Computes the keys and values of an image, if there is room for them: no step has to do it then."""
        if self._num_bytes() + len(states) * pool.projected_bytes <= self.kept_bytes:
            with self._stream.entered():
                kv = pool.project(states.states)
                self._stream.share(kv.values())
            states.kv = kv

    def _found(self, number: int, image: Image, *, is_urgent: bool = False) -> EncodedImage:
        """Image `number` of a request, encoded now unless it is kept. Raises ImageError."""
        found = self._kept_image(image.hash)
        # The ranks of a group must agree on the sequences of a step, but one of them may lack memory. What failed in a
        # step was encoded before, so the image is not at fault.
        errors: tuple[type[Exception], ...] = (ValueError,) if is_urgent else (RuntimeError, ValueError)
        with contextlib.nullcontext() if found else self._turn(is_urgent=is_urgent):
            with _naming_image(number, *errors):
                # Another request may have had it encoded meanwhile.
                found = found or self._kept_image(image.hash) or self._encode(image.data)
            self._keep(image.hash, found, is_awaited=not is_urgent)
        return found

    @contextlib.contextmanager
    def _turn(self, *, is_urgent: bool) -> Iterator[None]:
        """Encode one image at a time, first those that a step waits for."""
        with self._turns:
            self._num_urgent += is_urgent
            self._turns.notify_all()
            self._turns.wait_for(lambda: not self._is_encoding and (is_urgent or self._num_urgent == 0))
            self._num_urgent -= is_urgent
            self._is_encoding = True
        try:
            yield
        finally:
            with self._turns:
                self._is_encoding = False
                self._turns.notify_all()

    def _kept_image(self, hash_: bytes) -> EncodedImage | None:
        with self._lock:
            return self._alive.get(hash_)

    def _keep(self, hash_: bytes, image: EncodedImage, *, is_awaited: bool) -> None:
        """Forgets the images that were used longest ago, until the others fit: first those that no request waits for,
        because a step encodes what it needs and was forgotten. Requests that have ended leave theirs among those that
        are awaited, so these are forgotten first where they take more than half. Keys and values go before all images,
        because computing them from these takes less time than encoding an image."""
        with self._lock:
            self._alive[hash_] = image
            self._kept.pop(hash_, None)
            self._awaited.pop(hash_, None)
            (self._awaited if is_awaited else self._kept)[hash_] = image
            while self._num_bytes() > self.kept_bytes and len(self._kept) + len(self._awaited) > 1:
                states = (kept.states for kept in [*self._kept.values(), *self._awaited.values()])
                if (projected := next((each for each in states if each is not None and each.kv), None)) is not None:
                    projected.kv = None
                    continue
                awaited_bytes = sum(image.num_bytes for image in self._awaited.values())
                is_half = awaited_bytes > self.kept_bytes // 2
                images = self._awaited if is_half or not self._kept else self._kept
                del images[next(iter(images))]

    def _num_bytes(self) -> int:
        return sum(image.num_bytes for image in list(self._alive.values()))

    @torch.inference_mode()
    def _encode(self, data: bytes) -> EncodedImage:
        began = time.perf_counter()
        arrays = self._reader.read(data)
        self._check_tokens(arrays)
        read = time.perf_counter()
        with self._stream.entered():
            embeddings = self._tower(arrays)
            self._stream.share([embeddings])
        ended = time.perf_counter()
        logger.info(
            "encoded an image of %d bytes into %d tokens: read in %.3f s, encoded in %.3f s",
            len(data),
            len(embeddings),
            read - began,
            ended - read,
        )
        return self._expanded(embeddings, arrays)

    def _check_tokens(self, arrays: Arrays) -> None:
        """Refuses an image that no sequence can hold before it is encoded: its time and memory grow with its tokens.
        Raises ImageError."""
        if self.family.num_embeddings is None:
            return
        num_tokens = self.family.num_embeddings(self._config, arrays)
        if num_tokens > self.max_tokens:
            raise ImageError(
                f"has {num_tokens} tokens, at most {self.max_tokens} are allowed in a sequence; send a smaller one"
            )

    def _expanded(self, embeddings: Tensor, arrays: Arrays) -> EncodedImage:
        if self.token_embedding is not None:
            return self._attended_image(ImageStates(embeddings))
        text = self.family.expand(self._image_token, len(embeddings), arrays)
        token_ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        is_image = token_ids == self.image_token_id
        before = np.concatenate(([0], np.cumsum(is_image)))
        if before[-1] != len(embeddings):
            raise ImageError(f"became {len(embeddings)} embeddings for {before[-1]} tokens")
        ends = _run_ends(is_image) if self.family.is_whole else None
        return EncodedImage(token_ids, before, embeddings, self._grid(len(embeddings), arrays), ends)

    def _attended_image(self, states: ImageStates | None) -> EncodedImage:
        assert self.token_embedding is not None
        token_ids = np.array([min(self.image_token_id, self._last_id)], np.int32)
        return EncodedImage(token_ids, np.arange(2), self.token_embedding, states=states)

    def _attended(self, pool: ImageKvPool, spans: Sequence[ImageSpan]) -> list[PlacedImage]:
        """Like `placed`, for images that are attended to. Their groups have their states."""
        placed: list[PlacedImage] = []
        image = self._attended_image(None)
        while len(placed) < len(spans):
            first = len(placed)
            last = first + 1
            while last < len(spans) and spans[last].offset == spans[last - 1].offset + len(image.token_ids):
                last += 1
            hashes = tuple(span.image.hash for span in spans[first:last])
            group = pool.find(hashes)
            if group is None:
                numbered = enumerate(spans[first:last], first + 1)
                group = pool.add(hashes, [self._found(n, span.image, is_urgent=True) for n, span in numbered])
            num_seen = accumulate(group.num_states)
            adjacent = zip(spans[first:last], num_seen, strict=True)
            placed += [PlacedImage(span.offset, image, span.offset, group, num) for span, num in adjacent]
        return placed

    def _grid(self, num_embeddings: int, arrays: Arrays) -> tuple[int, int] | None:
        if not self.family.has_grid:
            return None
        _, rows, columns = arrays["image_grid_thw"][0].tolist()
        merged = isqrt(rows * columns // num_embeddings)  # patches that become one embedding, in each direction
        return rows // merged, columns // merged


@contextlib.contextmanager
def _naming_image(number: int, *kinds: type[Exception]) -> Iterator[None]:
    """Names the image in ImageErrors. Turns errors of these kinds into ImageErrors: they end the image's request, not
    the worker."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"image {number} {error}") from error
    except torch.AcceleratorError:
        raise  # the device is in an unknown state
    except kinds as error:
        logger.warning("an image cannot be encoded", exc_info=error)
        if isinstance(error, torch.OutOfMemoryError):
            raise ImageError(f"image {number} needs more memory than is free; send a smaller one") from error
        first_line = str(error).strip().partition("\n")[0]
        raise ImageError(f"image {number} cannot be encoded: {first_line}") from error


def _run_ends(is_image: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[tokens]: the end of the run of image tokens that a token is in; for other tokens the number of the next one."""
    ends = np.arange(1, len(is_image) + 1)
    run_ends = ends[is_image & ~np.append(is_image[1:], False)]
    ends[is_image] = run_ends[np.searchsorted(run_ends, ends[is_image])]
    return ends
