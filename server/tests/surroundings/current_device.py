"""Stands in for the current GPU of each thread."""

from __future__ import annotations

import threading

import pytest
import torch


class CurrentDevice(threading.local):
    """The GPU that `torch.cuda.set_device` made the current one of this thread."""

    device = torch.device("cuda", 0)

    def use(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def patched(cls, patch: pytest.MonkeyPatch) -> CurrentDevice:
        """Replaces `torch.cuda.set_device`."""
        current = cls()
        patch.setattr(torch.cuda, "set_device", current.use)
        return current
