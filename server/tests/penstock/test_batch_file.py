"""Files of JSON lines: resuming after a kill at any byte, order, bounded memory, and errors."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from penstock import PenstockError, RequestError, SamplingParams
from penstock.batch_file import FileSummary, Line, run
from penstock.result import Completion, Result

MAX_PENDING = 8


def write(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prompts(num: int) -> list[dict[str, Any]]:
    return [{"id": f"é-{i}", "prompt": f"prompt {i}"} for i in range(num)]


async def complete(line: Line) -> Result:
    """Answers later prompts sooner, and refuses some."""
    for _ in range(10 - line.number % 10):
        await asyncio.sleep(0)
    if line.prompt == "prompt 3":
        raise RequestError("too long\nby far", status=400, code=None, param="prompt")
    outputs = [Completion(n, f"{line.prompt} ☃ {n}", "stop", [1, 2]) for n in range(line.params.n or 1)]
    return Result(line.number, line.prompt, outputs, [3])


def completed(source: Path, destination: Path, **params: Any) -> FileSummary:
    return asyncio.run(run(source, destination, SamplingParams(**params), complete, MAX_PENDING, progress=False))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_have_the_order_of_the_lines_and_a_refused_line_has_an_error(tmp_path: Path) -> None:
    source, destination = write(tmp_path / "in", prompts(40)), tmp_path / "out"
    assert completed(source, destination) == FileSummary(num_resumed=0, num_completed=40, num_failed=1)
    found = rows(destination)
    assert [row["id"] for row in found] == [f"é-{i}" for i in range(40)]
    assert found[3]["error"] == "too long\nby far"
    fields = {
        "choice": 0,
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "prompt_token_ids": [3],
        "num_cached_tokens": 0,
    }
    assert found[4] == {"id": "é-4", "num_choices": 1, "text": "prompt 4 ☃ 0", **fields}


def test_a_file_that_was_cut_off_at_any_byte_is_completed_to_the_same_file(tmp_path: Path) -> None:
    source, whole, cut = write(tmp_path / "in", prompts(4)), tmp_path / "whole", tmp_path / "cut"
    completed(source, whole, n=2)
    expected = whole.read_bytes()
    num_resumed = set()
    for num_bytes in range(len(expected) + 1):
        cut.write_bytes(expected[:num_bytes])
        summary = completed(source, cut, n=2)
        assert cut.read_bytes() == expected, num_bytes
        assert summary.num_resumed + summary.num_completed == 4
        num_resumed.add(summary.num_resumed)
    assert num_resumed == {0, 1, 2, 3, 4}


def test_no_more_lines_are_taken_than_wait_for_their_results(tmp_path: Path) -> None:
    running = most = 0

    async def count(line: Line) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await complete(line)
        finally:
            running -= 1

    source = write(tmp_path / "in", prompts(100))
    asyncio.run(run(source, tmp_path / "out", SamplingParams(), count, MAX_PENDING, progress=False))
    assert most == MAX_PENDING


@pytest.mark.slow
def test_100_000_lines_need_little_memory(tmp_path: Path) -> None:
    source, destination = write(tmp_path / "in", prompts(100_000)), tmp_path / "out"
    tracemalloc.start()
    assert completed(source, destination).num_completed == 100_000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert destination.stat().st_size > 10 << 20
    assert peak_bytes < 1 << 20


def test_results_of_other_lines_are_not_continued(tmp_path: Path) -> None:
    source, destination = write(tmp_path / "in", prompts(4)), tmp_path / "out"
    completed(source, destination)
    before = destination.read_bytes()
    with pytest.raises(
        PenstockError, match=r"out, line 1 is for the id 'é-0', but .*/other has the id 7 in line 1; choose"
    ):
        completed(write(tmp_path / "other", [{"id": 7, "prompt": "x"}]), destination)
    with pytest.raises(
        PenstockError, match=r"out, line 3 is for the id 'é-2', but .*/fewer ends before line 3; choose"
    ):
        completed(write(tmp_path / "fewer", prompts(2)), destination)
    assert destination.read_bytes() == before


def test_a_file_that_holds_no_results_is_kept(tmp_path: Path) -> None:
    source, destination = write(tmp_path / "in", prompts(1)), tmp_path / "notes"
    destination.write_text("my notes\n")
    with pytest.raises(PenstockError, match="notes, line 1 is not a result"):
        completed(source, destination)
    assert destination.read_text() == "my notes\n"


def test_a_second_run_on_the_same_results_is_refused(tmp_path: Path) -> None:
    source, destination = write(tmp_path / "in", prompts(1)), tmp_path / "out"

    async def nested(line: Line) -> Result:
        with pytest.raises(PenstockError, match="out is being written by another run"):
            await run(source, destination, SamplingParams(), complete, MAX_PENDING, progress=False)
        return await complete(line)

    asyncio.run(run(source, destination, SamplingParams(), nested, MAX_PENDING, progress=False))
    assert len(rows(destination)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "it is not an object with id, messages, params, prompt"),
        ({"prompt": "x"}, "it has no id"),
        ({"id": 1}, "it must have either prompt or messages"),
        ({"id": 1, "prompt": "x", "messages": []}, "it must have either prompt or messages"),
        ({"id": 1, "prompt": "x", "max_tokens": 3}, "unknown max_tokens; allowed are id, messages, params, prompt"),
        ({"id": 1, "prompt": "x", "params": {"heat": 3}}, "unknown params: heat"),
        ({"id": 1, "prompt": "x", "params": 3}, "params is not an object"),
    ],
)
def test_a_wrong_line_is_named_before_any_is_completed(tmp_path: Path, line: Any, message: str) -> None:
    source, destination = write(tmp_path / "in", [*prompts(2), line]), tmp_path / "out"
    with pytest.raises(PenstockError, match=f"in, line 3: {message}"):
        completed(source, destination)
    assert not destination.read_bytes()


def test_a_line_has_params_of_its_own(tmp_path: Path) -> None:
    seen: list[SamplingParams] = []

    async def see(line: Line) -> Sequence[Completion]:
        seen.append(line.params)
        return await complete(line)

    lines = [{"id": 1, "prompt": "a", "params": {"max_tokens": 5}}, {"id": 2, "messages": [{"role": "user"}]}]
    source = write(tmp_path / "in", lines)
    asyncio.run(run(source, tmp_path / "out", SamplingParams(seed=3), see, MAX_PENDING, progress=False))
    assert seen == [SamplingParams(seed=3, max_tokens=5), SamplingParams(seed=3)]
