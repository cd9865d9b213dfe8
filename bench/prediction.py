"""A prediction's raw result: devices' limits, costs of kernels, and their tables. No torch, so that the pages can be
written without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from table import markdown


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU's limits by its maker's data sheet; products of bf16 matrices without sparsity."""

    bytes_per_s: float
    bf16_flop_per_s: float
    source: str


DEVICES = {
    "H200": Device(4.8e12, 989e12, "NVIDIA H200 data sheet: SXM, 141 GB of HBM3e"),
    "H100": Device(3.35e12, 989e12, "NVIDIA H100 data sheet: SXM, 80 GB of HBM3"),
    "A100": Device(2.039e12, 312e12, "NVIDIA A100 data sheet: SXM, 80 GB of HBM2e"),
}


@dataclass(slots=True)
class Cost:
    """The cost of all launches of one kernel: memory traffic, and the least time on each device."""

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    floor_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DEVICES, 0.0))

    def add(self, num_bytes: float, flops: float) -> None:
        self.launches += 1
        self.bytes += num_bytes
        self.flops += flops
        for name, device in DEVICES.items():
            self.floor_s[name] += max(num_bytes / device.bytes_per_s, flops / device.bf16_flop_per_s)


def decode_name(num_streams: int) -> str:
    return f"decode, {num_streams} streams"


def prompt_name(num_tokens: int) -> str:
    return f"prompt, {num_tokens:,} tokens"


def floor_s(load: Mapping[str, Any], bytes_per_s: float, flop_per_s: float) -> float:
    """The time that a load takes at least by these limits, which may have been measured."""
    costs = load["kernels"].values()
    return sum(max(cost["bytes"] / bytes_per_s, cost["flops"] / flop_per_s) for cost in costs)


def total(load: Mapping[str, Any]) -> dict[str, Any]:
    """The sums over a load's kernels."""
    costs = load["kernels"].values()
    found = {key: sum(cost[key] for cost in costs) for key in ("launches", "bytes", "flops")}
    return {**found, "floor_s": {name: sum(cost["floor_s"][name] for cost in costs) for name in DEVICES}}


def step_table(record: Mapping[str, Any]) -> str:
    """What each load costs, and the time that no device goes below."""
    rows = []
    for model, loads in record["models"].items():
        for name, load in loads.items():
            sums = total(load)
            floors = [f"{1e3 * sums['floor_s'][device]:,.2f}" for device in DEVICES]
            rate = load["tokens"] / sums["floor_s"]["H200"]
            cells = [f"{sums['bytes'] / 1e9:,.1f}", f"{sums['flops'] / 1e12:,.2f}"]
            rows.append([model, name, f"{sums['launches'] / load['steps']:,.0f}", *cells, *floors, f"{rate:,.0f}"])
    header = ["model", "load", "launches a step", "GB", "TFLOP"]
    return markdown([*header, *(f"{name}: ms" for name in DEVICES), "H200: tokens/s, at most"], rows)


def kernel_table(loads: Mapping[str, Any]) -> str:
    """What each kernel of each load costs, the most expensive first; those below a microsecond together."""
    rows = []
    for name, load in loads.items():
        kernels = sorted(load["kernels"].items(), key=lambda item: -item[1]["floor_s"]["H200"])
        large = [(f"`{kernel}`", cost) for kernel, cost in kernels if cost["floor_s"]["H200"] >= 1e-6]
        small = total({"kernels": dict(kernels[len(large) :])})
        for kernel, cost in (*large, ("others", small)):
            floors = [f"{1e6 * cost['floor_s'][device]:,.0f}" for device in DEVICES]
            cells = [f"{cost['launches']:,}", f"{cost['bytes'] / 1e6:,.1f}", f"{cost['flops'] / 1e9:,.1f}"]
            rows.append([name, kernel, *cells, *floors])
    return markdown(["load", "kernel", "launches", "MB", "GFLOP", *(f"{name}: µs" for name in DEVICES)], rows)


def sources() -> str:
    """The devices' limits and where they come from."""
    rows = [
        [name, f"{device.bytes_per_s / 1e12:g} TB/s", f"{device.bf16_flop_per_s / 1e12:g} TFLOP/s", device.source]
        for name, device in DEVICES.items()
    ]
    return markdown(["device", "memory", "bf16 products", "source"], rows)


def report(record: Mapping[str, Any]) -> str:
    parts = [f"Predictions, not measurements. {record['started']}, `{record['command']}`, {record['revision']}\n"]
    parts += [sources(), step_table(record)]
    for model, loads in record["models"].items():
        parts += [f"## {model}\n", kernel_table(loads)]
    return "\n".join(parts)
