"""Renders the raw record of a comparison: medians over the repeats, ratios to the peer and to the machine's limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from load import percentile

BASE = "llama.cpp"
LONG_PROMPT_TOKENS = 512
STEP_PARTS = (
    "overhead",
    "interval",
    "round_trip",
    "schedule",
    "apply",
    "worker_prepare",
    "worker_forward",
    "worker_sample",
    "worker_idle",
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with padded columns, readable as plain text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [header, *rows]
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def best_limits(record: dict[str, Any]) -> dict[str, Any]:
    """The larger of each limit that was measured before and after a run: a limit that was measured while something else
    ran is none."""
    before, after = record["limits"], record.get("limits_after", {})
    return {
        **before,
        **{
            kind: {name: max(value, after.get(kind, {}).get(name, 0.0)) for name, value in before[kind].items()}
            for kind in ("read_bytes_per_s", "product_flop_per_s")
        },
    }


def floors(limits: dict[str, Any], model: dict[str, int], load: dict[str, Any]) -> dict[str, float]:
    """The best possible figures: each step reads all weights once or computes its rows, whichever takes longer."""
    read: float = max(limits["read_bytes_per_s"].values())
    flops: float = limits["product_flop_per_s"]["bf16"]
    layers, head = model["layer_parameters"], model["head_parameters"]
    weights_s = (layers + head) * model["bytes_per_parameter"] / read

    def prefill_s(num_tokens: int) -> float:
        return max(weights_s, 2 * (layers * num_tokens + head) / flops)

    def decode_s(num_streams: int) -> float:
        return max(weights_s, 2 * (layers + head) * num_streams / flops)

    num_out, num_in = load["output_tokens"], load["input_tokens"]
    rates = {
        f"{n} streams": n * num_out / (n * prefill_s(num_in) + (num_out - 1) * decode_s(n)) for n in load["streams"]
    }
    return {**rates, "ttft 512": prefill_s(LONG_PROMPT_TOKENS), "decode": 1 / decode_s(1)}


def figures(result: dict[str, Any]) -> dict[str, float]:
    """The columns of the main table for one repeat of one server."""
    loads = result["loads"]
    if "ttft_512_s" in result:  # transformers, in process
        rates = {f"{n} streams": load["tokens_per_s"] for n, load in loads.items()}
        ttft, decode = result["ttft_512_s"], result["decode_tokens_per_s"]
    else:
        rates = {name: load["tokens_per_s"] for name, load in loads.items() if name.endswith("streams")}
        ttft, decode = loads["ttft 512"]["ttft_s"], loads["decode"]["decode_tokens_per_s"]
    return {**rates, "ttft 512": statistics.median(ttft), "decode": decode}


def medians(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per server, the median of each figure over the successful repeats."""
    names = dict.fromkeys(name for repeat in record["repeats"] for name in repeat)
    all_figures = {
        name: [figures(repeat[name]) for repeat in record["repeats"] if "loads" in repeat.get(name, {})]
        for name in names
    }
    return {
        name: {column: statistics.median(row[column] for row in rows) for column in rows[0]}
        for name, rows in all_figures.items()
        if rows
    }


def _cell(column: str, value: float) -> str:
    return f"{value * 1000:.0f} ms" if column.startswith("ttft") else f"{value:.0f}"


def _ratios(rows: dict[str, dict[str, float]], base: dict[str, float]) -> list[list[str]]:
    """Speed relative to `base`; above 1 is faster, also for times."""
    return [
        [name, *(f"{base[c] / v if c.startswith('ttft') else v / base[c]:.2f}" for c, v in row.items())]
        for name, row in rows.items()
    ]


