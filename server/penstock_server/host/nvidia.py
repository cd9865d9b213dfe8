"""Location of NVIDIA's driver. Leaf: no torch, so that it can be asked before torch is imported."""

from __future__ import annotations

from pathlib import Path

DRIVER = Path("/dev/nvidiactl")  # exists if and only if the driver is loaded
