"""The watermark as a logits processor. `penstock_server.watermark` says which tokens are green."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock_server.errors import ConfigError
from penstock_server.watermark import DEFAULT_DELTA, DEFAULT_GAMMA, GreenLists


class Watermark:
    """The green lists of one model, and what is added to green logits."""

    @classmethod
    def of(cls, vocab_size: int, gamma: float = 0.0, delta: float = 0.0) -> Watermark:
        """0: the default. Raises ConfigError for a gamma or delta that is out of range."""
        delta = delta or DEFAULT_DELTA
        if not 0 < delta < float("inf"):
            raise ConfigError(f"watermark delta is {delta}, must be above 0 and finite")
        return cls(GreenLists(vocab_size, gamma or DEFAULT_GAMMA), delta)

    def __init__(self, lists: GreenLists, delta: float) -> None:
        self._lists = lists
        self._delta = delta

    def green(self, previous_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[rows, vocab]: 1 for the tokens that are green after the previous tokens [rows]."""
        return np.unpackbits(self._lists.bits(previous_ids), axis=1, count=self._lists.vocab_size, bitorder="little")

    def forget(self) -> Tensor:
        """Drop the lists that are kept. Returns their memory, whose contents are no longer needed."""
        return torch.from_numpy(self._lists.forget())

    def apply(self, scores: Tensor, places: Tensor, green: Tensor) -> None:
        """Add delta to the green logits in rows `places` of scores [rows, vocab], in place. green [places, vocab]: as
        of the method `green`, on the device."""
        scores[places] = scores[places].add_(green, alpha=self._delta)
