"""Decodes image files and makes their pixel values in a separate process, so that a hostile file cannot do harm.

The pixel values are those of the model's own image processor in transformers, or of one of ours (`processor`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import ImageError
from penstock_server.host.limited_process import Job, LimitedProcess, Limits, ProcessDiedError, serve

TIME_LIMIT_S = 20.0
MEMORY_BYTES = 2 << 30
_STACK_BYTES = 8 << 20
MAX_PIXELS = 1 << 26
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_BROKEN = (
    f"cannot be read within {TIME_LIMIT_S:g} s of CPU time and {MEMORY_BYTES >> 30} GiB of memory; send a smaller one"
)

Arrays = Mapping[str, npt.NDArray[Any]]


class ImageReader(LimitedProcess):
    """The process of one model. Not thread-safe."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        """options: arguments of the image processor."""
        import json

        super().__init__(__name__, [str(folder), json.dumps(dict(options))])

    def read(self, data: bytes) -> Arrays:
        """What the image processor makes of a file. Raises ImageError with what is wrong with the image."""
        from safetensors.numpy import load

        try:
            answer, arrays = self.ask({}, data)
        except ProcessDiedError:
            raise ImageError(_BROKEN) from None
        if answer["error"]:
            raise ImageError(answer["error"])
        return load(arrays)


def decode(data: bytes) -> Any:
    """A file's first frame, upright, as an RGB image of Pillow. Raises ImageError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"has {width} × {height} pixels, at most {MAX_PIXELS} are allowed; send a smaller one")
            # As transformers loads images.
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise ImageError(f"is not an image file, or of an unknown format; allowed: {', '.join(FORMATS)}") from None
    except ImageError:
        raise
    except MemoryError:
        raise ImageError(_BROKEN) from None
    except Exception as error:
        raise ImageError(f"is damaged: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What an error says, or its type if it says nothing."""
    return str(error) or type(error).__name__


def main(folder: str, options: str) -> None:
    """The process."""

    def prepare() -> Callable[[dict[str, Any], bytes], Job]:
        import json

        from safetensors.numpy import save

        from penstock_server.vision.processor import own_processor

        processor: Any = own_processor(Path(folder))
        # PERF: transformers would import it, which takes seconds and most of the memory, but pixel values need it not.
        sys.modules["torch"] = None  # type: ignore[assignment]
        if processor is None:
            from transformers import AutoImageProcessor

            processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        arguments = json.loads(options)

        def read(_: dict[str, Any], data: bytes) -> Job:
            size = ""
            try:
                image = decode(data)
                size = f"{image.width} × {image.height}"
                made = processor(images=[image], return_tensors="np", **arguments)
                arrays = {name: np.ascontiguousarray(value) for name, value in made.items()}
            except ImageError as refusal:
                return {"error": str(refusal)}, b""
            except MemoryError:
                return {"error": f"has {size} pixels, which take too much memory to process; send a smaller one"}, b""
            except Exception as error:  # noqa: BLE001 - processors raise errors of many kinds for unusual sizes
                return {"error": f"of {size} pixels cannot be processed: {_reason(error)}"}, b""
            return {"error": ""}, save(arrays)

        return read

    serve(Limits(TIME_LIMIT_S, MEMORY_BYTES, _STACK_BYTES), prepare)


if __name__ == "__main__":
    main(*sys.argv[1:])
