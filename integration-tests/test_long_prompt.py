"""Running streams advance in every step that computes a part of a long prompt."""

from __future__ import annotations

import re
from pathlib import Path

from binary import Server, start
from byte_model import save
from client import ask, send

STEP_TOKENS, PROMPT_TOKENS, STREAM_TOKENS = 64, 1500, 1800


def num_steps(server: Server) -> dict[str, int]:
    """Steps that the server has finished; `prefill` are those that compute any prompt."""
    found = re.findall(
        r'^tgi_batch_inference_count\{method="(\w+)"\} (\d+)', ask(server, "/metrics").text, re.MULTILINE
    )
    return {method: int(count) for method, count in found}


def test_a_stream_gets_a_token_in_every_step_of_a_long_prompt(tmp_path: Path) -> None:
    save(tmp_path, max_tokens=2048, window=None)
    server = start("--model-id", str(tmp_path), "--max-batch-prefill-tokens", str(STEP_TOKENS))
    parameters = {"max_new_tokens": STREAM_TOKENS, "decoder_input_details": False}
    connection, stream = send(server, "/generate_stream", {"inputs": "a river", "parameters": parameters})
    assert stream.readline()  # it is running
    prompt = {"inputs": "x" * PROMPT_TOKENS, "parameters": {"max_new_tokens": 1}}
    assert ask(server, "/generate", prompt).status == 200
    assert "tgi_batch_current_size 1" in ask(server, "/metrics").text, "the stream ended before the prompt"
    assert stream.read().count(b"data:") == STREAM_TOKENS - 1
    connection.close()
    steps = num_steps(server)
    # The prompt took many steps, and none of them was without a token of the stream; two were in flight when it ended.
    assert steps["prefill"] > PROMPT_TOKENS // STEP_TOKENS
    assert steps["prefill"] + steps["decode"] <= STREAM_TOKENS + 2
    assert server.stop() == 0
