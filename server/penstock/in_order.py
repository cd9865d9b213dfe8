"""Runs jobs concurrently and yields their results in the order of the jobs, in bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


async def in_order(
    jobs: Iterable[Job], run: Callable[[Job], Awaitable[Result]], max_pending: int
) -> AsyncIterator[Result]:
    """The result of `run` for each job. Takes a job only when fewer than `max_pending` results are not yielded yet.

    The first error in the order of the jobs ends it. Jobs that are running when it ends are cancelled.
    """
    pending: deque[asyncio.Future[Result]] = deque()
    try:
        for job in jobs:
            if len(pending) == max_pending:
                yield await pending.popleft()
            pending.append(asyncio.ensure_future(run(job)))
            while pending and pending[0].done():
                yield pending.popleft().result()
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
