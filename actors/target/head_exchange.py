"""Exchanges the target's head while it serves: loads in a thread, and changes over between two steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from actors.draft.draft_process import checked
from actors.settings import DraftChoice, write_choice
from actors.shell_messages import HeadAnswer, HeadFailure, OrderHead, Refused, RunningHead
from engine.config import HeadConfig
from engine.engine_core import EngineCore
from engine.model.draft_heads.checkpoint import head_folder, head_version
from engine.model.draft_heads.loader import Head
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.own_proposers import HeadReport
from protos.errors import ConfigError, RequestError, ServingError
from protos.served_model import digest

logger = logging.getLogger(__name__)


class _LoadedHead(NamedTuple):
    path: str
    digest: str
    head: Head


class HeadExchange:
    """Carries out the shell's orders, one after the other; at most two heads are in memory.

    It watches a new head. If the target ends before that head has served, or its drafts are not finite, the previous
    head drafts again.

    Args:
        core: its head has files of its own.
        config: of the running head.
        deployed_path: the head of deploy.yaml.
        failure: of the head that this process should have started with.
        folder: keeps the path of the head for the next start of this process.
        has_prefill: the KV of deploy.yaml's head comes from prefill replicas.
        submit: queues a function for the engine's loop.
        emit: sends answers to the shell.
    """

    def __init__(
        self,
        core: EngineCore,
        config: HeadConfig,
        deployed_path: str,
        failure: HeadFailure | None,
        folder: Path,
        *,
        has_prefill: bool,
        submit: Callable[[Callable[[], None]], None],
        emit: Callable[[HeadAnswer], None],
    ) -> None:
        assert config.path is not None, "it has files of its own"
        assert isinstance(core.runner, ModelRunner), "from_config loads one"
        assert core.runner.head is not None, "it is loaded"
        self._core, self._runner, self._config = core, core.runner, config
        self._deployed_path, self._folder, self._submit, self._emit = deployed_path, folder, submit, emit
        self._has_prefill = has_prefill and config.kind.keeps_kv
        self._running = _LoadedHead(config.path, self._digest(config.path), core.runner.head)
        self._other: _LoadedHead | None = None  # the previous head, or a checked one
        self._previous_path, self._is_on_trial = config.path, False  # the last that served before the running one
        self._failure = failure
        # Steps go first.
        self._worker = ThreadPoolExecutor(1, "head-loader", initializer=os.nice, initargs=(10,))
        if failure is not None:
            self._worker.submit(self._keep)

    @property
    def running(self) -> RunningHead:
        """The head that drafts. May be read from any thread."""
        return RunningHead(self._running.path, self._running.digest, self._failure)

    def carry_out(self, order: OrderHead) -> None:
        """Begin an order and return at once; a message answers it."""
        self._worker.submit(self._answer, order)

    def _answer(self, order: OrderHead) -> None:
        try:
            loaded = self._loaded(order.path)
            if not order.is_check and loaded is not self._running:
                self._try(loaded)
            self._emit(HeadAnswer(order.order_id, loaded.digest))
        except ServingError as error:
            self._emit(HeadAnswer(order.order_id, refusal=Refused.of("", error)))
        except Exception as error:  # whatever a damaged file makes the libraries raise
            logger.exception("the head %s cannot be loaded", order.path)
            refusal = RequestError(f"The draft {order.path!r} cannot be loaded: {error}", param="path")
            self._emit(HeadAnswer(order.order_id, refusal=Refused.of("", refusal)))

    def _try(self, loaded: _LoadedHead) -> None:
        previous_path = self._previous_path if self._is_on_trial else self._running.path
        write_choice(self._folder, DraftChoice(previous_path, tried=loaded.path))
        self._change_to(loaded, self._on_report)
        self._previous_path, self._is_on_trial, self._failure = previous_path, True, None

    def _loaded(self, path: str) -> _LoadedHead:
        """Return the head at `path`, from memory if its files have not changed."""
        for each in (self._running, self._other):
            if each is not None and each.path == path and not self._has_changed(each):
                return each
        if self._has_prefill:
            raise ConfigError(
                "prefill replicas compute keys and values of deploy.yaml's head; set draft.path there and deploy again"
            )
        # Only deploy.yaml may name a repository of the Hub.
        with checked(str(head_folder(path)) if path == self._deployed_path else path):
            self._other = None  # its memory is needed
            self._other = _LoadedHead(path, self._digest(path), self._runner.load_head(path))
        return self._other

    def _has_changed(self, loaded: _LoadedHead) -> bool:
        try:
            return self._digest(loaded.path) != loaded.digest
        except (OSError, ConfigError):
            return False  # the files are gone, and the loaded head is all that is left

    def _change_to(self, loaded: _LoadedHead, report: HeadReport | None) -> None:
        """Exchange the heads between two steps."""
        done: Future[None] = Future()

        def exchange() -> None:
            try:
                self._core.exchange_head(loaded.head, report)
                self._other, self._running = self._running, loaded
                done.set_result(None)
            except Exception as error:  # the order fails, and the steps go on
                done.set_exception(error)

        self._submit(exchange)
        done.result()

    def _on_report(self, has_served: bool) -> None:
        """End the trial of the running head, or go back to the previous one."""
        self._worker.submit(self._end_trial if has_served else self._go_back, self._running)

    def _end_trial(self, served: _LoadedHead) -> None:
        if served is self._running:
            self._is_on_trial = False
            self._keep()

    def _go_back(self, failed: _LoadedHead) -> None:
        """Replace a head whose drafts were not finite, unless an order has. The previous head is not watched."""
        if failed is not self._running:
            return
        reason = "its drafts were not finite"
        logger.error("the head %s is replaced by %s: %s", failed.path, self._previous_path, reason)
        try:
            self._change_to(self._loaded(self._previous_path), None)
        except Exception:
            logger.exception("the head %s cannot be loaded again; n-grams draft", self._previous_path)
            return
        self._is_on_trial, self._failure = False, HeadFailure(failed.path, reason)
        self._keep()

    def _keep(self) -> None:
        """Let the next start load the running head."""
        try:
            write_choice(self._folder, DraftChoice(self._running.path))
        except OSError:
            logger.exception("a restarted target will not find the head %s", self._running.path)

    def _digest(self, path: str) -> str:
        return digest(str(self._config.kind), head_version(path))
