"""Takes Penstock to a machine that has a GPU, Python with torch, and nothing else: no Rust, no network.

    python packaging/gpu.py bundle      where there is everything: packs gpu-bundle/, which git ignores
    python packaging/gpu.py run         there, in the project's folder with gpu-bundle/: tests, faults, benchmark

A run is made of parts, the most valuable first. Each part's result is written as soon as it is there, and a part that
has a result does not run again, so a run that was cut short continues where it ended: by `--limit-s`, or by a machine
that was taken away. `run --device cpu --quick` runs a small piece of each part on a CPU, so that the one run on a GPU
does not fail on a typo.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "gpu-bundle"
MAX_BUNDLE_BYTES = 48 << 20
# What environments of torch and transformers lack, or have in a version that the generated protocol does not accept.
PACKAGES = (
    *("grpcio", "protobuf", "llguidance", "gguf"),
    *("pytest", "pytest-timeout", "iniconfig", "pluggy", "pygments", "hypothesis", "sortedcontainers"),
)
# glibc 2.39 is that of Ubuntu 24.04; pip knows no order of platforms.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64")

# Every test module whose tests run on the device of PENSTOCK_TEST_DEVICE, the quick ones first.
KERNEL_TESTS = (
    "device/test_triton_ops.py",
    "device/test_triton_invariant.py",
    "device/test_triton_low_rank.py",
    "device/test_triton_quantized.py",
    "device/test_triton_narrow.py",
    "layers/test_triton_experts.py",
    "device/test_triton_cut.py",
    "device/test_triton_attention.py",
    "device/test_flash_attention.py",
)
MODEL_TESTS = (
    "models/test_models.py",
    "models/test_rope_config.py",
    "collectives/test_device_ranks.py",
    "architecture/test_own_head.py",
    "architecture/test_triton_models.py",
    "architecture/test_fp8_cache.py",
    "architecture/test_deterministic.py",
    "architecture/test_device_adapters.py",
    "architecture/test_device_drafts.py",
    "architecture/test_pooling.py",
    "architecture/test_images.py",
    "architecture/test_image_limits.py",
)
PARITY_TESTS = ("architecture/test_parity.py",)
# The models of the benchmark, the most valuable first.
BENCHMARKED = (
    "llama-8b",
    "qwen3-30b-a3b",
    "llama-8b-fp8",
    "llama-8b-w4",
    "deepseek-v2-lite",
    "llama-8b-deterministic",
    *(f"llama-8b-{name}" for name in ("w8a8", "w8", "q4k", "q6k")),
)


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
    (BUNDLE / "python-version").write_text(python_version)
    num_bytes = sum(path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file())
    if num_bytes > MAX_BUNDLE_BYTES:
        raise SystemExit(f"error: {BUNDLE} has {num_bytes >> 20} MiB, at most {MAX_BUNDLE_BYTES >> 20} are allowed")
    print(f"{BUNDLE}: {num_bytes >> 20} MiB")


def environment(device: str, site: Path) -> dict[str, str]:
    """Environment of the programs on the device. Unpacks the bundle's wheels into `site` if there is a bundle."""
    paths, binary = [ROOT / "server"], {}
    if BUNDLE.exists():
        packed, here = (BUNDLE / "python-version").read_text(), "{}.{}".format(*sys.version_info)
        if packed != here:
            raise SystemExit(
                f"error: {BUNDLE} is for Python {packed}, this is {here}; run it with {packed}, or pack it with "
                f"--python-version {here}"
            )
        for wheel in (BUNDLE / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)  # a machine may lack pip
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


def parts_of(device: str, out: Path, quick: bool) -> dict[str, list[str]]:
    """The commands of a run. The benchmark's parts add to one result."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations", "10"]
    chosen = ["-k", "llama or operators or norms or dense_weights or products"] if quick else []

    def tests(names: Sequence[str]) -> list[str]:
        return [*pytest, *chosen, *(str(ROOT / "server" / "tests" / name) for name in names)]

    benchmark = [sys.executable, "bench/gpu.py", "--device", device, "--resume", str(out / "gpu.json.gz")]
    benchmark += ["--repeats", "1" if quick else "3"]
    is_tiny = quick or device == "cpu"
    # On a CPU, --deterministic needs operators that not every CPU has, so that the tiny model does without.
    models = ("tiny", *(f"tiny-{name}" for name in ("fp8", "w4", "w8a8", "q4k"))) if is_tiny else BENCHMARKED
    first, *others = ({f"benchmark {name}": [*benchmark, "--model", name]} for name in models)
    parts = {"kernels": tests(KERNEL_TESTS), "models": tests(MODEL_TESTS)}
    parts["faults"] = [*pytest, str(ROOT / "integration-tests" / "test_device.py")]
    parts |= first
    for other in others:
        parts |= other
    return {**parts, "parity": tests(PARITY_TESTS)}


def run(device: str, out: Path, quick: bool, limit_s: float, only: list[str] | None) -> int:
    """Runs the parts that have no result in `out` yet. Returns how many failed or are left."""
    out.mkdir(parents=True, exist_ok=True)
    parts = parts_of(device, out, quick)
    if unknown := set(only or ()) - parts.keys():
        raise SystemExit(f"error: --parts {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    env = environment(device, out / "site")
    results_file, end = out / "parts.json", time.monotonic() + limit_s
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    for name, command in parts.items():
        if name in results or (only and name not in only):
            continue
        started = time.monotonic()
        if (left := end - started) <= 0:
            break
        with (out / "run.log").open("ab") as log:
            log.write(f"\n== {name}: {' '.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            try:
                ran = subprocess.run(
                    command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=left, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"== {name}: cut off by --limit-s; run again to continue", flush=True)
                break
        results[name] = {"status": ran.returncode, "seconds": round(time.monotonic() - started, 1)}
        results_file.write_text(json.dumps(results, indent=1) + "\n")
        lines = (out / "run.log").read_bytes()[begin:].decode(errors="replace").splitlines()
        print(f"== {name}: status {ran.returncode}, {results[name]['seconds']:.0f} s")
        print("\n".join(lines[-60:] if ran.returncode else lines[-25:]), flush=True)
    shutil.rmtree(out / "site", ignore_errors=True)
    wanted = only or parts
    left_over = [name for name in wanted if name not in results]
    if left_over:
        print(f"== left: {', '.join(left_over)}")
    return len(left_over) + sum(results[name]["status"] != 0 for name in wanted if name in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("bundle", help="pack what a bare machine lacks")
    packing.add_argument("--python-version", default="3.12", help="of that machine")
    running = commands.add_parser("run", help="run the tests and the benchmark on the device")
    running.add_argument("--device", default="cuda:0")
    running.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    running.add_argument("--quick", action="store_true", help="a few tests and the tiny model")
    running.add_argument(
        "--limit-s", type=float, default=86400.0, help="stop after this many seconds; run again to continue"
    )
    running.add_argument("--parts", nargs="+", help="only these")
    options = parser.parse_args()
    if options.command == "bundle":
        bundle(options.python_version)
        return 0
    return 1 if run(options.device, options.out, options.quick, options.limit_s, options.parts) else 0


if __name__ == "__main__":
    sys.exit(main())
