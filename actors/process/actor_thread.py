"""Loads and serves an actor's model in a thread, so that the actor itself stays responsive."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from protos.errors import ConfigError, EngineError, ServingError
from protos.linux import keep_cores

logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, torch's compiler and its sharded tensors, which serving does not use.

    They take most of the time of importing torch and transformers, and the last two 150 MB. Imported objects stay
    exempt from collection.
    """
    gc.disable()
    try:
        import torch.distributed

        is_available = torch.distributed.is_available
        torch.distributed.is_available = lambda: False  # asked by transformers, once, when it is imported
        try:
            with without_compiler():
                yield
        finally:
            torch.distributed.is_available = is_available
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import and load models without torch's compiler, whose decorators load it and change nothing here."""
    stand_in = _NoCompiler(_COMPILER)
    sys.modules.setdefault(_COMPILER, stand_in)
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]


class _NoCompiler(ModuleType):
    """`torch._dynamo` as far as models need it until they serve; the real one is loaded if more of it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = spec = find_spec(name) if name not in sys.modules else None  # others may look for it too
        self.__path__ = [] if spec is None else list(spec.submodule_search_locations or ())
        self.disable = self.allow_in_graph = self.assume_constant_result = _unchanged

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(import_module(_COMPILER), name)


def _unchanged(function: Any = None, *_args: object, **_options: object) -> Any:
    return _unchanged if function is None else function


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

    @property
    def is_settled(self) -> bool:
        """True if `wait_ready` would not wait."""
        return self._is_settled.is_set()

    def wait_ready(self, timeout_s: float = 1800.0) -> None:
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
            # A ConfigError is a sentence for the operator; a traceback would only hide it.
            logger.error("%s failed: %s", self._thread.name, error, exc_info=not isinstance(error, ConfigError))
            if self._is_settled.is_set():
                os._exit(1)
            self._failure = error if isinstance(error, ServingError) else EngineError(f"{self._thread.name}: {error}")
            self._is_settled.set()

    def _settle(self) -> None:
        """Exclude all loaded objects from garbage collection: walking 440,000 objects costs a step 0.3 s."""
        gc.collect()
        gc.freeze()
        self._is_settled.set()
