"""What a server writes to stderr: lines for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", …}``; the access log adds its fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def start_logging(*, as_json: bool) -> None:
    """Send the package's log, and uvicorn's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    for name, level in (("minivllm", logging.INFO), ("uvicorn", logging.WARNING)):
        package = logging.getLogger(name)
        package.handlers = [handler]
        package.setLevel(level)
        package.propagate = False
