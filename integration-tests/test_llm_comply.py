"""The tests of llm-comply, which compare answers and streams with each vendor's API. They run where it is installed:

python -m pip install llm-comply==0.5.0
python -m pytest -m slow integration-tests/test_llm_comply.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from binary import Server, start

pytestmark = pytest.mark.slow

# The tests send no temperature, and few of them a limit. The server's limit is small, so that answers end soon, and an
# answer may end there.
AT_THE_LIMIT = "got 'length',got 'incomplete',got 'max_tokens',got 'model_context_window_exceeded'"
# Tests that do not apply.
EXCLUDED = {
    "openai-chat": {
        "chat-image-input": "the model reads text only",
        "chat-error-handling": "a request without a model is accepted, as in TGI",
    },
    "open-responses": {"image-input": "the model reads text only"},
    "anthropic": {"anth-image-input": "the model reads text only"},
}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    running = start("--max-total-tokens", "1024", "--max-input-tokens", "1000")
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("dialect", EXCLUDED)
def test_every_applicable_test_of_llm_comply_passes(small: Server, dialect: str) -> None:
    if (program := shutil.which("llm-comply")) is None:
        pytest.skip("llm-comply is not installed")
    options = ["-u", f"{small.url}/v1", "-k", "-", "-m", "tgi", "--format", dialect]
    run = subprocess.run(
        [program, *options, "--timeout", "240", "--json", "-i", AT_THE_LIMIT],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    results = json.loads(run.stdout)["results"]
    failed = {result["id"] for result in results if result["status"] == "failed"}
    assert len(results) >= 9
    assert failed == set(EXCLUDED[dialect]), run.stdout
