"""Codex CLI and Claude Code, where npm has installed them (@openai/codex, @anthropic-ai/claude-code).

The small model's answer does not matter; the agents must understand it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from binary import Server

pytestmark = pytest.mark.slow

PROVIDER = """
model = "tgi"
model_provider = "penstock"
check_for_update_on_startup = false
model_instructions_file = "instructions.md" # its own are long for the model's context
[features]
goals = false
[analytics]
enabled = false
[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "PENSTOCK_API_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / ".codex").mkdir()
    return tmp_path


def run(command: list[str], home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(
        command,
        cwd=home / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_codex_does_a_task(server: Server, home: Path) -> None:
    (home / ".codex/config.toml").write_text(PROVIDER.format(url=server.url))
    (home / ".codex/instructions.md").write_text("You are a coding agent.")
    done = run(["codex", "exec", "--skip-git-repo-check", "--json", "Say hello"], home, PENSTOCK_API_KEY="-")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    # An answer that fills the context is incomplete, as Codex understands.
    full = [event for event in events if event["type"] == "turn.failed" and "max_output_tokens" in str(event)]
    assert done.returncode == 0 or full, done.stdout + done.stderr


def test_claude_code_does_a_task(server: Server, home: Path) -> None:
    # Its own prompt and tools are longer than the model's context.
    options = ["--tools", "Read", "--system-prompt", "You answer briefly.", "--output-format", "json"]
    done = run(
        ["claude", *options, "-p", "Say hello"],
        home,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_AUTH_TOKEN="-",
        ANTHROPIC_MODEL="tgi",
        ANTHROPIC_SMALL_FAST_MODEL="tgi",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="100",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        DISABLE_TELEMETRY="1",
    )
    result = json.loads(done.stdout)
    # Claude Code asks again a few times after an answer that is cut.
    is_cut = "output token maximum" in result["result"]
    assert (done.returncode, result["is_error"]) == (0, False) or is_cut, done.stdout + done.stderr
