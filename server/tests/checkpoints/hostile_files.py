"""Generates image files that are broken, or not what they seem."""

from __future__ import annotations

import random
import struct
import zlib

from image_cases import file_of, picture
from PIL import Image

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
TEXT_TAGS = (0x010E, 0x0131, 0x013B, 0x8298, 0xFDE8)  # tags of EXIF: Pillow writes no text under tags that have numbers


def png(width: int, height: int, data: bytes) -> bytes:
    """A PNG of these dimensions with any compressed data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def hostile_file(draw: random.Random) -> bytes:
    """One of many kinds of files that are broken, or not what they seem."""

    def broken(data: bytes) -> bytes:
        changed = bytearray(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.4 else data)
        for _ in range(draw.randrange(8)):
            if changed:
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)

    def animated() -> bytes:
        width, height = draw.randrange(1, 40), draw.randrange(1, 40)
        frames = [picture(draw.randrange(99), width, height) for _ in range(4)]
        return file_of(frames[0], draw.choice(["GIF", "PNG", "TIFF", "WEBP"]), save_all=True, append_images=frames[1:])

    def with_exif() -> bytes:
        exif = Image.Exif()
        exif[0x0112] = draw.choice([0, 1, 3, 6, 8, 9, 65535])
        exif[draw.choice(TEXT_TAGS)] = "x" * draw.randrange(2000)
        return file_of(small(), draw.choice(["JPEG", "PNG", "WEBP"]), exif=exif)

    def small() -> Image.Image:
        return picture(draw.randrange(99), draw.randrange(1, 60), draw.randrange(1, 60))

    def whole() -> bytes:
        image = small().convert(draw.choice(["RGB", "L"]))
        return file_of(image, draw.choice(KINDS))

    def narrow() -> bytes:
        sides = [1, draw.randrange(1, 6000)]
        draw.shuffle(sides)
        return file_of(picture(1, *sides), draw.choice(["PNG", "BMP"]))

    def bomb() -> bytes:
        side = draw.choice([2, 8000, 30_000, 1 << 30, (1 << 32) - 1])
        return png(side, draw.choice([0, 1, side]), zlib.compress(bytes(draw.choice([0, 1000, 1 << 20]))))

    def junk() -> bytes:
        magic = draw.choice(
            [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF....WEBP", b"BM", b"II*\0", b"<svg", b"%PDF"]
        )
        return magic + draw.randbytes(draw.randrange(400))

    kinds = [whole, animated, with_exif, narrow, bomb, junk, lambda: broken(whole()), lambda: broken(animated())]
    return draw.choice([*kinds, lambda: broken(with_exif()), lambda: broken(bomb())])()
