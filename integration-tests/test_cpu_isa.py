"""The instruction set of the CPU kernels, from the flag to the answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_independence import check
from binary import start
from byte_model import save
from client import ask


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_answers_of_portable_kernels_do_not_depend_on_the_batch(tmp_path: Path, dtype: str) -> None:
    save(tmp_path, max_tokens=128, window=None)
    server = start("--model-id", str(tmp_path), "--dtype", dtype, "--cpu-isa", "portable")
    log = "\n".join(server.lines)
    assert f"operators: native (portable in {dtype})" in log
    check(server)
    assert server.stop() == 0


@pytest.mark.native
def test_with_an_instruction_set_logprobs_do_not_depend_on_what_the_cpu_has(tmp_path: Path) -> None:
    """Sampling uses torch's softmax and logarithm, whose last bits depend on the instruction set that torch uses."""
    save(tmp_path, max_tokens=128, window=None)

    def logprobs(torch_capability: str) -> list[float]:
        """The logprobs of a sampled answer on a CPU of which torch uses this instruction set."""
        env = {"ATEN_CPU_CAPABILITY": torch_capability}
        server = start("--model-id", str(tmp_path), "--cpu-isa", "portable", env=env)
        parameters = {
            "max_new_tokens": 40,
            "details": True,
            "do_sample": True,
            "temperature": 1.7,
            "seed": 3,
            "top_p": 0.9,
        }
        answer = ask(server, "/generate", {"inputs": "a river", "parameters": parameters})
        assert server.stop() == 0
        return [token["logprob"] for token in answer.json["details"]["tokens"]]

    assert logprobs("default") == logprobs("avx2")
