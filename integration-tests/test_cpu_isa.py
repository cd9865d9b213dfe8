"""The instruction set of the CPU kernels, from the flag to the answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_independence import check
from binary import start
from byte_model import save


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_answers_of_portable_kernels_do_not_depend_on_the_batch(tmp_path: Path, dtype: str) -> None:
    save(tmp_path, max_tokens=128, window=None)
    server = start("--model-id", str(tmp_path), "--dtype", dtype, "--cpu-isa", "portable")
    log = "\n".join(server.lines)
    assert f"operators: native (portable in {dtype})" in log
    check(server)
    assert server.stop() == 0
