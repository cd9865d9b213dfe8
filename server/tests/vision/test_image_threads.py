"""How images are encoded on a GPU beside the steps, without a GPU: on which device, and on which stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from current_device import CurrentDevice
from image_cases import file_of, make_image_model, picture
from penstock_server.protocol.plan import Image, ImageSpan
from penstock_server.vision.encoded import ImageStates
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.vision.family import FAMILIES, Arrays
from torch import Tensor

GPU = torch.device("cuda", 1)
IMAGES = [Image(bytes([number]), file_of(picture(number, 32, 32))) for number in (1, 2)]
NUM_TOKENS = 16  # tokens of each image


class FakeTower:
    """Says that it is on a GPU, and calls `on_run` instead of computing."""

    device = GPU
    computed_in = torch.float32
    num_bytes = 0

    def __init__(self, on_run: Callable[[], None]) -> None:
        self._on_run = on_run

    def __call__(self, arrays: Arrays) -> Tensor:
        self._on_run()
        return torch.zeros(NUM_TOKENS, 8)


class FakeStreams:
    """Stands in for the streams of a GPU. Notes what is done with them, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.notes: list[str] = []
        self.devices: list[torch.device] = []
        self._current = "steps"
        steps = SimpleNamespace(name="steps")
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "default_stream", lambda device: steps)
        patch.setattr(torch.cuda, "Stream", self._make)
        patch.setattr(torch.cuda, "stream", self._enter)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, by: self.note(f"shared with {by.name}"))

    def note(self, event: str) -> None:
        self.notes.append(f"{event} on {self._current}")

    def _make(self, device: torch.device, priority: int) -> Any:
        self.devices.append(device)
        return SimpleNamespace(
            name="images",
            wait_stream=lambda other: self.note(f"images awaits {other.name}"),
            synchronize=lambda: self.note("images is awaited"),
        )

    @contextmanager
    def _enter(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream.name
        yield
        self._current = before

    def of_work(self, work: str) -> list[str]:
        """What belongs to work on the stream of images."""
        work_on_stream = [f"{work} on images", "shared with steps on images", "images is awaited on images"]
        return ["images awaits steps on steps", *work_on_stream]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    make_image_model("llava", folder)
    return folder


@pytest.fixture
def config(folder: Path) -> Any:
    """Made before torch's streams are replaced, whose class transformers needs."""
    return transformers.AutoConfig.from_pretrained(folder)


def make_encoder(folder: Path, config: Any, on_run: Callable[[], None]) -> ImageEncoder:
    return ImageEncoder(folder, config, FAMILIES["llava"], FakeTower(on_run))  # type: ignore[arg-type]


def test_images_are_encoded_on_the_gpu_of_their_rank(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeStreams(monkeypatch)
    current = CurrentDevice.patched(monkeypatch)
    found = []
    encoder = make_encoder(folder, config, lambda: found.append(current.device))
    encoder.encode(IMAGES)
    encoder.close()
    assert found == [GPU] * 2
    assert current.device == torch.device("cuda", 0), "the caller's"


def test_a_tower_runs_on_a_stream_of_its_own_whose_results_steps_may_read(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step encodes an image, from which the compute thread returns to the stream of the steps."""
    streams = FakeStreams(monkeypatch)
    encoder = make_encoder(folder, config, lambda: streams.note("tower"))
    encoder.encode(IMAGES[:1])
    assert streams.notes == streams.of_work("tower")
    encoder.placed([ImageSpan(IMAGES[1], 0)])
    streams.note("step")
    assert streams.notes == [*streams.of_work("tower") * 2, "step on steps"]
    assert streams.devices == [GPU]
    encoder.close()


def test_keys_and_values_of_images_are_computed_on_the_stream_of_images(
    folder: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = FakeStreams(monkeypatch)
    encoder = make_encoder(folder, config, lambda: streams.note("tower"))

    def project(states: Tensor) -> dict[int, Tensor]:
        streams.note("projection")
        return {3: states}

    states = ImageStates(torch.zeros(NUM_TOKENS, 8))
    encoder._project(SimpleNamespace(project=project, projected_bytes=4), states)  # type: ignore[arg-type]
    encoder.close()
    assert states.kv is not None
    assert streams.notes == streams.of_work("projection")
