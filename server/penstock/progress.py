"""A progress bar, with the tokens per second."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm.auto import tqdm


class Progress:
    """Counts prompts and generated tokens. `shown`: by default in terminals and notebooks."""

    def __init__(self, num_prompts: int | None, *, shown: bool | None, initial: int = 0) -> None:
        if shown is None:
            shown = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar = tqdm(total=num_prompts, initial=initial, unit="prompt", disable=not shown, dynamic_ncols=True)
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
