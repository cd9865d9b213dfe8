"""`python -m penstock_server --socket PATH --rank R --world-size N`: one rank's worker process.

Exits 0 on SIGTERM at once, also in the middle of a step: what a step was doing is the router's to repeat. SIGINT is
left to the launcher. The process does not outlive its parent.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from penstock_server import log
from penstock_server.config import WorkerConfig
from penstock_server.errors import ConfigError

_PARENT_CHECK_S = 1.0
_LAST_WORDS_S = 1.0  # for replies that are on their way when the worker breaks


def parse(arguments: list[str]) -> WorkerConfig:
    """The process's own flags; everything else comes by Load."""
    parser = argparse.ArgumentParser(prog="python -m penstock_server", description="One rank's worker of Penstock.")
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--rank", type=int, default=0, help="this worker's place among the ranks (0)")
    parser.add_argument("--world-size", type=int, default=1, help="how many ranks hold the model (1)")
    parser.add_argument("--in-reserve", action="store_true", help="give way to the workers that serve while starting")
    flags = parser.parse_args(arguments)
    if not 0 <= flags.rank < flags.world_size:
        parser.error(f"--rank is {flags.rank}, must be in 0 … {flags.world_size - 1} (--world-size - 1)")
    return WorkerConfig(flags.socket, flags.rank, flags.world_size, flags.in_reserve)


def main() -> int:
    config = parse(sys.argv[1:])
    parent = os.getppid()
    log.configure()

    def terminate(signum: int, frame: FrameType | None) -> None:
        # Not sys.exit: that would wait for the compute thread's step and for torch's teardown.
        config.socket.unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from penstock_server.service import Worker, start_server

    try:
        worker = Worker(config)
        server = start_server(worker, config.socket)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    while not worker.faulted.wait(_PARENT_CHECK_S):
        if os.getppid() != parent:
            terminate(signal.SIGTERM, None)
    server.stop(_LAST_WORDS_S).wait()
    config.socket.unlink(missing_ok=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
