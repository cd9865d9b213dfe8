"""What containers and clouds rely on: SageMaker's and Vertex AI's variables and routes, a hub model with a token, the
health check of the image, and the duties of process 1."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import byte_model
import pytest
from binary import TIMEOUT_S, Server, children, launch, name, paused, start
from client import ask, events
from fault.drain import ENVIRONMENT
from fault.probe import health, restarts, wait_for_restart, wait_until
from penstock_server.process.health import PROCESS_NAMES, addresses
from test_nodes import SECRET as NODE_SECRET
from test_nodes import run_node

ROOT = Path(__file__).parent.parent
TOKEN = "hf_a_secret_of_this_test"
GREEDY = {"max_new_tokens": 4, "do_sample": False, "ignore_eos": True}


@pytest.fixture(scope="module")
def sagemaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A private model from a hub, on two ranks, with the variables of a SageMaker container."""
    from hub_server import Hub, running

    folder = tmp_path_factory.mktemp("model")
    byte_model.save(folder, 256, None)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with running(Hub(files, token=TOKEN)) as hub:
        variables = {
            "HF_MODEL_ID": "someone/tiny",
            "SM_NUM_GPUS": "2",
            "SAGEMAKER_BIND_TO_PORT": "0",
            **hub.environment,
            "HF_HOME": str(tmp_path_factory.mktemp("home")),
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
        }
        server = start(port=None, env=variables)
        yield server
    assert server.stop() == 0
    assert TOKEN not in "\n".join(server.lines)


@pytest.fixture(scope="module")
def vertex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    byte_model.save(folder, 256, None)
    variables = {"MODEL_ID": str(folder), "AIP_HTTP_PORT": "0", "AIP_PREDICT_ROUTE": "/predict"}
    server = start(port=None, env={**variables, "AIP_HEALTH_ROUTE": "/alive", "PORT": "1"})
    yield server
    assert server.stop() == 0


def test_sagemaker_pings_and_invokes_a_model_of_the_hub(sagemaker: Server) -> None:
    assert ask(sagemaker, "/ping").status == 200
    body = {"inputs": "Hi", "parameters": GREEDY}
    plain = ask(sagemaker, "/invocations", body)
    assert plain.status == 200
    assert plain.json == ask(sagemaker, "/", body).json
    streamed = events(sagemaker, "/invocations", {**body, "stream": True})
    assert streamed[-1]["generated_text"] == plain.json[0]["generated_text"]
    assert ask(sagemaker, "/info").json["model_id"] == "someone/tiny"


def test_sagemakers_variables_set_model_ranks_and_port(sagemaker: Server) -> None:
    log = "\n".join(sagemaker.lines)
    assert "num-shard is 2 (from SM_NUM_GPUS)" in log
    assert len(sagemaker.worker_groups()[0]) == 2
    assert "downloading " in log, "the progress of the download is shown"


def test_vertex_predicts_on_its_own_routes(vertex: Server) -> None:
    assert ask(vertex, "/alive").status == 200
    answer = ask(vertex, "/predict", {"instances": [{"inputs": "Hi", "parameters": GREEDY}]})
    assert answer.status == 200
    expected = ask(vertex, "/generate", {"inputs": "Hi", "parameters": GREEDY}).json["generated_text"]
    assert answer.json == {"predictions": [expected]}


