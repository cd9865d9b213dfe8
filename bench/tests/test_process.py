"""What a family of processes uses."""

import os
import subprocess
import sys

from process import cpu_s_of, family_of, memory_of

BUSY_S = 0.3
USE = f"import time\nwhile time.process_time() < {BUSY_S}: pass\n"


def test_a_family_includes_grandchildren_and_the_time_of_children_that_have_ended() -> None:
    inner = f"{USE}\nprint('busy no more', flush=True); input()"
    outer = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {USE!r}], check=True)\n"
        f"subprocess.run([sys.executable, '-c', {inner!r}])"
    )
    command = [sys.executable, "-c", outer]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        family = family_of(process.pid)
        assert len(family) == len(memory_of(process.pid)) == 2
        assert cpu_s_of(process.pid) >= 2 * BUSY_S - 0.05  # the clock has ticks of some ms
        assert family.keys() < family_of(os.getpid()).keys()
        process.communicate(b"\n")
