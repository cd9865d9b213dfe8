"""Logging: one JSON object per line on stderr, which the launcher re-emits with the rank."""

from __future__ import annotations

import json
import logging
import sys


class JsonFormatter(logging.Formatter):
    """{"level", "message", "target"}; a traceback is part of the message."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        return json.dumps({"level": level, "message": message, "target": record.name}, ensure_ascii=False)


def configure(level: int = logging.INFO) -> None:
    """Send every logger, and Python's warnings, to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