def check(pid: int) -> tuple[int, str]:
    """The image's health check: its exit status and what it says."""
    command = [sys.executable, "-m", "penstock_server.process.health", "--pid", str(pid)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def test_the_health_check_finds_the_servers_port(vertex: Server) -> None:
    pid = vertex.process.pid
    # The check waits for an answer for seconds only, which a busy machine may exceed.
    wait_until(lambda: check(pid) == (0, "/health/live answered 200\n"), "the check finds the server")
    with paused(pid):
        assert check(pid) == (1, "error: timed out\n")
    with subprocess.Popen(["sleep", str(TIMEOUT_S)]) as other:
        assert check(other.pid) == (1, f"error: process {other.pid} does not listen yet\n")
        other.kill()


def test_the_health_check_passes_over_the_engines_port(tmp_path: Path) -> None:
    byte_model.save(tmp_path, 256, None)
    # Addresses of IPv4 come first in the check, so it asks the engine's before the server's, where there is IPv6.
    server = start(
        *("--model-id", str(tmp_path), "--engine-listen", "127.0.0.1:0"),
        hostname="::1" if Path("/proc/net/if_inet6").exists() else "127.0.0.1",
        env=dict(ENVIRONMENT),
    )
    wait_until(lambda: check(server.process.pid) == (0, "/health/live answered 200\n"), "the check finds the server")
    assert server.stop() == 0


def test_the_health_check_finds_a_unix_socket_whose_path_has_a_space(tmp_path: Path) -> None:
    path = str(tmp_path / "a socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        assert (socket.AF_UNIX, path) in addresses(os.getpid())


def test_the_health_check_accepts_a_node(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(NODE_SECRET)
    node = run_node("127.0.0.2", secret)
    assert check(node.process.pid) == (0, "the node accepts connections\n")
    node.process.terminate()
    assert node.process.wait(TIMEOUT_S) == 0


# Runs the program "$4" under the name of TGI's, with the arguments after it, as `docker run --read-only --ipc none`
# does with the model "$1" mounted at /tmp/model: what was mounted before is read-only, and /dev has a few devices only.
# /tmp is writable if "$2" is rw. The checkout "$3" may be below it. $0: an empty folder, for what replaces /dev and
# /tmp.
CONFINED = """
model=$1 tmp=$2 checkout=$3 program=$4
shift 4
unset TMPDIR
cut -d " " -f 2 /proc/self/mounts | grep -vE "^/(proc|sys|dev)(/|$)" | while read -r place; do
    mount -o remount,bind,ro "$(printf %b "$place")"  # a space is \\040 there
done
mount -t tmpfs tmpfs "$0"
mkdir -p "$0/dev" "$0/tmp/model"
for name in null zero full random urandom; do touch "$0/dev/$name"; mount --bind "/dev/$name" "$0/dev/$name"; done
ln -s "$program" "$0/tmp/text-generation-launcher"
mount --rbind "$model" "$0/tmp/model"
case $checkout in /tmp/*) mkdir -p "$0$checkout"; mount --rbind "$checkout" "$0$checkout";; esac
mount --rbind "$0/dev" /dev
mount --rbind "$0/tmp" /tmp
mount -o "remount,bind,$tmp" /tmp
exec /tmp/text-generation-launcher "$@"
"""


def confined(folder: Path, tmp: str) -> list[str]:
    """The command that runs a program in a container with a tiny model. Skips the test where this is not possible."""
    model, replaced = folder / "model", folder / "replaced"
    model.mkdir()
    replaced.mkdir()
    byte_model.save(model, 256, None)
    new = ["unshare", "--mount"]
    mount = [*new, "mount", "-t", "tmpfs", "tmpfs", str(replaced)]
    if shutil.which(new[0]) is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system, as root has it")
    return [*new, "sh", "-ec", CONFINED, str(replaced), str(model), tmp, str(ROOT)]


@pytest.fixture(scope="module")
def tgi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks in a container with a read-only root and no /dev/shm, under the name of TGI's program."""
    through = confined(tmp_path_factory.mktemp("container"), "rw")
    server = start("--model-id", "/tmp/model", "--num-shard", "2", "--standby", "off", through=through)
    yield server
    assert server.stop() == 0, server.last_lines()


@pytest.mark.native
def test_two_ranks_need_no_shared_memory_folder(tgi: Server) -> None:
    folders = [Path(f"/proc/{pid}/root/dev") for pid in (tgi.process.pid, *tgi.worker_pids())]
    assert all(folder.is_dir() and not (folder / "shm").exists() for folder in folders)
    assert len(folders) == 3
    assert any("exchange tensors through shared memory" in line for line in tgi.lines)
    assert ask(tgi, "/generate", {"inputs": "Hi", "parameters": GREEDY}).status == 200


@pytest.mark.native
def test_a_server_with_a_read_only_root_answers_and_restarts_its_workers(tgi: Server) -> None:
    root = Path(f"/proc/{tgi.process.pid}/root")
    writable = [place for place in ("", "home", "root", "var", "tmp/model", "tmp") if os.access(root / place, os.W_OK)]
    assert writable == ["tmp"]
    before = restarts(tgi)
    os.kill(tgi.worker_pids()[0], signal.SIGKILL)
    wait_for_restart(tgi, before)
    grammar = {"type": "regex", "value": "[0-9]+"}  # it is compiled in a process of its own
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 4, "grammar": grammar}}
    assert ask(tgi, "/generate", body).status == 200


@pytest.mark.native
def test_the_health_check_finds_the_server_under_the_name_of_tgis_program(tgi: Server) -> None:
    assert name(tgi.process.pid) in PROCESS_NAMES
    wait_until(lambda: check(tgi.process.pid) == (0, "/health/live answered 200\n"), "the check finds the server")


@pytest.mark.native
def test_a_server_that_can_write_nowhere_says_what_it_needs(tmp_path: Path) -> None:
    process = launch("--model-id", "/tmp/model", through=confined(tmp_path, "ro"))
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "make /tmp writable (for a container: --tmpfs /tmp)" in output


def test_an_image_keeps_the_libraries_that_pytorch_is_linked_with(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    kept = ["torch/lib/libtorch_cuda.so", "nvidia/cu13/lib/libcusolver.so.12", "numpy/testing/__init__.py"]
    removed = ["torch/include/torch.h", "nvidia/cu13/lib/libcusolverMg.so.12", "nvidia/cu13/lib/libcudart_static.a"]
    tests = [f"{name}/core/tests/test_it.py" for name in ("mpmath", "networkx", "numpy", "sympy")]
    for file in (*kept, *removed, *tests, "../../../bin/python"):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()
    python = tmp_path / "bin" / "python"
    trim = ["sh", str(ROOT / "packaging" / "trim.sh"), str(tmp_path)]
    for status in (0, 1):
        python.write_text(f"#!/bin/sh\nexit {status}\n")
        python.chmod(0o755)
        done = subprocess.run(trim, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()) == sorted(kept)
    # The image for CPUs has neither CUDA's libraries nor Triton.
    shutil.rmtree(site / "nvidia")
    python.write_text("#!/bin/sh\n")
    assert subprocess.run(trim, capture_output=True, check=False).returncode == 0


NEW_PIDS = ["unshare", "--pid", "--fork", "--kill-child"]


def test_process_1_reaps_orphans_and_forwards_signals() -> None:
    if shutil.which(NEW_PIDS[0]) is None or subprocess.run([*NEW_PIDS, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make a PID namespace")
    server = start("--standby", "off", through=NEW_PIDS)
    (first,) = children(server.process.pid)
    (serving,) = children(first)
    assert [name(first), name(serving)] == ["penstock-init", "penstock"]
    fork_server = next(pid for pid in children(serving) if children(pid))
    orphans = children(fork_server)
    os.kill(fork_server, signal.SIGKILL)
    # The kernel kills them, and gives them to process 1.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), "process 1 has reaped the workers")
    wait_until(lambda: health(server) == 200, "a new group serves")
    assert ask(server, "/generate", {"inputs": "Hi", "parameters": GREEDY}).status == 200
    os.kill(first, signal.SIGTERM)
    assert server.process.wait(TIMEOUT_S) == 0
