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
import jsonschema
import kubernetes_validate
import pytest
import yaml
from binary import PENSTOCK, TIMEOUT_S, start
from client import ask
from test_nodes import run_node
from test_route import engine_url

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm"
TLS = ROOT / "router" / "tests" / "fixtures" / "tls"
HELM = shutil.which("helm", path=f"{ROOT / '.make' / 'bin'}{os.pathsep}{os.environ['PATH']}")
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
# Kinds of operators, whose schemas are not Kubernetes' own, and the folders of these schemas.
GROUPS, MONITORING = "leaderworkerset.x-k8s.io/v1", "monitoring.coreos.com/v1"
MODULES = ROOT / ".make" / "go"
SCHEMAS = {
    GROUPS: MODULES / "sigs.k8s.io" / "lws@v0.8.0" / "config" / "crd" / "bases",
    MONITORING: MODULES.joinpath(
        "github.com", "prometheus-operator", "prometheus-operator@v0.85.0", "example", "prometheus-operator-crd"
    ),
}

pytestmark = pytest.mark.skipif(
    HELM is None, reason="needs helm on the PATH or in .make/bin, where .ci/run builds it with go"
)

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
CPU: dict[str, Any] = {"gpus": 0, "image": {"tag": "cpu"}, "weights": {"kind": "emptyDir"}}
ROUTER: dict[str, Any] = {"enabled": True, "secret": "engine", "tls": {"secret": "engine-tls"}}
NODES: dict[str, Any] = {"count": 3, "secret": "nodes"}
GPU_NODES = {**NODES, "count": 2, "unencryptedGpus": True}
GROUPED = {"cpu-isa": "avx2"}
LOGGED = {"json-output": False}  # `start` sets it
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "cpu": {**CPU, "replicas": 3},
    "image volume": {"model": "/model", "weights": {"kind": "image", "image": "registry/model:1"}},
    "own claim": {"replicas": 2, "weights": {"existing": "models"}},
    "router": {**EVERYTHING, "router": ROUTER},
    "groups": {"gpus": 0, "nodes": NODES, "weights": {"accessModes": ["ReadWriteMany"]}},
    "groups behind a router": {**EVERYTHING, "gpus": 0, "flags": GROUPED, "nodes": NODES, "router": ROUTER},
    "groups with GPUs": {"gpus": 4, "nodes": GPU_NODES, "weights": {"accessModes": ["ReadWriteMany"]}},
    "groups with GPUs behind a router": {**EVERYTHING, "gpus": 1, "flags": {}, "nodes": GPU_NODES, "router": ROUTER},
}


