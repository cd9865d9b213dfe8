"""The parts of a server's memory that count, and installations that are refused."""

from pathlib import Path
from typing import Any

import pytest
import start
from figure import BENCHMARKS
from memory import parts

FILE_BYTES = 100


def result(ready_s: float, worker_bytes: int) -> dict[str, Any]:
    cost = {"wall_s": 1.0, "cpu_s": 1.0}
    memory = [{"pss_bytes": 30}, {"pss_bytes": worker_bytes}]
    return {
        "ready_s": ready_s,
        "ready_cpu_s": 2 * ready_s,
        "programs": dict.fromkeys(start.PROGRAMS, cost),
        "torch_pss_bytes": 200,
        "kv_bytes": 1000,
        "memory": {"without a standby group": memory, "with the standby group": [*memory, {"pss_bytes": 80}]},
        "tokens_per_s": {"at ready": 60.0, "later": 80.0},
    }


def test_figures_of_an_installation_and_against_another() -> None:
    record = {
        "model": {"file_bytes": FILE_BYTES},
        "servers": {"penstock": {}, "before": {}},
        "repeats": [
            {"penstock": result(4.0, 1280), "before": result(8.0, 1280)},
            {"before": result(10.0, 1280), "penstock": result(4.0, 1290)},
            {"penstock": {"error": "did not become healthy"}, "before": result(9.0, 1280)},
        ],
    }
    values = {figure.name: figure.values for figure in BENCHMARKS["start"](record)}
    assert values["penstock: memory beyond torch and the KV cache, to the file, without a standby group"] == [1.1, 1.2]
    assert values["penstock: memory beyond torch and the KV cache, to the file, with the standby group"] == [1.9, 2.0]
    assert values["penstock: speed of a stream while the standby group loads, to later"] == [0.75, 0.75]
    assert values["before: start to ready"] == [8.0, 10.0, 9.0]
    assert values["start to ready, to before"] == [0.5, 0.4]


def test_the_parts_of_a_servers_memory_are_all_of_it() -> None:
    mib = 1 << 20
    processes = [("penstock", 30, 12), ("chat-renderer", 7, 6), ("python", 400, 150), ("worker-0.0", 1300, 60)]
    rows = [{"name": name, "pss_bytes": pss * mib, "pss_file_bytes": file * mib} for name, pss, file in processes]
    one = {
        **result(4.0, 0),
        "torch": {"pss_bytes": 500 * mib, "pss_file_bytes": 200 * mib},
        "torch_pss_bytes": 500 * mib,
        "kv_bytes": 1000 * mib,
        "weight_bytes": 90 * mib,
        "memory": dict.fromkeys(("without a standby group", "with the standby group"), rows),
    }
    record = {"model": {"file_bytes": FILE_BYTES}, "servers": {"penstock": {}}, "repeats": [{"penstock": one}]}
    found = {figure.name: figure.values for figure in BENCHMARKS["start"](record)}
    sizes = [
        values[0] for name, values in found.items() if "of it" in name and name.endswith("without a standby group")
    ]
    assert sizes == [30, 7, 90, 100, 10]
    assert sum(sizes) == sum(pss for _, pss, _ in processes) - 500 - 1000


def test_the_heaps_are_what_was_imported_what_was_copied_and_what_workers_added() -> None:
    sizes = {"rss_bytes": 0, "pss_file_bytes": 0}
    rows = [
        {**sizes, "name": "python3", "pss_bytes": 250, "anonymous_bytes": 480, "private_bytes": 20},
        {**sizes, "name": "worker-0.0", "pss_bytes": 1290, "anonymous_bytes": 1520, "private_bytes": 1060},
    ]
    one = {
        "memory": {"idle": rows},
        "torch": {"pss_bytes": 300, "pss_file_bytes": 0, "anonymous_bytes": 300},
        "kv_bytes": 1000,
        "weight_bytes": 100,
    }
    found = dict(parts(one, "idle"))
    assert found["what the fork server imports, and objects of the model"] == 80
    assert found["pages of the fork server that all workers have copied"] == 20
    assert found["other pages of workers"] == 40
    assert sum(found.values()) == 1540 - 300 - 1000


@pytest.mark.parametrize("text", ["/usr/bin/penstock", "penstock=/bin/sh", "before=/nowhere/penstock"])
def test_another_installation_needs_a_name_a_binary_and_a_python(text: str) -> None:
    with pytest.raises(SystemExit, match="must be NAME=BINARY"):
        start.another(text)


def test_another_installation_finds_only_its_own_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    for name in ("penstock", "python"):
        (tmp_path / name).touch()
    found = start.another(f"before={tmp_path}/penstock")
    assert found.environment["PYTHONPATH"] == ""
    assert found.environment["PENSTOCK_PYTHON"] == found.python == str(tmp_path / "python")
    assert found.server.command(5) == [str(tmp_path / "penstock"), "--port", "5"]
