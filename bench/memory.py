"""The parts of a server's memory that count, from the rows of `process.memory_of`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

ROUTER, RENDERER = "penstock", "chat-renderer"  # names of processes; all others run Python
WORKER = "worker-"  # prefix of workers' names; the fork server has no name of its own

Rows = list[dict[str, Any]]


def beyond_torch(result: dict[str, Any], when: str) -> float:
    """Bytes of all processes beyond one that has only imported torch, and beyond the whole KV cache."""
    resident = sum(process["pss_bytes"] for process in result["memory"][when])
    return float(resident - result["torch_pss_bytes"] - result["kv_bytes"])


def parts(result: dict[str, Any], when: str) -> Iterator[tuple[str, float]]:
    """The parts of `beyond_torch`, with their bytes. Nothing of a result that does not tell them apart."""
    rows: Rows = result["memory"][when]
    if "torch" not in result:
        return
    yield "the router", _sum(rows, "pss_bytes", [ROUTER])
    yield "the renderer of chats", _sum(rows, "pss_bytes", [RENDERER])
    python = [row for row in rows if row["name"] not in (ROUTER, RENDERER)]
    anonymous = sum(row["pss_bytes"] - row["pss_file_bytes"] for row in python)
    anonymous -= result["torch"]["pss_bytes"] - result["torch"]["pss_file_bytes"]
    yield "packed weights", result["weight_bytes"]
    heaps = anonymous - result["kv_bytes"] - result["weight_bytes"]
    if "anonymous_bytes" in result["torch"]:
        fork_server = [row["name"] for row in python if not row["name"].startswith(WORKER)]
        known = result["torch"]["anonymous_bytes"] + result["weight_bytes"]
        held = _sum(python, "anonymous_bytes", fork_server) - known
        copied = _sum(python, "private_bytes", fork_server)
        yield "what the fork server imports, and objects of the model", held
        yield "pages of the fork server that all workers have copied", copied
        yield "other pages of workers", heaps - held - copied
    else:  # an older result tells only the sum
        yield "heaps of workers and fork server", heaps
    yield "files of workers and fork server", _sum(python, "pss_file_bytes") - result["torch"]["pss_file_bytes"]


def columns(rows: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """The values of each key in all rows."""
    table: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            table.setdefault(key, []).append(value)
    return table


def _sum(rows: Rows, key: str, names: list[str] | None = None) -> float:
    return float(sum(row[key] for row in rows if names is None or row["name"] in names))
