"""Loads a model in a separate process and prints the peak of its memory as a multiple of the model's weights.

Arguments: the folder of a small model, loaded first so that all code is imported, and the folder of the model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from penstock_server.engine.device import choose_dtype
from penstock_server.engine.memory import MemoryMeter
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from tested_isa import use_tested_isa


def main() -> None:
    use_tested_isa()
    torch.set_num_threads(2)
    device = torch.device("cpu")
    torch.ones(1 << 20).sum()  # starts torch's threads
    load_model(LoadOptions(Path(sys.argv[1]), choose_dtype("", device), device, 16), RankGroup())
    meter = MemoryMeter(device)
    model = load_model(LoadOptions(Path(sys.argv[2]), choose_dtype("", device), device, 16), RankGroup())
    print(meter.measure().transient / model.weight_bytes)


if __name__ == "__main__":
    main()
