"""Describes the Grafana board, and writes it to penstock.json when it runs (`make docs`).

A panel is a title, a description, a unit and queries; `SERIES` selects what the board's variables choose. The
layout, and what Grafana wants in every panel, are added once, below.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).with_name("penstock.json")
SCHEMA_VERSION = 39  # Grafana 11.0
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SERIES = 'job=~"$job", instance=~"$instance"'
NUM_COLUMNS, NUM_ROWS = 24, 8  # Grafana's grid, and the height of a panel in it


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. unit: one of Grafana's; "short" is a plain number. queries: (expression, legend)."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]


def rate(counter: str, by: str = "") -> str:
    """A counter's increase per second, summed over all instances, or for each value of a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{SERIES}}}[$__rate_interval]))"


def increase(counter: str, by: str) -> str:
    """A counter's increase for each value of a label."""
    return f"sum by ({by}) (increase({counter}{{{SERIES}}}[$__rate_interval]))"


def total(gauge: str) -> str:
    """A gauge, summed over all instances."""
    return f"sum({gauge}{{{SERIES}}})"


def percentiles(histogram: str, label: str = "") -> list[tuple[str, str]]:
    """The median, and the percentiles 90 and 99, of a histogram. label: one selector, such as `method="decode"`."""
    selector = f"{label}, {SERIES}" if label else SERIES
    buckets = f"sum by (le) (rate({histogram}_bucket{{{selector}}}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)]


