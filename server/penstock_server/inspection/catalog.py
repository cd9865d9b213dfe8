"""`python -m penstock_server.inspection.catalog` lists what can be served, from the tables that loading uses.
`penstock models` runs it."""

from __future__ import annotations

import argparse
import json
import sys

from penstock_server.engine.device import DTYPES
from penstock_server.models.registry import ARCHITECTURES, ENCODERS
from penstock_server.weights.folder import SUFFIXES
from penstock_server.weights.gguf.config import BUILDERS
from penstock_server.weights.safetensors_file import LOADABLE


def catalog() -> dict[str, list[str]]:
    """Architectures by `model_type`, GGUF architectures, file formats, and data types."""
    return {
        "architectures": sorted(ARCHITECTURES),
        "encoders": sorted(ENCODERS),
        "gguf_architectures": sorted(BUILDERS),
        "formats": [
            f"{kind} ({', '.join('*' + suffix for suffix in suffixes)})" for kind, suffixes in SUFFIXES.items()
        ],
        "stored_dtypes": list(LOADABLE),
        "dtypes": list(DTYPES),
    }


TITLES = {
    "architectures": "Architectures (model_type in config.json)",
    "encoders": "Encoders that make embeddings or scores",
    "gguf_architectures": "Architectures in GGUF files",
    "formats": "Weight formats, in order of preference",
    "stored_dtypes": "Data types of weights in safetensors and pickles",
    "dtypes": "Data types of the computation (--dtype)",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock models", description="List the models, formats and data types that can be served."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = catalog()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(
            "\n\n".join(
                "\n".join([f"{TITLES[key]}:", *(f"  {name}" for name in names)]) for key, names in found.items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
