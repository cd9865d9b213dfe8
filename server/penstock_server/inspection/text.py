"""Inspects the tokenizer, chat template and EOS tokens of a model folder. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.folder import made_files
from penstock_server.tokenizer.slow import vocabulary_files

OTHER_FILES = ("vocab.json",)
TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates", "chat_template.json")


@dataclass(slots=True)
class TextFacts:
    """Fields are None or empty if the folder lacks the item or it could not be read."""

    tokenizer: str | None = None
    num_tokens: int | None = None
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """Defaults of requests that leave them out, except on TGI's routes."""


def inspect_text(folder: Path, problems: list[str], notes: list[str]) -> TextFacts:
    """Appends errors to `problems` and hints to `notes`."""
    facts = TextFacts()
    replaced, ids = _inspect_tokenizer(folder, facts, problems)
    config = replaced.get("tokenizer_config.json") or _read_object(folder / "tokenizer_config.json", problems)
    found = [name for name in TEMPLATE_FILES if (folder / name).exists()]
    found += ["tokenizer_config.json"] if config.get("chat_template") else []
    facts.chat_template = found[0] if found else None
    if not found:
        notes.append("no chat template: chat requests are refused unless --chat-template is given")
    for name in ("generation_config.json", "config.json"):
        given = _read_object(folder / name, problems if name == "generation_config.json" else []).get("eos_token_id")
        listed = given if isinstance(given, list) else [given]
        if given is not None and not facts.eos_token_ids:
            numbers = [id_ for id_ in listed if isinstance(id_, int | float)]
            facts.eos_token_ids = tuple(int(id_) for id_ in numbers if id_ == int(id_) and id_ >= 0)
    named = config.get("eos_token")
    named_id = ids.get(named.get("content") if isinstance(named, dict) else named)
    if named_id is not None and named_id not in facts.eos_token_ids:
        facts.eos_token_ids += (named_id,)
    if not facts.eos_token_ids and not named:
        notes.append("no EOS token is configured: generations end only at their length or a stop sequence")
    return facts


def _inspect_tokenizer(
    folder: Path, facts: TextFacts, problems: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[Any, int]]:
    """Returns the files that `prepare` makes, and the ids of the tokens."""
    path, slow = folder / "tokenizer.json", vocabulary_files(folder)
    if path.is_file() or slow:
        path = path if path.is_file() else slow[0]
        # The tokenizer that `prepare` would make.
        try:
            replaced = made_files(folder)
        except ConfigError as error:
            problems.append(str(error))
            return {}, {}
        tokenizer = replaced.get("tokenizer.json") or _read_object(path, problems)
    else:
        others = [name for name in OTHER_FILES if (folder / name).is_file()]
        hint = f"; it has {', '.join(others)}, which cannot be converted" if others else ""
        problems.append(f"{folder} has no tokenizer.json{hint}")
        return {}, {}
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        if tokenizer:
            problems.append(f"{path} is invalid: it has no model")
        return replaced, {}
    vocabulary = model.get("vocab") or ()
    added = tokenizer.get("added_tokens") or ()
    facts.tokenizer = str(model.get("type") or "BPE")
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: id_ for id_, entry in enumerate(vocabulary)}
    ids = {**dict(vocabulary), **{entry.get("content"): entry.get("id") for entry in added}}
    facts.num_tokens = len(ids)
    if not vocabulary:
        problems.append(f"{path} has no vocabulary, so it cannot encode text")
    return replaced, ids


def _refuse(constant: str) -> NoReturn:
    """The server's parser refuses NaN and infinities, which Python's would accept."""
    raise ValueError(f"{constant} is not a number of JSON")


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Reads a JSON object; empty when the file does not exist or is invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        problems.append(f"{path} is not valid JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path} is not a JSON object")
        return {}
    return value
