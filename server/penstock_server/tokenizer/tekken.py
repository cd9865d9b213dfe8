"""Converts Mistral's `tekken.json` to `tokenizer.json`: tiktoken ranks, a split pattern and special tokens.

Reference: https://github.com/mistralai/mistral-common, `tekken.py`. Ids start with the special tokens; ranks follow.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.byte_level import PreTokenizer, byte_level_json, split_by
from penstock_server.tokenizer.layout import AddedToken, tokenizer_json
from penstock_server.tokenizer.settings import read_object
from penstock_server.tokenizer.tiktoken import check_ranks, vocabulary_and_merges

TEKKEN_FILE = "tekken.json"
BOS = "<s>"
# The first files do not list their special tokens.
FIRST_SPECIAL = (
    *("<unk>", BOS, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def tekken_json(path: Path) -> dict[str, Any]:
    """Builds `tokenizer.json`. Raises ConfigError when the file is damaged."""
    values = read_object(path)
    try:
        config = values["config"]
        pattern, num_special = str(config["pattern"]), int(config["default_num_special_tokens"])
        num_ranks = int(config["default_vocab_size"]) - num_special
        named = _special(values)
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): rank
            for rank, entry in enumerate(values["vocab"][:num_ranks])
        }
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ConfigError(f"{path} is not a tekken vocabulary: {type(error).__name__} {error}") from error
    check_ranks(path, ranks)
    if len(named) > num_special:
        raise ConfigError(f"{path} is damaged: it lists {len(named)} special tokens but reserves {num_special} ids")
    special = [named.get(id_, f"<SPECIAL_{id_}>") for id_ in range(num_special)]
    if BOS not in special:
        raise ConfigError(f"{path} has no token {BOS}, which is required at the start of every text")
    vocabulary, merges = vocabulary_and_merges(ranks)
    ids = {text: id_ for id_, text in enumerate(special)}
    ids |= {text: num_special + rank for text, rank in vocabulary.items()}
    parts = byte_level_json(ids, merges, PreTokenizer(split_by(pattern), ignore_merges=True))
    added = [AddedToken(id_, text, special=True) for id_, text in enumerate(special)]
    return tokenizer_json(parts, added, [added[special.index(BOS)]])


def _special(values: dict[str, Any]) -> dict[int, str]:
    listed = values.get("special_tokens")
    if listed is None:
        return dict(enumerate(FIRST_SPECIAL))
    return {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
