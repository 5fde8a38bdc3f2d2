"""The common parts of a pair's processes: thread, sockets, and log lines. Ray collects standard error in files.

With `OUTRIDER_LOG_FORMAT=json` each line is one JSON object. A message that starts with `request %s` gets that id as
a separate field.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from protos.client_text import guard_logs
from protos.errors import ConfigError

FORMAT_VARIABLE = "OUTRIDER_LOG_FORMAT"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OF_A_REQUEST = "request %s"


def is_json_wanted() -> bool:
    """True if the environment selects JSON.

    Raises:
        ConfigError: the variable is not text or json.
    """
    chosen = os.environ.get(FORMAT_VARIABLE) or "text"
    if chosen not in ("text", "json"):
        raise ConfigError(f"{FORMAT_VARIABLE} is {chosen!r}; set it to text or json")
    return chosen == "json"


def configure_logging(is_replica: bool = False) -> None:
    """Give this process's root logger a handler; model libraries log warnings only.

    Serve itself converts its replicas' lines to JSON, so they stay text here.
    """
    guard_logs()
    logging.basicConfig(level=logging.INFO, format=_TEXT)
    if is_json_wanted() and not is_replica:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
    for name in ("transformers", "httpx", "httpx2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, message, and if present request id and error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if str(record.msg).startswith(_OF_A_REQUEST) and isinstance(record.args, tuple) and record.args:
            line["request_id"] = str(record.args[0])
        if record.exc_info:
            line["error"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
