"""The environment of programs that tests start: they find the modules that the test finds, wherever those are. Ranks
meet on one host."""

from __future__ import annotations

import os
import sys


def program_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