def mean(histogram: str, by: str) -> str:
    """The mean of a histogram for each value of a label."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


STEP_PARTS = ("schedule", "worker_prepare", "worker_forward", "worker_sample", "apply", "worker_idle")

ROWS: dict[str, Sequence[Panel]] = {
    "Requests": [
        Panel(
            "Requests",
            "Requests received, answered in full, and failed by reason.",
            "reqps",
            [
                (rate("tgi_request_count"), "received"),
                (rate("tgi_request_success"), "answered"),
                (rate("tgi_request_failure", "err"), "failed: {{err}}"),
            ],
        ),
        Panel(
            "Tokens",
            "Tokens of accepted prompts, and tokens generated for requests that have ended.",
            "short",
            [
                (rate("tgi_request_input_length_sum"), "prompt tokens/s"),
                (rate("tgi_request_generated_tokens_sum"), "generated tokens/s"),
            ],
        ),
        Panel(
            "Refusals",
            "Requests that were answered 429, or 503 while draining, by the limit they met.",
            "reqps",
            [
                (rate("penstock_requests_refused", "reason"), "{{reason}}"),
                (rate("penstock_connections_refused"), "connections closed at once"),
                (rate("penstock_clients_given_up"), "clients that read nothing"),
            ],
        ),
        Panel(
            "Sequences",
            "Running sequences, and queued sequences that wait for their first step.",
            "short",
            [
                (total("tgi_batch_current_size"), "running"),
                (total("tgi_queue_size"), "queued"),
            ],
        ),
        Panel(
            "Queue tokens",
            "Prompt tokens and max_new_tokens of all queued sequences: see --max-queued-tokens.",
            "short",
            [
                (total("penstock_queue_tokens"), "queued tokens"),
                (total("tgi_batch_max_total_tokens"), "tokens that the KV cache holds"),
            ],
        ),
        Panel(
            "Time in the queue",
            "Time from the end of validation to the first step.",
            "s",
            percentiles("tgi_request_queue_duration"),
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "Time from a request's arrival to the first token of each of its generations.",
            "s",
            percentiles("penstock_time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token gaps",
            "Time between two tokens of a sequence, and the target of --max-inter-token-ms.",
            "s",
            [
                *percentiles("penstock_inter_token_seconds"),
                (f"max(penstock_inter_token_target_seconds{{{SERIES}}})", "target"),
            ],
        ),
        Panel(
            "Request duration",
            "Time from a request's arrival to its last token.",
            "s",
            percentiles("tgi_request_duration"),
        ),
    ],
    "KV cache": [
        Panel(
            "KV use",
            "Share of the blocks that running sequences hold; the rest can be allocated now.",
            "percentunit",
            [
                (f"1 - {total('penstock_kv_free_blocks')} / {total('penstock_kv_blocks')}", "held by sequences"),
                (f"{total('penstock_kv_cached_blocks')} / {total('penstock_kv_blocks')}", "in the prefix cache"),
            ],
        ),
        Panel(
            "Prefix-cache hit rate",
            "Share of the prompt tokens whose keys and values were in the cache.",
            "percentunit",
            [
                (f"{rate('penstock_prefix_hit_tokens')} / {rate('penstock_prefix_queried_tokens')}", "hits"),
            ],
        ),
        Panel(
            "Preemptions",
            "Running sequences that went back to the queue and are computed again.",
            "ops",
            [
                (rate("penstock_preemptions"), "preemptions"),
            ],
        ),
    ],
    "Steps": [
        Panel(
            "Time of a decode step",
            "Time that a step without prompt tokens adds to its sequences' wait.",
            "s",
            percentiles("penstock_step_interval_seconds", 'method="decode"'),
        ),
        Panel(
            "Time of a prefill step",
            "Time that a step with prompt tokens adds to its sequences' wait.",
            "s",
            percentiles("penstock_step_interval_seconds", 'method="prefill"'),
        ),
        Panel(
            "Parts of a step",
            "Mean time of each part over all steps. Parts of different steps overlap.",
            "s",
            [
                (
                    f"{rate(f'penstock_step_{part}_seconds_sum')} / {rate(f'penstock_step_{part}_seconds_count')}",
                    part.replace("_", " "),
                )
                for part in STEP_PARTS
            ],
        ),
        Panel(
            "Forecast error",
            "Mean difference between a step's duration and the scheduler's forecast.",
            "s",
            [
                (mean("penstock_step_forecast_error_seconds", "method"), "{{method}}"),
            ],
        ),
        Panel(
            "Steps",
            "Steps finished, and steps lost with their worker group.",
            "ops",
            [
                (rate("tgi_batch_inference_success", "method"), "{{method}}"),
                (rate("tgi_batch_inference_failure", "method"), "lost: {{method}}"),
            ],
        ),
        Panel(
            "Draft tokens",
            "Draft tokens that steps verified, and accepted draft tokens. Each accepted token saved a step.",
            "short",
            [
                (rate("penstock_draft_tokens"), "verified"),
                (rate("penstock_accepted_draft_tokens"), "right"),
            ],
        ),
    ],
    "Replicas": [
        Panel(
            "Replicas",
            "Replicas that take steps, and sequences that changed replicas. With --replicas above 1 or penstock route.",
            "short",
            [
                (f"sum(penstock_replica_health{{{SERIES}}} == bool 1)", "take steps"),
                (f"sum(penstock_replica_health{{{SERIES}}} == bool 0)", "take none"),
                (increase("penstock_replica_handovers", "replica"), "left {{replica}}"),
            ],
        ),
        Panel(
            "Work of each replica",
            "Tokens that the replica still has to compute, with the tokens that it is expected to generate.",
            "short",
            [(f"sum by (replica) (penstock_replica_work_tokens{{{SERIES}}})", "{{replica}}")],
        ),
        Panel(
            "Sequences of each replica",
            "Running and queued sequences.",
            "short",
            [
                (f"sum by (replica) (penstock_replica_running{{{SERIES}}})", "{{replica}} running"),
                (f"sum by (replica) (penstock_replica_queued{{{SERIES}}})", "{{replica}} queued"),
            ],
        ),
        Panel(
            "Routed sequences",
            "Sequences by the replica that they were routed to on arrival.",
            "ops",
            [(rate("penstock_replica_sequences", "replica"), "{{replica}}")],
        ),
        Panel(
            "Prompts routed to their prefix",
            "Share of the prompt tokens that the chosen replica had computed before.",
            "percentunit",
            [
                (
                    f"{rate('penstock_replica_cached_tokens', 'replica')}"
                    f" / {rate('penstock_replica_prompt_tokens', 'replica')}",
                    "{{replica}}",
                )
            ],
        ),
        Panel(
            "Time between tokens of each replica",
            "Mean time between tokens, by which routing weights work: a slower replica gets less.",
            "s",
            [(f"max by (replica) (penstock_replica_token_seconds{{{SERIES}}})", "{{replica}}")],
        ),
    ],
    "Workers": [
        Panel(
            "Restarts",
            "Worker groups started in place of lost ones.",
            "short",
            [
                (increase("penstock_worker_restarts", "instance"), "{{instance}}"),
            ],
        ),
        Panel(
            "Standby groups",
            "Worker groups that are ready to replace a lost one: 0 or 1 for each instance.",
            "short",
            [
                (f"sum by (instance) (penstock_standby_groups{{{SERIES}}})", "{{instance}}"),
            ],
        ),
        Panel(
            "Time without workers",
            "Time from the last sign of life of a lost group to the next token.",
            "s",
            [
                (increase("penstock_worker_downtime_seconds_sum", "instance"), "{{instance}}"),
            ],
        ),
    ],
}


def panel(number: int, described: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    """A panel in Grafana's schema."""
    targets = [
        {"refId": chr(ord("A") + n), "datasource": DATA_SOURCE, "expr": expression, "legendFormat": legend}
        for n, (expression, legend) in enumerate(described.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": described.title,
        "description": described.description,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": NUM_ROWS},
        "fieldConfig": {"defaults": {"unit": described.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def panels() -> list[dict[str, Any]]:
    """All rows, each with up to three panels side by side."""
    laid_out: list[dict[str, Any]] = []
    y = 0
    for title, described in ROWS.items():
        position = {"x": 0, "y": y, "w": NUM_COLUMNS, "h": 1}
        row = {"id": len(laid_out) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": position}
        laid_out.append({**row, "panels": []})
        y += 1
        for first in range(0, len(described), 3):
            line = described[first : first + 3]
            width = NUM_COLUMNS // len(line)
            for column, one in enumerate(line):
                laid_out.append(panel(len(laid_out) + 1, one, column * width, y, width))
            y += NUM_ROWS
    return laid_out


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice of several values of a label."""
    return {
        "name": name,
        "type": "query",
        "datasource": DATA_SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def board() -> dict[str, Any]:
    """The board without an id or a uid: Grafana gives it both."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    instances = 'label_values(tgi_request_count{job=~"$job"}, instance)'
    variables = [source, variable("job", "label_values(tgi_request_count, job)"), variable("instance", instances)]
    return {
        "title": "Penstock",
        "description": "Generated by deploy/grafana/board.py.",
        "tags": ["penstock"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def rendered() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(rendered(), encoding="utf-8")
