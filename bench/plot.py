"""The plot of a comparison: each server's throughput and latencies over the number of streams, over all repeats."""

from __future__ import annotations

import statistics
from typing import Any

from penstock_server.bench.plot import svg
from penstock_server.bench.point import Percentiles, Point


def points(record: dict[str, Any]) -> dict[str, list[Point]]:
    """The points of each server that was measured. Throughput: median of the repeats. Percentiles: of all requests."""
    names = dict.fromkeys(name for repeat in record["repeats"] for name in repeat)
    loads = {name: [repeat[name]["loads"] for repeat in record["repeats"] if "loads" in repeat[name]] for name in names}
    return {
        name: [point(repeats, num_streams) for num_streams in record["load"]["streams"]]
        for name, repeats in loads.items()
        if repeats
    }


def point(repeats: list[dict[str, Any]], num_streams: int) -> Point:
    """One server at one number of streams. transformers, which runs without a server, has a throughput only."""
    results = [loads.get(f"{num_streams} streams") or loads[str(num_streams)] for loads in repeats]
    tokens_per_s = statistics.median(result["tokens_per_s"] for result in results)
    if "gaps_us" not in results[0]:
        return Point(num_streams, tokens_per_s, latency=None, ttft=None, gap=None, num_requests=0)
    requests = [request for result in results for request in zip(result["ttft_s"], result["gaps_us"], strict=True)]
    return Point(
        num_streams,
        tokens_per_s,
        latency=Percentiles.of([ttft_s * 1e3 + sum(gaps_us) / 1e3 for ttft_s, gaps_us in requests]),
        ttft=Percentiles.of([ttft_s * 1e3 for ttft_s, _ in requests]),
        gap=Percentiles.of([gap_us / 1e3 for _, gaps_us in requests for gap_us in gaps_us]),
        num_requests=len(requests),
    )


def comparison(record: dict[str, Any]) -> bytes:
    """The plot as an SVG file."""
    load = record["load"]
    return svg(f"{load['input_tokens']} tokens in, {load['output_tokens']} out", points(record))
