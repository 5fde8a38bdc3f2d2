"""The loop that runs an `EngineCore` in its own thread: commands come in from any thread, output leaves per step."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from actors.engine_loop.status_reporter import StatusReporter
from actors.shell_messages import Abort, Add, AskSnapshot, Refused, StepOutput
from engine.stats.engine_stats import EngineStats
from protos.errors import ServingError
from protos.messages import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)


_REPORT_S = 0.05  # between two looks at the numbers of an engine that works: they are out of the cache behind a pass
_IDLE_TURN_S = 0.5  # between calls of `before_step` without work: a draft process that is back is met while idle


class Engine(Protocol):
    """The part of `engine.engine_core.EngineCore` that the loop needs."""

    @property
    def has_work(self) -> bool: ...

    def prepare(self, request: GenerateRequest) -> Future[Any] | None: ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str) -> TokenChunk | None: ...

    def step(self) -> list[TokenChunk]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...

    @property
    def is_starved(self) -> bool: ...


class AbortAll:
    """Abort every request: the shell is gone."""


@dataclass(frozen=True, slots=True)
class Do:
    """Call a function between two steps, in the loop's thread. It must not raise."""

    act: Callable[[], None]


Command = Add | Abort | AbortAll | AskSnapshot | Do


class EngineLoop:
    """Repeats: take commands, report, compute a step, emit its output.

    `stats` and `stalled_s` may be read from any thread.

    Args:
        engine: belongs to the loop's thread from now on.
        emit: takes the output of each step; called in the loop's thread, as are the next two.
        before_step: called before each step, and twice a second without work.
        reporter: reports load and cache to the shell, if there is one.
        clock: seconds.
    """

    def __init__(
        self,
        engine: Engine,
        emit: Callable[[StepOutput | Refused], None],
        before_step: Callable[[], None] = lambda: None,
        reporter: StatusReporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = engine.stats()
        self._engine = engine
        self._emit = emit
        self._before_step = before_step
        self._reporter = reporter
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._preparing: dict[str, tuple[GenerateRequest, Future[Any]]] = {}  # by id; they join when that is done
        self._wake = threading.Event()
        self._is_closing = False
        self._stalled_since_s: float | None = None  # None: nothing to do, or something has just come of it
        self._next_report_s = -inf  # none before it while the engine works
        self._turned_s: float | None = None  # the begin of the current turn; None while it sleeps, or does not run
        self._num_queued_tokens = 0

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has had work and nothing came of it: no output, and no prompt was read on.

        A thread that is stuck between two steps counts too, in whatever it does there, and has no work to be seen.
        """
        begins_s = [each for each in (self._stalled_since_s, self._turned_s) if each is not None]
        return self._clock() - min(begins_s) if begins_s else 0.0

    def submit(self, command: Command) -> None:
        """Hand a command to the loop and return at once; it is carried out before the next step.

        The slow part of an `Add` is done in a thread of its own, so that no step waits for it, and no other command.
        """
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Take the next step now, if there is work: there is news for the engine. May be called from any thread."""
        self._wake.set()

    def run(self) -> None:
        """Compute until `close`. An error of a step passes through, and the engine is of no use after it."""
        while not self._is_closing:
            self._turned_s = self._clock()
            self._carry_out_commands()
            self._before_step()
            self._report()
            if not self._engine.has_work:
                self._stalled_since_s = None
                self._sleep()
                continue
            self._step()
            if self._engine.is_starved:
                self._report()
                self._sleep()
        self._engine.close()

    def close(self) -> None:
        """Make `run` return after its current step."""
        self._is_closing = True
        self._wake.set()

    def _step(self) -> None:
        num_queued_tokens = self.stats.num_queued_prefill_tokens
        if self._stalled_since_s is None or num_queued_tokens < self._num_queued_tokens:
            self._stalled_since_s = self._clock()
        self._num_queued_tokens = num_queued_tokens
        if chunks := self._engine.step():
            self._stalled_since_s = None
            if any(chunk.finish_reason is not None for chunk in chunks):
                self._next_report_s = -inf  # a client with an answer finds it in the numbers
                self._report()
            self._emit(StepOutput(tuple(chunks)))

    def _report(self) -> None:
        """Report the stats: at once where the engine begins to work or to wait, else not after every short step."""
        now_s = self._clock()
        is_busy = self._engine.has_work and not self._engine.is_starved
        if is_busy and now_s < self._next_report_s:
            return
        self._next_report_s = now_s + _REPORT_S if is_busy else -inf
        self.stats = self._engine.stats()
        if self._reporter is not None:
            self._reporter.report(self.stats)

    def _sleep(self) -> None:
        self._turned_s = None
        if not self._commands and not self._is_closing:
            self._wake.wait(_IDLE_TURN_S)
        self._wake.clear()

    def _carry_out_commands(self) -> None:
        while self._commands:
            match self._commands.popleft():
                case Add(request):
                    self._prepare(request)
                case Abort(request_id):
                    self._preparing.pop(request_id, None)
                    self._engine.abort(request_id)
                case AbortAll():
                    self._preparing.clear()
                    self._engine.close()
                case Do(act):
                    act()
                case AskSnapshot():
                    if self._reporter is not None:
                        self._reporter.send_snapshot()
        self._add_prepared()

    def _prepare(self, request: GenerateRequest) -> None:
        """Add a request, or have it wait for what is made for it."""
        try:
            prepared = self._engine.prepare(request)
        except ServingError as error:
            self._refuse(request, error)
            return
        if prepared is None:
            self._add(request)
        else:
            self._preparing[request.request_id] = request, prepared
            prepared.add_done_callback(lambda _: self.wake())

    def _add_prepared(self) -> None:
        for request, prepared in list(self._preparing.values()):
            if prepared.done():
                del self._preparing[request.request_id]
                self._add(request)

    def _add(self, request: GenerateRequest) -> None:
        try:
            self._engine.add(request)
        except ServingError as error:
            self._refuse(request, error)

    def _refuse(self, request: GenerateRequest, error: ServingError) -> None:
        # Not its message, which may quote a schema: no text of a prompt is logged.
        logger.info("request %s: refused: %s of %s", request.request_id, type(error).__name__, error.param)
        self._emit(Refused.of(request.request_id, error))
