"""Progress on a terminal or in a notebook: of the server's start, and of the prompts, with the tokens per second."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm.auto import tqdm

_MAX_SHOWN = 100  # characters of a line of the server's log


def _is_shown(shown: bool | None) -> bool:
    return shown if shown is not None else sys.stderr.isatty() or "ipykernel" in sys.modules


class StartProgress:
    """The time since the start of the server, and what it said last: it imports, loads the model, warms up."""

    def __init__(self, *, shown: bool | None) -> None:
        self._bar = tqdm(
            bar_format="{desc} [{elapsed}]",
            desc="penstock: starting",
            disable=not _is_shown(shown),
            dynamic_ncols=True,
            leave=False,
        )

    def say(self, text: str) -> None:
        """The server's last line."""
        self._bar.set_description_str(f"penstock: {text[:_MAX_SHOWN]}")

    def close(self) -> None:
        """The server is ready, or has ended."""
        self._bar.close()


class Progress:
    """Counts prompts and generated tokens. `shown`: by default in terminals and notebooks."""

    def __init__(self, num_prompts: int | None, *, shown: bool | None, initial: int = 0) -> None:
        self._bar = tqdm(
            total=num_prompts, initial=initial, unit="prompt", disable=not _is_shown(shown), dynamic_ncols=True
        )
        self._num_tokens = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, num_tokens: int) -> None:
        """One more prompt is done."""
        self._num_tokens += num_tokens
        if not self._bar.disable:
            elapsed_s = self._bar.format_dict["elapsed"]
            if elapsed_s > 0:
                self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:.0f} tokens/s", refresh=False)
            self._bar.update()
