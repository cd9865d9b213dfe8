"""Files of JSON lines: every line of one is completed, and the generations are appended to another in the same order.

INVARIANT: the destination holds whole results for the first lines of the source, and at most one broken result behind
them, which the next run removes. So a run that was killed, however it was killed, goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from penstock.errors import PenstockError, RequestError
from penstock.in_order import in_order
from penstock.progress import Progress
from penstock.result import Message, Prompt, Result
from penstock.sampling import SamplingParams

_KEYS = {"id", "prompt", "messages", "params"}
_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class FileSummary:
    """What was done with the lines of a file."""

    num_resumed: int
    """Lines that earlier runs completed."""
    num_completed: int
    """Lines that this run completed, those that failed included."""
    num_failed: int
    """Lines of this run that the server refused: their results have an `error`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the source. `number` counts from 0."""

    number: int
    id: Any
    prompt: Prompt | Sequence[Message]
    params: SamplingParams
    is_chat: bool


@dataclass(frozen=True, slots=True)
class _Outcome:
    num_tokens: int
    has_failed: bool
    text: str


async def run(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    params: SamplingParams,
    complete: Callable[[Line], Awaitable[Result]],
    max_pending: int,
    *,
    progress: bool | None,
) -> FileSummary:
    """Completes the lines of `source` that `destination` has no result for."""

    async def attempt(line: Line) -> _Outcome:
        try:
            result = await complete(line)
        except RequestError as error:
            return _Outcome(0, True, _failure(line, error))
        return _Outcome(sum(len(output.token_ids) for output in result.outputs), False, _success(line, result))

    with open(source, "rb") as lines, open(destination, "a+b") as results:
        _lock(results, destination)
        # All lines are checked first: a wrong one should not end a run of hours.
        num_lines = sum(1 for _ in _read(lines, source, params))
        lines.seek(0)
        todo = _read(lines, source, params)
        num_resumed = _resume(results, destination, todo, source)
        num_completed = num_failed = 0
        with Progress(num_lines, shown=progress, initial=num_resumed) as bar:
            async for outcome in in_order(todo, attempt, max_pending):
                # Whole results, so that a kill leaves at most the last one broken.
                results.write(outcome.text.encode())
                results.flush()
                num_completed += 1
                num_failed += outcome.has_failed
                bar.add(outcome.num_tokens)
        os.fsync(results.fileno())
    return FileSummary(num_resumed, num_completed, num_failed)


def _success(line: Line, result: Result) -> str:
    """A line for each output, without the fields that the source has and those that are None."""
    left_out = {"index", "prompt"}
    rows = ({k: v for k, v in row.items() if k not in left_out and v is not None} for row in result.rows())
    return "".join(_line({"id": line.id, "num_choices": len(result.outputs), **row}) for row in rows)


def _failure(line: Line, error: RequestError) -> str:
    return _line({"id": line.id, "num_choices": 1, "choice": 0, "error": error.args[0], "status": error.status})


def _line(result: Mapping[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False) + "\n"


def _lock(results: BinaryIO, path: str | os.PathLike[str]) -> None:
    try:
        fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PenstockError(f"{os.fspath(path)} is being written by another run") from None


def _resume(
    results: BinaryIO, path: str | os.PathLike[str], todo: Iterator[Line], source: str | os.PathLike[str]
) -> int:
    """Takes the lines that have whole results from `todo`, and cuts off a broken result. Returns their number."""
    results.seek(0)
    num_lines = num_whole_bytes = num_bytes = 0
    for number, text in enumerate(results):
        if not text.endswith(b"\n"):
            break
        num_bytes += len(text)
        try:
            result = json.loads(text)
            result_id, choice, num_choices = result["id"], result["choice"], result["num_choices"]
        except (ValueError, TypeError, KeyError) as error:
            raise PenstockError(f"{os.fspath(path)}, line {number + 1} is not a result: {error}") from error
        if choice == num_choices - 1:
            line = next(todo, None)
            if line is None or line.id != result_id:
                found = "ends before" if line is None else f"has the id {line.id!r} in"
                raise PenstockError(
                    f"{os.fspath(path)}, line {number + 1} is for the id {result_id!r}, but {os.fspath(source)} "
                    f"{found} line {num_lines + 1}; choose another file for the results"
                )
            num_lines += 1
            num_whole_bytes = num_bytes
    results.truncate(num_whole_bytes)
    return num_lines


def _read(lines: Iterable[bytes], path: str | os.PathLike[str], params: SamplingParams) -> Iterator[Line]:
    for number, text in enumerate(lines):
        try:
            yield _parse(number, text, params)
        except (ValueError, TypeError) as error:
            raise PenstockError(f"{os.fspath(path)}, line {number + 1}: {error}") from error


def _parse(number: int, text: bytes, params: SamplingParams) -> Line:
    given = json.loads(text)
    if not isinstance(given, dict):
        raise TypeError(f"it is not an object with {', '.join(sorted(_KEYS))}")
    if unknown := given.keys() - _KEYS:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}; allowed are {', '.join(sorted(_KEYS))}")
    if "id" not in given:
        raise ValueError("it has no id")
    if ("prompt" in given) == ("messages" in given):
        raise ValueError("it must have either prompt or messages")
    overrides = given.get("params", {})
    if not isinstance(overrides, dict):
        raise TypeError("params is not an object")
    if unknown := overrides.keys() - _PARAMS:
        raise ValueError(f"unknown params: {', '.join(sorted(unknown))}")
    is_chat = "messages" in given
    prompt = given["messages" if is_chat else "prompt"]
    return Line(number, given["id"], prompt, dataclasses.replace(params, **overrides), is_chat)
