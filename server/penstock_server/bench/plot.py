"""The plot of servers over concurrency: throughput, latency, time to the first token, gaps. The same points give the
same bytes with the same matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock_server.bench.point import Percentiles, Point

STYLES = {"p50": "solid", "p90": "dashed", "p99": "dotted"}
# Text stays text: small files, and no outlines that depend on the machine's fonts. Ids are hashes of what they name.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
TIMES: tuple[tuple[str, Callable[[Point], Percentiles | None]], ...] = (
    ("Request duration (ms)", lambda point: point.latency),
    ("Time to first token (ms)", lambda point: point.ttft),
    ("Gap between tokens (ms)", lambda point: point.gap),
)


def svg(title: str, servers: Mapping[str, Sequence[Point]]) -> bytes:
    """The plot as an SVG file. servers: the points of each server by its name, in ascending order of concurrency."""
    file = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure(title, servers).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def figure(title: str, servers: Mapping[str, Sequence[Point]]) -> Figure:
    """One chart of throughput, and three of times with their percentiles. A server has one colour in all."""
    drawn = Figure(figsize=(9, 6.5), layout="constrained")
    drawn.suptitle(title)
    throughput, *times = drawn.subplots(2, 2).flat
    ticks = sorted({point.concurrency for points in servers.values() for point in points})
    for number, (name, points) in enumerate(servers.items()):
        colour = f"C{number}"
        streams = [point.concurrency for point in points]
        throughput.plot(streams, [point.tokens_per_s for point in points], color=colour, marker="o", label=name)
        for axes, (_, of_point) in zip(times, TIMES, strict=True):
            _draw_percentiles(axes, colour, [(p.concurrency, found) for p in points if (found := of_point(p))])
    for axes, label in zip([throughput, *times], ["Generated tokens/s", *(label for label, _ in TIMES)], strict=True):
        axes.set_title(label)
        axes.set_xlabel("concurrent streams")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    throughput.set_ylim(bottom=0)
    throughput.legend()
    for axes in times:
        axes.set_yscale("log")
    for name, style in STYLES.items():
        times[0].plot([], [], color="gray", linestyle=style, label=name)
    times[0].legend()
    return drawn


def _draw_percentiles(axes: Axes, colour: str, measured: Sequence[tuple[int, Percentiles]]) -> None:
    for name, style in STYLES.items():
        values = [getattr(percentiles, name) for _, percentiles in measured]
        axes.plot([streams for streams, _ in measured], values, color=colour, linestyle=style, marker=".")
