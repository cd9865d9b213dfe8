"""Which tokens a watermark favours, and whether a text carries one (Kirchenbauer et al. 2023, "A watermark for LLMs").

The token before seeds a green list, a share gamma of the vocabulary; sampling adds delta to the logits of the green. In
a text without watermark the share of green tokens is gamma, with one it is greater. Leaf: the engine and the detector
both read it, so no torch. The detector is `python -m penstock_server.watermark`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import ConfigError
from penstock_server.hash import GOLDEN, mix

HASH_KEY = np.uint64(15485863)
DEFAULT_GAMMA = 0.5
DEFAULT_DELTA = 2.0
DEFAULT_THRESHOLD = 4.0  # one text in 30,000 without watermark is above it
Ids = npt.NDArray[np.int64]


class GreenLists:
    """The green list behind each token id: those whose place, moved by (multiplier, offset), is below `num_green`.

    The places are one fixed shuffle of the vocabulary; x → (multiplier · x + offset) mod vocabulary is a bijection
    because the multiplier has no factor in common with the vocabulary's size, so every list has exactly `num_green`.
    """

    def __init__(self, vocab_size: int, gamma: float = DEFAULT_GAMMA) -> None:
        if not 0 < gamma < 1:
            raise ConfigError(f"watermark gamma is {gamma}, must be in (0, 1)")
        self.vocab_size = vocab_size
        self.gamma = gamma
        self.num_green = int(gamma * vocab_size)
        self.places = np.argsort(np.argsort(mix(np.arange(vocab_size, dtype=np.uint64) + GOLDEN)))  # [vocab]
        numbers = np.arange(1, vocab_size + 1)
        self._multipliers = numbers[np.gcd(numbers, vocab_size) == 1]

    def moves(self, previous_ids: Ids) -> tuple[Ids, Ids]:
        """(multipliers, offsets) of the lists behind some tokens."""
        seeds = mix(previous_ids.astype(np.uint64) * HASH_KEY + GOLDEN)
        multipliers = self._multipliers[(seeds % np.uint64(len(self._multipliers))).astype(np.int64)]
        offsets = (mix(seeds + GOLDEN) % np.uint64(self.vocab_size)).astype(np.int64)
        return multipliers, offsets

    def are_green(self, previous_ids: Ids, ids: Ids) -> npt.NDArray[np.bool_]:
        """Whether each token is on the list behind the token before it."""
        multipliers, offsets = self.moves(previous_ids)
        green: npt.NDArray[np.bool_] = (multipliers * self.places[ids] + offsets) % self.vocab_size < self.num_green
        return green


@dataclass(frozen=True, slots=True)
class Detection:
    """What the colours of a text's tokens say."""

    num_scored: int  # different pairs of neighbouring tokens
    green_fraction: float
    z_score: float  # standard deviations above what an unmarked text has
    p_value: float  # of an unmarked text to have as many green tokens


def detect(token_ids: Sequence[int], lists: GreenLists) -> Detection:
    """Raises ConfigError for ids outside of the vocabulary and for fewer than two tokens."""
    ids = np.array(token_ids, np.int64)
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, at least 2 are needed")
    if ids.min() < 0 or ids.max() >= lists.vocab_size:
        raise ConfigError(f"token id {ids.max()} is outside of the vocabulary of {lists.vocab_size}")
    # A repeated pair says nothing new: counted again and again it would make any repetitive text look marked.
    pairs = np.unique(np.stack([ids[:-1], ids[1:]]), axis=1)
    num = pairs.shape[1]
    num_green = int(lists.are_green(pairs[0], pairs[1]).sum())
    z_score = (num_green - lists.gamma * num) / math.sqrt(num * lists.gamma * (1 - lists.gamma))
    return Detection(num, num_green / num, z_score, 0.5 * math.erfc(z_score / math.sqrt(2)))


def read_vocab_size(folder: Path) -> int:
    """The number of logits that a model folder's config.json speaks of."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{path} does not say vocab_size")
    return size


def read_ids(text: str) -> list[int]:
    """Ids from JSON ([1, 2] or what /tokenize answers, [{"id": 1, …}, …]) or separated by blanks and commas."""
    try:
        if not text.lstrip().startswith("["):
            return [int(word) for word in text.replace(",", " ").split()]
        return [int(entry["id"] if isinstance(entry, dict) else entry) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"these are not token ids: {error}") from error


def tokenize(text: str, folder: Path) -> list[int]:
    """By the model folder's tokenizer.json; needs the package `tokenizers`, which serving does not."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "reading text needs the package tokenizers (pip install tokenizers); or give --ids what the server's "
            "/tokenize answers"
        ) from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"there is no {path}; give --ids what the server's /tokenize answers")
    encoding: Any = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False)
    return list(encoding.ids)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock_server.watermark",
        description="Tell whether a text was generated with a watermark by a Penstock server of the same model.",
        epilog="Exit status: 0 watermarked, 1 not, 2 it cannot be told (too short, unreadable).",
    )
    parser.add_argument(
        "model", type=Path, help="model folder: config.json for the vocabulary, tokenizer.json for text"
    )
    parser.add_argument("file", nargs="?", type=Path, help="what to examine; standard input when it is not given")
    parser.add_argument("--ids", action="store_true", help="the input is token ids (numbers, or JSON from /tokenize)")
    parser.add_argument(
        "--gamma", type=float, default=DEFAULT_GAMMA, help="the server's watermark gamma (default: %(default)s)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=DEFAULT_THRESHOLD,
        help="z-score above which a text counts as watermarked (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if options.file is None else options.file.read_text()
        ids = read_ids(text) if options.ids else tokenize(text, options.model)
        found = detect(ids, GreenLists(read_vocab_size(options.model), options.gamma))
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_marked = found.z_score > options.threshold
    print(f"scored pairs    {found.num_scored}")
    print(f"green fraction  {found.green_fraction:.3f} (without watermark: {options.gamma:.3f})")
    print(f"z-score         {found.z_score:.2f} (threshold: {options.threshold:g})")
    print(f"p-value         {found.p_value:.3g}")
    print(f"verdict         {'watermarked' if is_marked else 'no watermark found'}")
    return 0 if is_marked else 1


if __name__ == "__main__":
    raise SystemExit(main())
