"""Loads and serves an actor's model in a thread, so that the actor itself stays responsive."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protos.errors import EngineError, ServingError
from protos.linux import keep_cores

logger = logging.getLogger(__name__)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection during imports, and exempt the imported objects from it afterwards.

    Collection takes a fifth of the import time of torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class ActorThread:
    """Runs `main(is_ready)`, which calls `is_ready()` once it serves, and serves until the process is killed.

    `wait_ready` raises a failure before that. A later failure ends the whole process: its state is in doubt, Ray
    restarts the actor, and its peers start over. `niceness` is added to the niceness of this thread and its children,
    which get long slices of a core (`keep_cores`). Other threads of the process are unchanged.
    """

    def __init__(self, name: str, main: Callable[[Callable[[], None]], None], niceness: int = 0) -> None:
        self._main = main
        self._niceness = niceness
        self._is_settled = threading.Event()
        self._failure: ServingError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the actor serves.

        Raises:
            ServingError: it failed to start, or took longer than `timeout_s`.
        """
        if not self._is_settled.wait(timeout_s):
            raise EngineError(f"{self._thread.name} did not start within {timeout_s} s; search Ray's logs for it")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            os.nice(self._niceness)  # of the thread, on Linux
            keep_cores()
            self._main(self._settle)
        except BaseException as error:  # Rust libraries panic with direct subclasses of it
            logger.exception("%s failed", self._thread.name)
            if self._is_settled.is_set():
                os._exit(1)
            self._failure = error if isinstance(error, ServingError) else EngineError(f"{self._thread.name}: {error}")
            self._is_settled.set()

    def _settle(self) -> None:
        """Exclude all loaded objects from garbage collection: walking 440,000 objects costs a step 0.3 s."""
        gc.collect()
        gc.freeze()
        self._is_settled.set()
