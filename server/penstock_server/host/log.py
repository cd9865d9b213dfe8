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


def configure() -> None:
    """Send every logger, and Python's warnings, to stderr as JSON lines: this package's from DEBUG on, others from INFO
    on. The launcher drops what is below its own level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("penstock_server").setLevel(logging.DEBUG)
    logging.captureWarnings(True)
