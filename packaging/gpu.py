"""Takes Penstock to a machine that has a GPU, Python with torch, and nothing else: no Rust, no network.

    python packaging/gpu.py bundle      where there is everything: packs gpu-bundle/, which git ignores
    python packaging/gpu.py run         there, in the project's folder with gpu-bundle/: tests, faults, benchmark

`run --device cpu --quick` runs a small part of each on a CPU, so that the one run on a GPU does not fail on a typo.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "gpu-bundle"
MAX_BUNDLE_BYTES = 48 << 20
# What torch's usual environments lack, or have in a version that the generated protocol does not accept.
PACKAGES = ("grpcio", "protobuf", "llguidance", "gguf", "pytest", "pytest-timeout", "hypothesis", "sortedcontainers")
# glibc 2.39 is that of Ubuntu 24.04; pip knows no order of platforms.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64")

# Every test module whose tests run on the device of PENSTOCK_TEST_DEVICE, the quick ones first.
KERNEL_TESTS = (
    "test_triton_ops.py",
    "test_triton_quantized.py",
    "test_triton_cut.py",
    "test_triton_attention.py",
    "test_flash_attention.py",
)
MODEL_TESTS = ("test_models.py", "architecture/test_parity.py")


def bundle(python_version: str) -> None:
    """Raises SystemExit if something is missing or the bundle is too large."""
    binary = ROOT / "target" / "release" / "penstock"
    protocol = ROOT / "server" / "penstock_server" / "pb"
    for path in (binary, protocol):
        if not path.exists():
            raise SystemExit(f"error: {path} is missing; run `make setup`")
    shutil.rmtree(BUNDLE, ignore_errors=True)
    wheels = BUNDLE / "wheels"
    wheels.mkdir(parents=True)
    shutil.copytree(protocol, BUNDLE / "pb", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["strip", "-o", str(BUNDLE / "penstock"), str(binary)], check=True)
    locked = dict(
        line.split("==")
        for line in (ROOT / "requirements-dev.txt").read_text().replace(";", " ").splitlines()
        for line in line.split()[:1]
        if "==" in line
    )
    wanted = [f"{name}=={locked[name]}" for name in PACKAGES]
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python_version]
    download = [sys.executable, "-m", "pip", "download", "--quiet", *options, *platforms, "--dest", str(wheels)]
    subprocess.run([*download, *wanted], check=True)
    num_bytes = sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file())
    if num_bytes > MAX_BUNDLE_BYTES:
        raise SystemExit(f"error: {BUNDLE} has {num_bytes >> 20} MiB, at most {MAX_BUNDLE_BYTES >> 20} are allowed")
    print(f"{BUNDLE}: {num_bytes >> 20} MiB")


def environment(device: str, site: Path) -> dict[str, str]:
    """Of the programs that run on the device. Installs the bundle's wheels if there is a bundle."""
    paths, binary = [ROOT / "server"], {}
    if BUNDLE.exists():
        install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        wheels = map(str, sorted((BUNDLE / "wheels").glob("*.whl")))
        subprocess.run([sys.executable, "-m", "pip", *install, *wheels], check=True)
        shutil.copytree(BUNDLE / "pb", ROOT / "server" / "penstock_server" / "pb", dirs_exist_ok=True)
        paths.insert(0, site)
        binary = {"PENSTOCK_BINARY": str(BUNDLE / "penstock"), "PENSTOCK_PYTHON": sys.executable}
    is_cpu = device == "cpu"
    return {
        **os.environ,
        **binary,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PENSTOCK_TEST_DEVICE": device,
        "TRITON_INTERPRET": "1" if is_cpu else "0",
        "PYTHONUNBUFFERED": "1",
    }


def run(device: str, out: Path, quick: bool) -> int:
    """Each part writes its log to `out`. Returns the number of parts that failed."""
    out.mkdir(parents=True, exist_ok=True)
    env = environment(device, out / "site")
    pytest = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "--durations", "10"]
    tests = ROOT / "server" / "tests"
    chosen = ["-k", "llama or operators or norms or dense_weights"] if quick else []
    size, formats = ("tiny", ("w4", "q4k")) if device == "cpu" or quick else ("llama-8b", ("w4", "w8", "q4k", "q6k"))
    models = [size, *(f"{size}-{name}" for name in formats)]
    benchmark = [sys.executable, "bench/gpu.py", "--device", device, "--out", str(out), "--model", *models]
    parts: dict[str, list[str]] = {
        "kernels": [*pytest, *chosen, *(str(tests / name) for name in KERNEL_TESTS)],
        "models": [*pytest, *chosen, *(str(tests / name) for name in MODEL_TESTS)],
        "faults": [*pytest, str(ROOT / "integration-tests" / "test_device.py")],
        "benchmark": [*benchmark, "--quick", *(["--repeats", "1"] if quick else [])],
    }
    failures = 0
    for name, command in parts.items():
        log, started = out / f"{name}.log", time.monotonic()
        with log.open("w") as file:
            status = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
        failures += status.returncode != 0
        lines = log.read_text(errors="replace").splitlines()
        print(f"== {name}: status {status.returncode}, {time.monotonic() - started:.0f} s, {log}")
        print("\n".join(lines[-60:] if status.returncode else lines[-25:]), flush=True)
    shutil.rmtree(out / "site", ignore_errors=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("bundle", help="pack what a bare machine lacks")
    packing.add_argument("--python-version", default="3.12", help="of that machine")
    running = commands.add_parser("run", help="run the tests and the benchmark on the device")
    running.add_argument("--device", default="cuda:0")
    running.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    running.add_argument("--quick", action="store_true", help="a few tests and the tiny model")
    options = parser.parse_args()
    if options.command == "bundle":
        bundle(options.python_version)
        return 0
    return 1 if run(options.device, options.out, options.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