def helm(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    command = [HELM, *arguments, "--values", "-"]
    return subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def render(values: dict[str, Any]) -> dict[str, Any]:
    """What the chart makes of `values`, by kind and what follows the chart's name, as in "Service engines"."""
    done = helm("template", "llm", str(CHART), "--kube-version", NEWEST, values=values)
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    kinds = {
        f"{item['kind']} {item['metadata']['name'].removeprefix('llm-penstock').strip('-')}".strip(): item
        for item in objects
    }
    assert len(kinds) == len(objects)
    return kinds


def templates(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a workload: one, or that of the server and that of the nodes of its group."""
    if workload["apiVersion"] != GROUPS:
        return [workload["spec"]["template"]]
    return [workload["spec"]["leaderWorkerTemplate"][f"{name}Template"] for name in ("leader", "worker")]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = templates(workload)[0]["spec"]["containers"]
    return only


def validate(item: dict[str, Any], version: str) -> None:
    """Raises if the API server of a release would refuse the object."""
    if item["apiVersion"] == GROUPS:
        for pod in templates(item):
            metadata = {**pod["metadata"], "name": "pod"}
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": metadata}, version, strict=True
            )
    elif item["apiVersion"] != MONITORING:
        kubernetes_validate.validate(item, version, strict=True)


def validator_of(item: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """The schema by which the API server checks an object of an operator."""
    (file,) = SCHEMAS[item["apiVersion"]].glob(f"*_{item['kind'].lower()}s.yaml")
    definition = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]  # in C: the schema of pods is large
    assert definition["names"]["kind"] == item["kind"]
    version = item["apiVersion"].partition("/")[2]
    (found,) = [each for each in definition["versions"] if each["name"] == version]
    # The schema itself is not checked, which takes seconds and refuses Go's regular expressions.
    return jsonschema.Draft202012Validator(closed(found["schema"]["openAPIV3Schema"]))


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with unknown properties refused, except in metadata and in pods."""
    if items := schema.get("items"):
        return {**schema, "items": closed(items)}
    if not schema.get("properties"):
        return schema
    properties = {
        name: inner if name in ("metadata", "leaderTemplate", "workerTemplate") else closed(inner)
        for name, inner in schema["properties"].items()
    }
    return {**schema, "properties": properties, "additionalProperties": False}


def options(workload: dict[str, Any], **replaced: str) -> list[str]:
    """The arguments of the pod, those named in `replaced` with other values; without its address."""
    named = {f"--{name.replace('_', '-')}": value for name, value in replaced.items()}
    given = [argument.partition("=") for argument in container(workload)["args"]]
    return [
        f"{name}{equals}{named.get(name, value)}"
        for name, equals, value in given
        if name not in ("--port", "--hostname")
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_valid_and_they_belong_together(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--kube-version", NEWEST, values=CASES[name])
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = render(CASES[name])
    for item in kinds.values():
        validate(item, NEWEST)
        if name != "image volume":  # image volumes came later
            validate(item, OLDEST)
        assert re.fullmatch("[a-z0-9-]{1,63}", item["metadata"]["name"])
    workloads = [
        item for kind, item in kinds.items() if kind.split()[0] in ("Deployment", "StatefulSet", "LeaderWorkerSet")
    ]
    pods = [pod for workload in workloads for pod in templates(workload)]
    assert len(pods) == 1 + ("router" in name) + ("groups" in name)
    for workload in workloads:
        if labels := workload["spec"].get("selector"):
            assert selected(labels["matchLabels"], pods) == templates(workload)
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes
    # Clients reach the router if there is one, and each budget is that of one workload.
    front = kinds.get("Deployment router") or kinds.get("Deployment") or kinds["LeaderWorkerSet engines"]
    assert selected(kinds["Service"]["spec"]["selector"], pods) == templates(front)[:1]
    # Prometheus finds the servers, whose queues the autoscaler reads, with a router and without.
    servers = [
        pod for pod in pods if pod["metadata"]["labels"].get("app.kubernetes.io/component", "server") == "server"
    ]
    scraped = [service["spec"]["selector"] for service in kinds_of(kinds, "Service")]
    assert servers
    assert all(any(pod in selected(labels, pods) for labels in scraped) for pod in servers)
    budgets = kinds_of(kinds, "PodDisruptionBudget")
    chosen = [selected(budget["spec"]["selector"]["matchLabels"], pods) for budget in budgets]
    assert len(chosen) == len(pods)
    assert all([pod] in chosen for pod in pods)
    if policy := kinds.get("NetworkPolicy"):
        assert selected(policy["spec"]["podSelector"]["matchLabels"], pods) == pods
    if scaler := kinds.get("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (scaled,) = kinds_of(kinds, target["kind"])[-1:]
        assert (scaled["apiVersion"], scaled["metadata"]["name"]) == (target["apiVersion"], target["name"])


@pytest.mark.parametrize(
    ("api", "name"),
    [
        *((GROUPS, name) for name in CASES if "groups" in name),
        *((MONITORING, name) for name, values in CASES.items() if "monitoring" in values),
    ],
)
def test_objects_of_operators_match_their_schemas(api: str, name: str) -> None:
    if not SCHEMAS[api].exists():
        pytest.skip(f"needs the schemas in {SCHEMAS[api]}, which .ci/run downloads")
    items = [item for item in render(CASES[name]).values() if item["apiVersion"] == api]
    assert len(items) == {GROUPS: 1, MONITORING: 2}[api]
    for item in items:
        validator = validator_of(item)
        validator.validate(item)
        with pytest.raises(jsonschema.ValidationError, match="'unknown' was unexpected"):
            validator.validate({**item, "spec": {**item["spec"], "unknown": 1}})


def kinds_of(kinds: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [item for item in kinds.values() if item["kind"] == kind]


def selected(labels: dict[str, str], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]


def test_everything_that_is_asked_for_is_there() -> None:
    kinds = render(EVERYTHING)
    operator = {"ServiceMonitor", "PrometheusRule", "ConfigMap board"}
    own = {"Deployment", "Service", "PersistentVolumeClaim", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    assert set(kinds) == {*own, "NetworkPolicy", *operator}
    server = container(kinds["Deployment"])
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
    assert json.loads(kinds["ConfigMap board"]["data"]["penstock.json"]) == board


def test_a_network_policy_lets_the_server_reach_what_is_added() -> None:
    collector = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}],
        "ports": [{"protocol": "TCP", "port": 4317}],
    }
    mirror = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"protocol": "TCP", "port": 443}]}
    policies = [
        render({"networkPolicy": {"enabled": True, "extraEgress": added}})["NetworkPolicy"]
        for added in ([], [collector, mirror])
    ]
    before, after = (policy["spec"]["egress"] for policy in policies)
    assert after == [*before, collector, mirror]
    for version in (OLDEST, NEWEST):
        validate(policies[1], version)


@pytest.mark.parametrize(
    ("flags", "num_shard"), [({}, 8), ({"replicas": 2}, 4), ({"replicas": 2, "pipeline-parallel-size": 2}, 2)]
)
def test_the_gpus_of_a_pod_are_divided(flags: dict[str, int], num_shard: int) -> None:
    server = container(render({"gpus": 8, "flags": flags})["Deployment"])
    assert f"--num-shard={num_shard}" in server["args"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(("flags", "num_shard"), [({}, 8), ({"pipeline-parallel-size": 2}, 4)])
def test_each_pod_of_a_group_has_gpus_for_its_ranks(flags: dict[str, int], num_shard: int) -> None:
    group = render({**CASES["groups with GPUs"], "flags": flags})["LeaderWorkerSet engines"]
    server = container(group)
    assert {f"--num-shard={num_shard}", "--unencrypted-gpus"} <= set(server["args"])
    assert "nvidia.com/gpu" not in server["resources"]["limits"], "its ranks are on the nodes"
    leader, worker = templates(group)
    for pod, (node,) in ((leader, leader["spec"]["initContainers"]), (worker, worker["spec"]["containers"])):
        assert "--unencrypted-gpus" in node["args"]
        assert node["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in node["volumeMounts"]
        assert [each["key"] for each in pod["spec"]["tolerations"]] == ["nvidia.com/gpu"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "set weights.accessModes to [ReadWriteMany]"),
        ({"autoscaling": {"enabled": True}}, "set weights.accessModes to [ReadWriteMany]"),
        ({"weights": {"kind": "image"}}, "set weights.image to the image"),
        ({"flags": {"num-shard": 2}}, "flags.num-shard is set by the chart"),
        (
            {"gpus": 3, "flags": {"replicas": 2}},
            "gpus is 3, must be a multiple of flags.replicas times flags.pipeline-parallel-size, 2",
        ),
        ({"replica": 2}, "replica"),
        ({"gpus": "two"}, "gpus"),
        ({"router": {"enabled": True}}, "set weights.accessModes to [ReadWriteMany]"),
        ({**CPU, "router": {"enabled": True}}, "router.enabled needs router.secret"),
        ({**CPU, "router": {"enabled": True, "secret": "a"}}, "router.enabled needs router.tls.secret"),
        ({**CPU, "router": {"flags": {"replica": "a"}}}, "router.flags.replica is set by the chart"),
        ({**CPU, "replicas": 1025, "router": ROUTER}, "a router has at most 1024 servers"),
        ({"flags": {"--port": 1}}, "--port"),
        ({**CASES["groups"], "gpus": 1}, "nodes.count above 1 with gpus needs nodes.unencryptedGpus: true"),
        ({**CASES["groups"], "nodes": GPU_NODES}, "there are no GPUs of several nodes"),
        (
            {**CASES["groups with GPUs"], "gpus": 1, "flags": {"pipeline-parallel-size": 4}},
            "gpus times nodes.count is 2, must be a multiple of flags.replicas times flags.pipeline-parallel-size, 4",
        ),
        ({"flags": {"unencrypted-gpus": True}}, "flags.unencrypted-gpus is set by the chart"),
        ({**CASES["groups"], "nodes": {"count": 2}}, "nodes.count above 1 needs nodes.secret"),
        ({**CASES["groups"], **CPU}, "nodes.count above 1 needs weights that all pods of a group mount"),
        ({**CASES["groups"], "flags": {"replicas": 2}}, "nodes.count above 1 excludes flags.replicas"),
        ({**CASES["groups behind a router"], "flags": {}}, "needs flags.cpu-isa"),
        ({"nodes": {"count": 0}}, "count"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    done = helm("template", "llm", str(CHART), "--kube-version", NEWEST, values=values)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_server_starts_with_the_arguments_of_a_pod_and_answers_its_probes(tmp_path: Path) -> None:
    byte_model.save(tmp_path, 256, None)
    flags = {**LOGGED, "max-total-tokens": 64, "disable-playground": True}
    kinds = render({"gpus": 0, "model": str(tmp_path), "flags": flags})
    server = container(kinds["Deployment"])
    assert server["ports"] == [{"name": "http", "containerPort": 8080}]
    assert {"--port=8080", "--hostname=0.0.0.0"} <= set(server["args"])
    arguments = options(kinds["Deployment"])
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
    kinds = render(CASES["router"])
    pods = [container(kinds["StatefulSet"]), container(kinds["Deployment router"])]
    used = {argument.partition("=")[0] for pod in pods for argument in pod["args"]} - {"route"}
    assert all(f"`{flag}`" in reference for flag in used)


def test_a_router_of_the_chart_uses_the_servers_of_the_chart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    byte_model.save(model, 256, None)
    kinds = render({**CPU, "model": str(model), "flags": LOGGED, "replicas": 2, "router": {**ROUTER, "flags": LOGGED}})
    pods, service = kinds["StatefulSet"], kinds["Service engines"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    (engine,) = [port for port in service["spec"]["ports"] if port["name"] == "engine"]
    replicas = [argument for argument in container(kinds["Deployment router"])["args"] if "--replica" in argument]
    host = f"{service['metadata']['name']}.default.svc:{engine['port']}"
    assert replicas == [f"--replica=https://llm-penstock-{number}.{host}" for number in range(2)]

    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    files = {
        "engine_secret_file": str(secret),
        "engine_tls_cert": str(TLS / "server.pem"),
        "engine_tls_key": str(TLS / "server.key.pem"),
        "engine_tls_ca": str(TLS / "authority.pem"),
    }
    servers = [start(*options(pods, engine_listen="127.0.0.1:0", **files)) for _ in range(2)]
    urls = [url.replace("127.0.0.1", "localhost") for url in map(engine_url, servers)]
    assert all(url.startswith("https://") for url in urls)
    command, *arguments = options(kinds["Deployment router"], **files)
    given = [argument for argument in arguments if not argument.startswith("--replica=")]
    router = start(*given, *(f"--replica={url}" for url in urls), command=[command])
    body = {"inputs": "a", "parameters": {"max_new_tokens": 4}}
    assert ask(router, "/generate", body).json == ask(servers[0], "/generate", body).json
    assert [process.stop() for process in (router, *servers)] == [0, 0, 0]


def test_a_group_of_pods_serves_one_model(tmp_path: Path) -> None:
    """The server of the first pod, and a node with the arguments of each pod."""
    model, secret = tmp_path / "model", tmp_path / "secret"
    model.mkdir()
    byte_model.save(model, 256, None)
    secret.write_text("an integration test's secret, 32+ characters")
    values = {**CASES["groups"], "model": str(model), "flags": LOGGED, "nodes": {**NODES, "count": 2}}
    group = render(values)["LeaderWorkerSet engines"]
    leader, worker = templates(group)
    (sidecar,), (node,) = leader["spec"]["initContainers"], worker["spec"]["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["args"] == node["args"]
    command = ["node", "--listen=$(POD_IP):7000", "--secret-file=/etc/penstock-node/node-secret", "--json-output"]
    assert node["args"] == command
    name = group["metadata"]["name"]
    nodes = [f"--ranks-on=node://$(POD_NAME){place}.{name}.default.svc:7000" for place in ("", "-1")]
    assert [argument for argument in container(group)["args"] if argument.startswith("--ranks-on=")] == nodes

    running = [run_node(f"127.0.0.{place}", secret) for place in (2, 3)]
    arguments = [argument for argument in options(group, node_secret_file=str(secret)) if argument not in nodes]
    server = start(*arguments, *(f"--ranks-on={each.address}" for each in running))
    alone = start("--model-id", str(model))
    body = {"inputs": "a", "parameters": {"max_new_tokens": 4}}
    assert ask(server, "/generate", body).json == ask(alone, "/generate", body).json
    assert [process.stop() for process in (server, alone)] == [0, 0]
    for each in running:
        each.process.terminate()
        assert each.process.wait(TIMEOUT_S) == 0
