"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError


def check_vocabulary(drafting: Path, model: Path) -> None:
    """Raises ConfigError unless each token of the model has the same id in the draft model's tokenizer. Tokens that
    only the draft model has are harmless: they are never right."""
    expected = _tokens(model)
    found = _tokens(drafting)
    wrong = sorted(index for index, token in expected.items() if found.get(index) != token)
    if wrong:
        first = wrong[0]
        other = repr(found[first]) if first in found else "not in the vocabulary"
        raise ConfigError(
            f"--speculative-model {drafting} has another vocabulary: {len(wrong)} of the model's {len(expected)} "
            f"tokens differ; token {first} is {expected[first]!r} in the model and {other} in the drafting one"
        )


def _tokens(folder: Path) -> dict[int, str]:
    """The tokens of a folder's `tokenizer.json`, by id."""
    path = folder / "tokenizer.json"
    try:
        tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            tokens = {index: str(token) for index, (token, _) in enumerate(vocabulary)}
        else:
            tokens = {int(index): str(token) for token, index in vocabulary.items()}
        return tokens | {int(added["id"]): str(added["content"]) for added in tokenizer.get("added_tokens") or ()}
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no tokenizer.json, so its vocabulary cannot be compared") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
