"""The Grafana boards and the rules, in a real Prometheus: TGI's own board works unchanged, and every query of
both boards returns data."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import byte_model
import pytest
import yaml
from binary import TIMEOUT_S, Server, start
from client import ask, send
from fault.probe import wait_for_rest, wait_until

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "penstock.rules.yml"
RULE_TESTS = RULES.with_name("penstock.test.yml")
needs_prometheus = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")

# What TGI's board (assets/tgi_grafana.json) asks, which is always about one container.
SERVICE = 'container="penstock"'


def quantile(share: float, name: str, *labels: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{{{', '.join([*labels, SERVICE])}}}[10m])))"


def tgi_queries() -> list[str]:
    prefill, decode = 'method="prefill"', 'method="decode"'
    by_percentile: list[tuple[str, ...]] = [
        ("tgi_request_input_length",),
        ("tgi_request_generated_tokens",),
        ("tgi_request_mean_time_per_token_duration",),
        ("tgi_request_skipped_tokens",),
        ("tgi_request_duration",),
        ("tgi_request_queue_duration",),
        ("tgi_batch_inference_duration", prefill),
    ]
    parts = [f"tgi_batch_{part}_duration" for part in ("inference", "forward", "decode", "filter", "concat")]
    by_percentile += [(part, decode) for part in parts]
    heatmaps = [("tgi_request_mean_time_per_token_duration",), ("tgi_batch_inference_duration", prefill)]
    heatmaps += [(part, decode) for part in parts]
    generated = "rate(tgi_request_generated_tokens_%s{" + SERVICE + "}[10m])"
    return [
        *(quantile(share, *series) for series in by_percentile for share in (0.5, 0.9, 0.99)),
        *(f"sum(increase({name}_bucket{{{', '.join([*labels, SERVICE])}}}[5m])) by (le)" for name, *labels in heatmaps),
        f"({quantile(0.5, 'tgi_request_queue_duration')} * 1000) > 0",
        f"({quantile(0.5, 'tgi_batch_inference_duration', prefill)} * 1000) > 0",
        f"({quantile(0.5, 'tgi_batch_forward_duration', decode)} * 1000)>0",
        f"sum(({generated % 'sum'} / {generated % 'count'})>0)",
        f"sum(increase(tgi_request_success{{{SERVICE}}}[1m]))",
        f"sum(increase(tgi_request_failure{{{SERVICE}}}[1m])) by (err)",
        f"sum(increase(tgi_batch_concat{{{SERVICE}}}[1m])) by (reason)",
        f"count(tgi_request_count{{{SERVICE}}})",
        f"sum(tgi_queue_size{{{SERVICE}}})",
        f"avg(tgi_batch_current_max_tokens{{{SERVICE}}})",
        f"avg(tgi_batch_current_size{{{SERVICE}}})",
    ]


def board() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "penstock.json").read_text())


def board_queries() -> list[str]:
    """The expressions of our board, with every variable at "All"."""
    targets = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", [])]
    return [re.sub(r"\$(job|instance)\b", ".*", query).replace("$__rate_interval", "5m") for query in targets]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def load(server: Server) -> None:
    """Requests that join a running one, and a refused one."""
    story = {"inputs": "Once upon a time " * 40, "parameters": {"max_new_tokens": 4000, "ignore_eos": True}}
    connection, response = send(server, "/generate_stream", story)
    response.readline()  # it is running
    parameters = {"max_new_tokens": 8, "ignore_eos": True}
    prompts = [{"inputs": f"Fact {n}: the " * 20, "parameters": parameters} for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert all(answer.status == 200 for answer in pool.map(lambda body: ask(server, "/generate", body), prompts))
    assert ask(server, "/generate", {"inputs": ""}).status == 422
    connection.close()
    wait_for_rest(server)


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=TIMEOUT_S) as response:
            return json.load(response)["data"]

    def values(self, query: str) -> list[float]:
        """The values of an instant query that are numbers."""
        result = self.get(f"query?{urllib.parse.urlencode({'query': query})}")["result"]
        return [value for value in (float(series["value"][1]) for series in result) if not math.isnan(value)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of a tiny model, whose series a server with one replica does not have."""
    folder = tmp_path_factory.mktemp("model")
    byte_model.save(folder, 1024, None)
    server = start("--model-id", str(folder), "--replicas", "2")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def prometheus(server: Server, pair: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes the servers every two seconds, as its only targets, and evaluates our rules."""
    folder = tmp_path_factory.mktemp("prometheus")
    addresses = [each.url.removeprefix("http://") for each in (server, pair)]
    target = {"targets": addresses, "labels": {"container": "penstock"}}
    configuration = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "500ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "penstock", "static_configs": [target]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(configuration))  # JSON is YAML
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append("--web.listen-address=127.0.0.1:0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    log = ""
    for line in process.stdout:
        log += line
        address = re.search(r'msg="Listening on" address=(\S+)', log)
        if address and "ready to receive web requests" in log:
            break
    else:
        pytest.fail(f"prometheus ended:\n{log}")
    threading.Thread(target=process.stdout.read, daemon=True).start()
    yield Prometheus(f"http://{address[1]}")
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0


@needs_prometheus
def test_every_query_of_both_boards_returns_data(prometheus: Prometheus, server: Server, pair: Server) -> None:
    wait_until(
        lambda: len(prometheus.values("count by (instance) (tgi_request_success)")) == 2, "both servers were scraped"
    )
    load(server)
    # Both replicas get some of them, because each is longer than the gap between two.
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 500, "ignore_eos": True}}
    with ThreadPoolExecutor(8) as pool:
        assert all(answer.status == 200 for answer in pool.map(lambda _: ask(pair, "/generate", body), range(8)))
    for query in [*tgi_queries(), *board_queries()]:
        wait_until(lambda query=query: bool(prometheus.values(query)), f"{query} returns data")
    wait_until(lambda: len(prometheus.values("penstock_replica_sequences > 0")) == 2, "both replicas were used")
    gaps = "increase(penstock_inter_token_seconds_count[5m])"
    refused = 'increase(tgi_request_failure{err="validation"}[5m])'
    wait_until(lambda: sum(prometheus.values(gaps)) >= 8 * 7, "the gaps of the load were counted")
    wait_until(lambda: sum(prometheus.values(refused)) > 0, "its refusal was counted")


@needs_prometheus
def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in evaluated()), "every rule was evaluated")
    assert [(rule["name"], rule["health"]) for rule in evaluated()] == [
        (rule.get("record") or rule["alert"], "ok") for rule in rules()
    ]


@needs_prometheus
@pytest.mark.parametrize("arguments", [("check", "rules", RULES), ("test", "rules", RULE_TESTS)], ids=["check", "test"])
def test_promtool_accepts_the_rules_and_each_alert_fires(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_and_a_runbook() -> None:
    alerts = {rule["alert"]: rule["annotations"] for rule in rules() if "alert" in rule}
    cases = [case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts)
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    for name, texts in alerts.items():
        assert set(texts) == {"summary", "description", "runbook"}
        assert texts["runbook"] == f"docs/operations.md#{name.lower()}"
        assert name in headings


def test_the_committed_board_is_that_of_its_description() -> None:
    description = runpy.run_path(str(DEPLOY / "grafana" / "board.py"))
    assert (DEPLOY / "grafana" / "penstock.json").read_text() == description["rendered"](), "run `make docs`"


def test_the_board_names_no_data_source_and_only_metrics_that_exist() -> None:
    text = json.dumps(board())
    sources = re.findall(r'"uid": "([^"]*)"', text)
    assert set(sources) == {"${datasource}"}
    documented = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    used = re.findall(r"\b(?:tgi|penstock)_\w+", " ".join([text, *(rule["expr"] for rule in rules())]))
    known = {name + suffix for name in documented for suffix in ("", "_bucket", "_sum", "_count")}
    assert set(used) <= known
