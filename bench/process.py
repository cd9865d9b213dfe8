"""What a process and all its descendants use, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from result import from_root


def family_of(root: int) -> dict[int, list[str]]:
    """The fields of /proc/PID/stat from the state on, of a process and all its descendants."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stats[int(folder.name)] = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    family, added = {root}, True
    while added:
        children = {pid for pid, fields in stats.items() if int(fields[1]) in family} - family
        family, added = family | children, bool(children)
    return {pid: stats[pid] for pid in sorted(family) if pid in stats}


def cpu_s_of(root: int) -> float:
    """Processor seconds of a process and all its descendants, including descendants that were reaped."""
    return sum(sum(map(int, fields[11:15])) for fields in family_of(root).values()) / os.sysconf("SC_CLK_TCK")


def clock_s_of(pid: int) -> float:
    """Processor seconds of one process, over all threads, to the nanosecond. /proc counts in hundredths of a second."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock's id is the kernel's ABI: clock_getcpuclockid(3)


def memory_of(root: int) -> list[dict[str, Any]]:
    """Memory of a process and of each descendant: resident and proportional bytes, the proportional bytes of files, and
    the anonymous resident bytes, with those among them that no other process shares."""
    rows = []
    for pid in family_of(root):
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in rollup}
            command = Path(f"/proc/{pid}/cmdline").read_text().strip("\0").split("\0")
            row: dict[str, Any] = {"name": Path(f"/proc/{pid}/comm").read_text().strip(), "command": from_root(command)}
            row |= {"rss_bytes": sizes["Rss"], "pss_bytes": sizes["Pss"]}
            row |= {"pss_file_bytes": sizes["Pss_File"] + sizes["Pss_Shmem"]}
            rows.append({**row, "anonymous_bytes": sizes["Anonymous"], "private_bytes": sizes["Private_Dirty"]})
    return rows
