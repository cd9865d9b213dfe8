"""The figures of traces and of the comparison by route."""

from __future__ import annotations

import pytest
from endpoints import report
from figure import endpoints, traces

MACHINE = {"vendor": "intel", "num_cores": 2}


def test_the_cost_of_traces_is_the_router_time_that_they_add_to_that_of_all_processes() -> None:
    off = {"tokens_per_s": 100.0, "num_tokens": 1000, "num_requests": 10, "router_s": 0.02, "all_s": 2.0}
    on = {**off, "tokens_per_s": 99.0, "router_s": 0.03, "spans_exported": 60}
    record = {"load": {"streams": 32}, "repeats": [{"off": off, "on": on}]}
    values = {figure.name: figure.values[0] for figure in traces(record)}
    assert values["throughput with traces, to without, 32 streams"] == pytest.approx(-1)
    assert values["router CPU per token that traces add"] == pytest.approx(10)
    assert values["the same, to the CPU time of all processes"] == pytest.approx(0.5)
    assert values["spans that the collector took, per request"] == 6


def test_a_route_that_a_server_lacks_is_in_the_report() -> None:
    def point(tokens_per_s: float) -> dict:
        return {"tokens_per_s": tokens_per_s, "ttft": {"p50": 5.0}, "num_failed": 0}

    record = {
        "started": "2026-11-23",
        "command": "bench/endpoints.py",
        "revision": "0",
        "machine": MACHINE,
        "load": {"concurrency": 8},
        "missing": {"chat": {}, "generate": {"llama.cpp": "/generate_stream answered 404"}},
        "repeats": [{"chat": {"penstock": point(30), "llama.cpp": point(20)}, "generate": {"penstock": point(31)}}],
    }
    values = {figure.name: figure.values[0] for figure in endpoints(record)}
    assert values["chat, 8 streams: throughput to llama.cpp"] == 1.5
    assert not any(name.startswith("generate, 8 streams, llama.cpp") for name in values)
    assert "| generate | llama.cpp | /generate_stream answered 404 |" in report(record)
