"""Files that are not what they seem cost their client an error, and nobody else anything."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import transformers
from hostile_files import KINDS, hostile_file, png
from image_cases import file_of, picture
from penstock_server.errors import ImageError
from penstock_server.vision.reader import ImageReader, _reason, decode
from PIL import Image

BOMB = png(30_000, 30_000, zlib.compress(bytes(1000)))
REFUSED = {
    "empty": (b"", "not an image file"),
    "text": (b"an image, believe me", "not an image file"),
    "svg": (
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "or of an unknown format; allowed: PNG, JPEG",
    ),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image file"),
    "truncated": (file_of(picture(1, 50, 50))[:2000], "damaged"),
    "bomb": (BOMB, "has 30000 × 30000 pixels, at most 67108864 are allowed"),
    "no pixels": (png(0, 10, zlib.compress(b"")), "not an image file|damaged"),
    "huge side": (png((1 << 31) - 1, 1, zlib.compress(b"")), "at most 67108864 are allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_image_is_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(ImageError, match=message):
        decode(data)


def test_every_damaged_file_is_an_error_or_an_image() -> None:
    """Files of all kinds with bytes changed, and cut off at any place."""
    draw = random.Random(7)
    for kind in KINDS:
        whole = file_of(picture(2, 33, 21), kind)
        for _ in range(60):
            data = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
            for _ in range(draw.randrange(1, 6)):
                if data:
                    data[draw.randrange(len(data))] = draw.randrange(256)
            with suppress(ImageError):
                assert decode(bytes(data)).mode == "RGB"


def test_an_image_is_upright_its_first_frame_and_rgb() -> None:
    image = picture(3, 20, 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90°
    assert decode(file_of(image, "PNG", exif=exif)).size == (10, 20)
    red, blue = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    animated = file_of(red, "GIF", save_all=True, append_images=[blue])
    assert np.array(decode(animated))[0, 0].tolist() == [255, 0, 0]
    for mode in ("L", "P", "RGBA", "CMYK", "1", "I;16"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        assert decode(file_of(Image.new(mode, (4, 4)), kind)).mode == "RGB"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageReader]:
    folder = tmp_path_factory.mktemp("processor")
    processor = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor.save_pretrained(folder)
    reader = ImageReader(folder, {"return_row_col_info": True})
    yield reader
    reader.close()


def test_the_pixel_values_are_those_of_transformers(reader: ImageReader) -> None:
    arrays = reader.read(file_of(picture(4, 50, 30)))
    processor = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    expected = processor(images=[picture(4, 50, 30)], return_tensors="np", return_row_col_info=True)
    assert set(arrays) == set(expected)
    for name, array in arrays.items():
        assert np.array_equal(array, expected[name])


def test_an_image_that_kills_the_process_is_refused_and_the_next_one_is_read(reader: ImageReader) -> None:
    good = file_of(picture(5, 40, 40))
    reader.read(good)
    process = reader._process
    with pytest.raises(ImageError, match="pixels, at most"):
        reader.read(BOMB)
    assert reader._process is process, "a refusal ends no process"
    assert process is not None
    process.kill()
    with pytest.raises(ImageError, match="cannot be read within"):
        reader.read(good)
    assert reader.read(good)["pixel_values"].size


def test_the_process_has_no_secrets_of_the_worker(reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.close()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("API_KEY", "secret")
    reader.read(file_of(picture(5, 40, 40)))
    assert reader._process is not None
    environment = Path(f"/proc/{reader._process.pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"secret" not in environment


@pytest.mark.parametrize("num_files", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_files_change_nothing_for_the_next_one(reader: ImageReader, num_files: int) -> None:
    draw, good = random.Random(num_files), file_of(picture(7, 40, 30))
    expected, num_refused, num_ended = reader.read(good)["pixel_values"], 0, 0
    for number in range(num_files):
        process = reader._process
        try:
            assert np.isfinite(reader.read(hostile_file(draw))["pixel_values"]).all()
        except ImageError:
            num_refused += 1
        num_ended += reader._process is not process
        if number % 20 == 0:
            assert np.array_equal(reader.read(good)["pixel_values"], expected)
    assert num_refused > num_files // 4
    assert num_ended <= num_files // 100, "a process ends for a file that breaks its limits only"
    print(f"{num_files} files, {num_refused} refused, {num_ended} processes ended")


def test_extreme_shapes_are_an_error_or_pixel_values(reader: ImageReader) -> None:
    reader.start()
    process = reader._process
    for width, height in ((1, 1), (1, 4000), (4000, 1), (2, 3)):
        with suppress(ImageError):
            assert np.isfinite(reader.read(file_of(picture(6, width, height)))["pixel_values"]).all()
    assert reader._process is process


def test_an_image_of_one_long_line_is_refused_with_a_reason(reader: ImageReader) -> None:
    """Every reason says something, also where the error that causes it has no text."""
    line = file_of(Image.new("L", (60_000_000, 1)), "PNG")
    with pytest.raises(ImageError) as refused:
        reader.read(line)
    assert "60000000 × 1 pixels" in str(refused.value)
    assert not str(refused.value).endswith(": ")


@pytest.mark.parametrize("error", [MemoryError(), ValueError(), ValueError("too narrow")])
def test_an_error_without_a_text_is_named_by_its_type(error: Exception) -> None:
    assert _reason(error) in ("MemoryError", "ValueError", "too narrow")
