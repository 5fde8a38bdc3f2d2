"""Log lines of the pair's own processes; Ray collects their standard error, one file per process."""

from __future__ import annotations

import logging


def configure_logging() -> None:
    """Give this process's root logger a handler; model libraries log warnings only."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("transformers", "httpx", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