def _latencies(record: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name in record["servers"]:
        results = [repeat[name] for repeat in record["repeats"] if "loads" in repeat[name]]
        for load in results[0]["loads"] if results else ():
            measured = [result["loads"][load] for result in results]
            ttft = [value * 1000 for part in measured for value in part["ttft_s"]]
            gaps = [gap / 1000 for part in measured for sample in part["gaps_us"] for gap in sample]
            shares = [f"{percentile(values, share):.1f}" for values in (ttft, gaps) for share in (0.5, 0.99)]
            client = statistics.median(part["client_cpu_share"] for part in measured)
            rows.append([name, load, *shares, str(sum(part["num_ended_early"] for part in measured)), f"{client:.1%}"])
    return rows


def _steps(record: dict[str, Any]) -> list[list[str]]:
    """Mean milliseconds of each part of a step, from the histograms' sums and counts over all repeats."""
    results = [repeat["penstock"] for repeat in record["repeats"] if "loads" in repeat.get("penstock", {})]
    rows = []
    for load in results[0]["loads"] if results else ():
        for method in ("prefill", "decode"):
            names = [f'penstock_step_{part}_seconds_%s{{method="{method}"}}' for part in STEP_PARTS]
            deltas = [result["loads"][load]["metrics"] for result in results]
            count = sum(delta.get(names[0] % "count", 0) for delta in deltas)
            if count:
                sums = [sum(delta.get(name % "sum", 0) for delta in deltas) for name in names]
                rows.append([load, method, f"{count:.0f}", *(f"{total / count * 1000:.2f}" for total in sums)])
    return rows


def _memory(record: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name in record["servers"]:
        results = [repeat[name] for repeat in record["repeats"] if "loads" in repeat[name]]
        for process in results[-1]["memory"] if results else ():
            sizes = [f"{process[key] / 1e6:.0f} MB" for key in ("rss_bytes", "pss_bytes")]
            rows.append([name, process["command"][:60], *sizes])
        pool_tokens = results[-1]["metrics"].get("tgi_batch_max_total_tokens") if results else None
        if pool_tokens:
            model = record["model"]
            weights = (model["layer_parameters"] + model["head_parameters"]) * model["bytes_per_parameter"]
            pool = pool_tokens * model["kv_bytes_per_token"]
            budget = record["torch_rss_bytes"] + 1.3 * weights + pool
            parts = f"a worker's budget: torch + 1.3 × {weights / 1e6:.0f} MB + KV {pool / 1e6:.0f} MB"
            rows.append([name, parts, f"{budget / 1e6:.0f} MB", ""])
    rows.append(["(torch)", "python, torch imported, idle", f"{record['torch_rss_bytes'] / 1e6:.0f} MB", ""])
    return rows


def report(record: dict[str, Any]) -> str:
    """The complete report."""
    limits, machine = record["limits"], record["limits"]["machine"]
    floor = floors(best_limits(record), record["model"], record["load"])
    rows = medians(record)
    columns = list(floor)
    header = ["server", *(f"{c} tok/s" if not c.startswith("ttft") else f"{c} tokens" for c in columns)]
    shown = {**rows, "limit of the machine": floor}
    read, product = limits["read_bytes_per_s"], limits["product_flop_per_s"]
    after = record["limits_after"]
    load = record["load"]
    parts = [
        f"# {record['model']['name']}, {load['input_tokens']} in / {load['output_tokens']} out, {record['started']}\n",
        f"{machine['cpu']}, {machine['num_cores']} cores, {' '.join(machine['features'])}; "
        f"revision {record['revision']}; `{record['command']}`\n",
        f"Limits: memory read {read['ordinary_pages'] / 1e9:.0f} GB/s ({read['huge_pages'] / 1e9:.0f} huge pages), "
        f"products bf16 {product['bf16'] / 1e9:.0f} and f32 {product['f32'] / 1e9:.0f} GFLOP/s; at the end of the run "
        f"{max(after['read_bytes_per_s'].values()) / 1e9:.0f} GB/s and {after['product_flop_per_s']['bf16'] / 1e9:.0f} "
        f"GFLOP/s bf16. Load average at the start {machine['load_average']:.1f}.\n",
        markdown(header, [[name, *(_cell(c, row[c]) for c in columns)] for name, row in shown.items()]),
    ]
    if BASE in rows:
        parts += [f"Speed relative to {BASE} (above 1 is faster):\n", markdown(header, _ratios(rows, rows[BASE]))]
    parts += ["Share of the machine's limit reached:\n", markdown(header, _ratios(rows, floor))]
    latency = ["server", "load", "TTFT p50 ms", "p99", "gap p50 ms", "p99", "ended early", "client CPU"]
    parts += ["Latencies:\n", markdown(latency, _latencies(record))]
    if steps := _steps(record):
        names = [part.replace("_", " ") for part in STEP_PARTS]
        parts += ["Penstock's steps, means in ms:\n", markdown(["load", "method", "steps", *names], steps)]
    parts += ["Memory after the loads:\n", markdown(["server", "process", "RSS", "PSS"], _memory(record))]
    return "\n".join(parts)
