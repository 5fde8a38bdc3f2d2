"""Exchanges the target's head while it serves: loads in a thread, and changes over between two steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from actors.draft.candidate_check import checked
from actors.draft.draft_actor import DraftChoice, write_choice
from actors.engine_loop.engine_loop import Do
from actors.shell_messages import HeadLoaded, OrderHead, Refused, RunningHead
from engine.config import HeadConfig
from engine.engine_core import EngineCore
from engine.model.checkpoint.completeness import refuse_not_finite
from engine.model.draft_heads.loader import Head
from engine.model.loader import model_version
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError, RequestError, ServingError
from protos.fingerprint import digest

logger = logging.getLogger(__name__)


class _LoadedHead(NamedTuple):
    path: str
    digest: str
    head: Head


class HeadExchange:
    """Carries out the shell's orders, one after the other; at most two heads are in memory.

    Args:
        core: its head has files of its own.
        config: of the running head.
        folder: keeps the path of the running head for the next start of this process.
        has_prefill: the KV of deploy.yaml's head comes from prefill replicas.
        submit: queues a command for the engine's loop.
        emit: sends answers to the shell.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        config: HeadConfig,
        folder: Path,
        *,
        has_prefill: bool,
        submit: Callable[[Do], None],
        emit: Callable[[HeadLoaded | Refused], None],
    ) -> None:
        assert config.path is not None, "it has files of its own"
        assert runner.head is not None, "it is loaded"
        self._core, self._runner, self._config = core, runner, config
        self._folder, self._submit, self._emit = folder, submit, emit
        self._has_prefill = has_prefill and config.kind.keeps_kv
        self._running = _LoadedHead(config.path, self._digest(config.path), runner.head)
        self._other: _LoadedHead | None = None  # the previous head, or a checked one
        self._failed_path = ""
        # Steps go first.
        self._worker = ThreadPoolExecutor(1, "head-loader", initializer=os.nice, initargs=(10,))
        core.on_head_failed = self._note_failure

    @property
    def running(self) -> RunningHead:
        """The head that drafts. May be read from any thread."""
        return RunningHead(self._running.path, self._running.digest, self._failed_path)

    def carry_out(self, order: OrderHead) -> None:
        """Begin an order and return at once; a message answers it."""
        self._worker.submit(self._answer, order)

    def _answer(self, order: OrderHead) -> None:
        self._failed_path = ""
        try:
            loaded = self._in_memory(order.path)  # the way back needs no check
            if loaded is None:
                with checked(order.path) as folder:
                    refuse_not_finite(folder)
                    loaded = self._load(order.path)
            if not order.is_check:
                self._between_steps(partial(self._exchange, loaded))
                self._write()
            self._emit(HeadLoaded(order.order_id, loaded.digest))
        except ServingError as error:
            self._emit(Refused.of(order.order_id, error))
        except Exception as error:  # whatever a damaged file makes the libraries raise
            logger.exception("the head %s cannot be loaded", order.path)
            reason = f"The draft {order.path!r} cannot be loaded: {error}"
            self._emit(Refused.of(order.order_id, RequestError(reason, param="path")))

    def _in_memory(self, path: str) -> _LoadedHead | None:
        """Return the head at `path` if it is loaded and its files have not changed."""
        heads = [each for each in (self._running, self._other) if each is not None and each.path == path]
        return next((each for each in heads if each.digest == self._digest(path)), None)

    def _load(self, path: str) -> _LoadedHead:
        if self._has_prefill:
            raise ConfigError(
                "prefill replicas compute keys and values of deploy.yaml's head; set draft.path there and deploy again"
            )
        self._between_steps(self._drop_other)
        self._other = _LoadedHead(path, self._digest(path), self._runner.load_head(path))
        return self._other

    def _between_steps(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def act_now() -> None:
            try:
                act()
                done.set_result(None)
            except Exception as error:  # the order fails, and the steps go on
                done.set_exception(error)

        self._submit(Do(act_now))
        done.result()

    def _drop_other(self) -> None:
        """Free the memory of the head that does not run, before another one is read. The running one stays then."""
        self._core.keep_head()
        self._other = None

    def _exchange(self, loaded: _LoadedHead) -> None:
        if loaded is not self._running:
            self._core.exchange_head(loaded.head)
            self._keep(loaded)

    def _note_failure(self) -> None:
        """The engine has gone back to the previous head."""
        assert self._other is not None, "the engine had it"
        self._failed_path = self._running.path
        logger.error("drafts of the head %s are not finite, going back to %s", self._failed_path, self._other.path)
        self._keep(self._other)
        self._worker.submit(self._write)

    def _keep(self, loaded: _LoadedHead) -> None:
        self._other, self._running = self._running, loaded

    def _write(self) -> None:
        """Keep the path of the running head. The worker writes it, since steps wait for no disk."""
        try:
            write_choice(self._folder, DraftChoice(self._running.path, 1))
        except OSError:
            logger.exception("a restarted target will not find the head %s", self._running.path)

    def _digest(self, path: str) -> str:
        return digest(str(self._config.kind), model_version(path))
