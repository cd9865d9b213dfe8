"""One rank's worker process.

It exits 0 on SIGTERM at once, also in the middle of a step: the router repeats lost steps. It ignores SIGINT, which the
launcher handles. It does not outlive its parent.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from penstock_server.engine.load import LoadModel, Preloaded
from penstock_server.errors import ConfigError
from penstock_server.process.service import Worker, remove_socket, start_server
from penstock_server.protocol.config import WorkerConfig
from penstock_server.protocol.message import parse_load_config

_PARENT_CHECK_S = 1.0  # for kernels that do not kill it when its parent dies
_LAST_REPLIES_S = 1.0  # for replies that are on their way when the worker fails


def preload(message: bytes) -> LoadModel | None:
    """Load the model of a LoadRequest for all workers that are forked from this process. None: each loads it itself."""
    config = parse_load_config(message)
    preloaded = None if config is None else Preloaded.of(config)
    return None if preloaded is None else preloaded.load_model


def run(config: WorkerConfig, load_model: LoadModel | None = None) -> int:
    """Serve until SIGTERM, the parent's death or a fault. Returns the exit status. load_model: as `preload` returns."""
    parent = os.getppid()

    def terminate(signum: int, frame: FrameType | None) -> None:
        # Not sys.exit: that would wait for the compute thread's step and for torch's teardown, in which threads of
        # torch.distributed can abort the process (see `RankGroup.leave`).
        remove_socket(config.endpoint)
        os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = Worker(config, load_model)
        server = start_server(worker, config.endpoint)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    while not worker.faulted.wait(_PARENT_CHECK_S):
        if os.getppid() != parent:
            terminate(signal.SIGTERM, None)
    server.stop(_LAST_REPLIES_S)
    remove_socket(config.endpoint)
    return 1
