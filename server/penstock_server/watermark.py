"""Green lists of a watermark, and its detector (Kirchenbauer et al. 2023, "A Watermark for Large Language Models").

The previous token seeds a green list, a share gamma of the vocabulary; sampling adds delta to the green logits. Text
without watermark has a share gamma of green tokens, text with one has more. The lists are TGI's own, so that each
server's text passes the other's detector. The detector is `python -m penstock_server.watermark`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock_server.errors import ConfigError

HASH_KEY = 15_485_863
DEFAULT_GAMMA = 0.5
DEFAULT_DELTA = 2.0
DEFAULT_THRESHOLD = 4.0  # one text in 30,000 without watermark is above it
_CACHE_BYTES = 8 << 20
Ids = npt.NDArray[np.int64]


class GreenLists:
    """The green list of each previous token: the first share gamma of a permutation of the vocabulary.

    COMPAT: TGI draws the permutation with torch's CPU generator, seeded with HASH_KEY × the previous token's id.
    """

    def __init__(self, vocab_size: int, gamma: float = DEFAULT_GAMMA) -> None:
        if not 0 < gamma < 1:
            raise ConfigError(f"watermark gamma is {gamma}, must be in (0, 1)")
        self.vocab_size = vocab_size
        self.gamma = gamma
        self.num_green = int(vocab_size * gamma)
        self._generator = torch.Generator()
        # PERF: a permutation of 49,152 takes 0.2 ms (EPYC), so the last used lists are kept, one bit a token.
        # All of the memory is touched here, so that none is missing after the warm-up.
        width = -(-vocab_size // 8)
        self._kept = np.full((min(vocab_size, max(1, _CACHE_BYTES // width)), width), 0, np.uint8)
        self._place_of: OrderedDict[int, int] = OrderedDict()  # by previous id, the least recently used first

    def bits(self, previous_ids: Ids) -> npt.NDArray[np.uint8]:
        """[previous, vocab / 8]: bit b of byte i is set where token 8·i + b is green."""
        return np.stack([self._bits(previous_id) for previous_id in previous_ids.tolist()])

    def are_green(self, previous_ids: Ids, ids: Ids) -> npt.NDArray[np.bool_]:
        """Whether each token is green after its previous token."""
        octets = self.bits(previous_ids)[np.arange(len(ids)), ids // 8]
        green: npt.NDArray[np.bool_] = (octets >> (ids % 8).astype(np.uint8)) & 1 == 1
        return green

    def forget(self) -> npt.NDArray[np.uint8]:
        """Drop the kept lists. Returns their memory, whose contents are no longer needed."""
        self._place_of.clear()
        return self._kept

    def _bits(self, previous_id: int) -> npt.NDArray[np.uint8]:
        place = self._place_of.pop(previous_id, None)
        if place is None:
            place = len(self._place_of)
            if place == len(self._kept):
                _, place = self._place_of.popitem(last=False)
            permutation = torch.randperm(self.vocab_size, generator=self._generator.manual_seed(HASH_KEY * previous_id))
            is_green = np.zeros(self.vocab_size, np.bool_)
            is_green[permutation[: self.num_green].numpy()] = True
            self._kept[place] = np.packbits(is_green, bitorder="little")
        self._place_of[previous_id] = place
        bits: npt.NDArray[np.uint8] = self._kept[place].copy()
        return bits


@dataclass(frozen=True, slots=True)
class Detection:
    """The evidence that a text carries a watermark."""

    num_scored: int  # distinct pairs of neighbouring tokens
    green_fraction: float
    z_score: float  # standard deviations above the expectation without watermark
    p_value: float  # probability of this many green tokens without watermark


def detect(token_ids: Sequence[int], lists: GreenLists) -> Detection:
    """Raises ConfigError for ids outside of the vocabulary, and for fewer than two tokens."""
    ids = np.array(token_ids, np.int64)
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, at least 2 are needed")
    if ids.min() < 0 or ids.max() >= lists.vocab_size:
        raise ConfigError(f"token id {ids.max()} is outside of the vocabulary of {lists.vocab_size}")
    # Each pair counts once: otherwise any repetitive text could look marked.
    pairs = np.unique(np.stack([ids[:-1], ids[1:]]), axis=1)
    num = pairs.shape[1]
    num_green = int(lists.are_green(pairs[0], pairs[1]).sum())
    z_score = (num_green - lists.gamma * num) / math.sqrt(num * lists.gamma * (1 - lists.gamma))
    return Detection(num, num_green / num, z_score, 0.5 * math.erfc(z_score / math.sqrt(2)))


def read_vocab_size(folder: Path) -> int:
    """`vocab_size` of a model folder's config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{path} has no vocab_size")
    return size


def read_ids(text: str) -> list[int]:
    """Ids from JSON ([1, 2], or /tokenize's response [{"id": 1, …}, …]), or separated by blanks and commas."""
    try:
        if not text.lstrip().startswith("["):
            return [int(word) for word in text.replace(",", " ").split()]
        return [int(entry["id"] if isinstance(entry, dict) else entry) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"these are not token ids: {error}") from error


def tokenize(text: str, folder: Path) -> list[int]:
    """Token ids by the model folder's tokenizer.json; needs the package `tokenizers`, which serving does not."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "reading text needs the package tokenizers (pip install tokenizers); or give --ids the response of the "
            "server's /tokenize"
        ) from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"there is no {path}; give --ids the response of the server's /tokenize")
    encoding: Any = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False)
    return list(encoding.ids)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock_server.watermark",
        description="Tell whether a text was generated with a watermark by a Penstock server of the same model.",
        epilog="Exit status: 0 watermarked, 1 not watermarked, 2 unknown (text too short or unreadable).",
    )
    parser.add_argument(
        "model", type=Path, help="model folder: config.json for the vocabulary, tokenizer.json for text"
    )
    parser.add_argument("file", nargs="?", type=Path, help="the text; default: standard input")
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
