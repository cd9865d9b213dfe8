"""deploy/compose.yaml: its services, files and ports belong together, and Prometheus accepts its configuration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from binary import PENSTOCK

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return read("compose.yaml")["services"]


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Path in the container → source."""
    return {target: source for source, target, *_ in (volume.split(":") for volume in service["volumes"])}


def test_every_mounted_file_and_volume_exists(services: dict[str, Any]) -> None:
    for service in services.values():
        for source in mounts(service).values():
            assert (DEPLOY / source).exists() if source.startswith(".") else source in read("compose.yaml")["volumes"]
    assert set(read("compose.gpu.yaml")["services"]) <= set(services)


def test_the_targets_and_variables_are_those_of_the_image_and_the_server(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    assert {"cpu", "cuda"} <= targets
    assert services["penstock"]["build"] == {"context": "..", "target": "${TARGET:-cpu}"}
    assert "PORT=80" in dockerfile
    assert services["penstock"]["ports"] == ["8080:80"]
    # Podman lets only root listen on port 80.
    assert services["penstock"]["sysctls"] == {"net.ipv4.ip_unprivileged_port_start": "80"}
    flags = subprocess.run([PENSTOCK, "--reference", "flags"], capture_output=True, text=True, check=True).stdout
    assert all(f"`{name}`" in flags for name in services["penstock"]["environment"])


def test_prometheus_scrapes_the_server_and_reads_its_rules(services: dict[str, Any]) -> None:
    configuration = read("prometheus/prometheus.yml")
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["penstock:80"], "labels": {"container": "penstock"}}]
    files = mounts(services["prometheus"])
    assert all(f"/etc/prometheus/{name}" in files for name in ("prometheus.yml", *configuration["rule_files"]))
    if shutil.which("promtool") is None:
        pytest.skip("needs Debian's package prometheus")
    check = ["promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_prometheus_and_the_board(services: dict[str, Any]) -> None:
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = read("grafana/provisioning/dashboards/penstock.yaml")["providers"]
    files = mounts(services["grafana"])
    board = f"{provider['options']['path']}/penstock.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
    assert json.loads((DEPLOY / files[board]).read_text())["title"] == "Penstock"


def test_the_collector_listens_where_the_server_sends_traces(services: dict[str, Any]) -> None:
    configuration = read("collector/config.yaml")
    port = configuration["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert services["penstock"]["environment"]["OTLP_ENDPOINT"] == f"http://collector:{port}"
    for pipeline in configuration["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(configuration[kind])
