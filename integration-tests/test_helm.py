"""deploy/helm: what the chart renders is valid for Kubernetes, and the real server starts with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import byte_model
import kubernetes_validate
import pytest
import yaml
from binary import PENSTOCK, start
from client import ask

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm"
HELM = shutil.which("helm", path=f"{ROOT / '.make' / 'bin'}{os.pathsep}{os.environ['PATH']}")
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
OPERATOR = "monitoring.coreos.com/v1"  # kinds of the Prometheus Operator, whose schemas are not Kubernetes' own

pytestmark = pytest.mark.skipif(HELM is None, reason="needs helm: go install helm.sh/helm/v3/cmd/helm@latest")

EVERYTHING = {
    "model": "org/name",
    "flags": {
        "served-model-name": ["a", "b"],
        "max-total-tokens": 1_000_000,
        "cuda-memory-fraction": 0.85,
        "env": False,
        "replicas": 2,
    },
    "env": [{"name": "RUST_LOG", "value": "debug"}],
    "gpus": 4,
    "hubToken": {"secret": "hub"},
    "apiKeys": {"secret": "clients"},
    "image": {"pullSecrets": ["registry"]},
    "weights": {"accessModes": ["ReadWriteMany"], "storageClass": "fast"},
    "autoscaling": {"enabled": True, "queueTokens": 2_000_000},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": True},
    "nodeSelector": {"gpu": "h100"},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm"},
    "service": {"annotations": {"a": "b"}},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "cpu": {"gpus": 0, "image": {"tag": "cpu"}, "weights": {"kind": "emptyDir"}, "replicas": 3},
    "image volume": {"model": "/model", "weights": {"kind": "image", "image": "registry/model:1"}},
    "own claim": {"replicas": 2, "weights": {"existing": "models"}},
}


def helm(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = [HELM, *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60)


def render(values: dict[str, Any]) -> dict[str, Any]:
    """What the chart makes of `values`, by kind."""
    done = helm("template", "llm", str(CHART), "--kube-version", NEWEST, values=values)
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    kinds = {item["kind"]: item for item in objects}
    assert len(kinds) == len(objects)
    return kinds


def container(kinds: dict[str, Any]) -> dict[str, Any]:
    (only,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_valid_and_they_belong_together(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--kube-version", NEWEST, values=CASES[name])
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = render(CASES[name])
    for item in kinds.values():
        if item["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(item, NEWEST, strict=True)
            if name != "image volume":  # which came later
                kubernetes_validate.validate(item, OLDEST, strict=True)
        assert re.fullmatch("[a-z0-9-]{1,63}", item["metadata"]["name"])
    template = kinds["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    selectors = [kinds["Deployment"]["spec"]["selector"]["matchLabels"], kinds["Service"]["spec"]["selector"]]
    selectors += [kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]]
    if policy := kinds.get("NetworkPolicy"):
        selectors.append(policy["spec"]["podSelector"]["matchLabels"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container(kinds)["volumeMounts"]} == volumes


def test_everything_that_is_asked_for_is_there() -> None:
    kinds = render(EVERYTHING)
    operator = {"ServiceMonitor", "PrometheusRule", "ConfigMap"}
    own = {"Deployment", "Service", "PersistentVolumeClaim", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    assert set(kinds) == {*own, "NetworkPolicy", *operator}
    server = container(kinds)
    for argument in ("--model-id=org/name", "--num-shard=2", "--served-model-name=a", "--served-model-name=b"):
        assert argument in server["args"]
    assert {"--max-total-tokens=1000000", "--cuda-memory-fraction=0.85", "--json-output"} <= set(server["args"])
    assert "--env" not in server["args"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 4
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}}
    assert server["env"] == [token, {"name": "RUST_LOG", "value": "debug"}]
    assert "replicas" not in kinds["Deployment"]["spec"], "the autoscaler decides"
    (metric,) = kinds["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "2000000"
    assert kinds["ServiceMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    assert (
        kinds["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
        <= kinds["Service"]["metadata"]["labels"].items()
    )
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "penstock.rules.yml").read_text())
    assert kinds["PrometheusRule"]["spec"] == rules
    board = json.loads((ROOT / "deploy" / "grafana" / "penstock.json").read_text())
    assert json.loads(kinds["ConfigMap"]["data"]["penstock.json"]) == board


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "set weights.accessModes to [ReadWriteMany]"),
        ({"autoscaling": {"enabled": True}}, "set weights.accessModes to [ReadWriteMany]"),
        ({"weights": {"kind": "image"}}, "set weights.image to the image"),
        ({"flags": {"num-shard": 2}}, "flags.num-shard is set by the chart"),
        ({"gpus": 3, "flags": {"replicas": 2}}, "gpus is 3, must be a multiple of flags.replicas, 2"),
        ({"replica": 2}, "replica"),
        ({"gpus": "two"}, "gpus"),
        ({"flags": {"--port": 1}}, "--port"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    done = helm("template", "llm", str(CHART), "--kube-version", NEWEST, values=values)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_server_starts_with_the_arguments_of_a_pod_and_answers_its_probes(tmp_path: Path) -> None:
    byte_model.save(tmp_path, 256, None)
    flags = {"json-output": False, "max-total-tokens": 64, "disable-playground": True}
    kinds = render({"gpus": 0, "model": str(tmp_path), "flags": flags})
    server = container(kinds)
    assert server["ports"] == [{"name": "http", "containerPort": 8080}]
    assert {"--port=8080", "--hostname=0.0.0.0"} <= set(server["args"])
    arguments = [argument for argument in server["args"] if not argument.startswith(("--port=", "--hostname="))]
    # Kubernetes sets HOSTNAME to the name of the pod.
    running = start(*arguments, hostname="0.0.0.0", env={"HOSTNAME": "llm-penstock-0"})
    assert not any("HOSTNAME" in line for line in running.lines)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert ask(running, server[probe]["httpGet"]["path"]).status == 200
    assert ask(running, "/info").json["max_total_tokens"] == 64
    assert b"\npenstock_queue_tokens 0" in ask(running, "/metrics").body, "what the autoscaler reads"
    assert running.stop() == 0
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    wait_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > wait_s + 90
    reference = subprocess.run([PENSTOCK, "--reference", "flags"], capture_output=True, text=True, check=True).stdout
    used = {argument.partition("=")[0] for argument in container(render(EVERYTHING))["args"]}
    assert all(f"`{flag}`" in reference for flag in used)
