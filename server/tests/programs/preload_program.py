"""Loads a model as the fork server does, and forks workers that use it, one of them without it.

Argument: model folder. Prints for each worker whether it had the model, the tokens of a greedy answer, and the private
bytes that its load took; then the bytes of the weights.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

from penstock_server.process import fork_server
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from tested_isa import use_tested_isa

PROMPT = [504, 3575, 282, 4649, 314]
BLOCK_TOKENS = 16


def private_bytes() -> int:
    fields = re.findall(r"^Private_\w+: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, fields)) << 10


def serve(load_model: object, config: LoadConfig) -> None:
    from penstock_server.engine import Engine
    from penstock_server.protocol.plan import Advances, NewSequence, Plan

    before = private_bytes()
    given = {} if load_model is None else {"load_model": load_model}
    engine, description = Engine.load(config, **given)
    taken = private_bytes() - before
    engine.warm_up(WarmUpConfig(32, 2, 64, num_blocks=20, proven=True))
    new = NewSequence(1, PROMPT, len(PROMPT), block_ids=[0, 1])
    result = engine.step(Plan(1, new_sequences=[new], advances=Advances.of([1], [len(PROMPT)], [True])))
    ids = result.sampled.ids.tolist()
    for number in range(2, 12):
        ids += engine.step(Plan(number, advances=Advances.of([1], [1], [True]))).sampled.ids.tolist()
    print(load_model is not None, ",".join(map(str, ids)), taken, description.weight_bytes, flush=True)


def main(folder: Path) -> None:
    use_tested_isa()
    fork_server._import_all()
    import torch
    from penstock_server.engine.load import Preloaded

    config = LoadConfig(folder, BLOCK_TOKENS, device="cpu", num_threads=torch.get_num_threads())
    preloaded = Preloaded.of(config)
    assert preloaded is not None
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
    for load_model in (preloaded.load_model, preloaded.load_model, None):
        pid = os.fork()
        if pid == 0:
            serve(load_model, config)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
