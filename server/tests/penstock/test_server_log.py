"""The log of a server that `LLM` starts: when it is ready, why it failed, and what a terminal shows meanwhile."""

from __future__ import annotations

import json

import pytest
from penstock.progress import StartProgress
from penstock.server_log import ServerLog


def line(message: str, level: str = "INFO", **fields: str) -> str:
    return json.dumps({"level": level, "fields": {"message": message, **fields}}) + "\n"


def test_a_start_is_shown_from_its_first_second_until_the_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StartProgress(shown=True)
    assert "penstock: starting [00:00]" in capsys.readouterr().err
    log = ServerLog([line("loading weights"), line("ready", url="unix"), line("a request")], progress)
    log.wait_for_end()
    assert log.is_ready.result(0)
    shown = capsys.readouterr().err
    assert "penstock: loading weights" in shown
    assert "a request" not in shown


def test_a_start_is_not_shown_where_it_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    log = ServerLog([line("no memory", level="ERROR")], StartProgress(shown=False))
    log.wait_for_end()
    assert not log.is_ready.result(0)
    assert log.reason() == "no memory"
    assert capsys.readouterr().err == ""
