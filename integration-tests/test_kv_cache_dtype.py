"""A KV cache in fp8, from the flag to the answers."""

from __future__ import annotations

from pathlib import Path

from batch_independence import check
from binary import start
from byte_model import save


def test_answers_from_an_fp8_cache_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    save(tmp_path, max_tokens=128, window=None)
    server = start("--model-id", str(tmp_path), "--dtype", "float32", "--kv-cache-dtype", "fp8_e4m3fn")
    log = "\n".join(server.lines)
    assert "keys and values are stored in float8_e4m3fn" in log
    assert "which is slow" not in log
    check(server)
    assert server.stop() == 0
