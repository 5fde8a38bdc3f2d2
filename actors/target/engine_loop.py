"""The loop that runs an `EngineCore` in its own thread: commands come in from any thread, output leaves per step."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import TYPE_CHECKING, Any

from actors.shell_messages import Abort, Add, AskSnapshot, Refused, Snapshot, Status, StepOutput
from engine.accounting.engine_stats import EngineStats
from protos.block_keys import BlockKey, CacheDelta, join_keys, split_keys
from protos.errors import ServingError
from protos.messages import GenerateRequest

if TYPE_CHECKING:  # they load torch
    from engine.engine_core import EngineCore
    from engine.kv_cache.block_manager import BlockManager

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 120.0  # an engine that has work and makes no progress for longer is restarted

# A function is called between two steps, in the loop's thread. It must not raise.
Command = Add | Abort | AskSnapshot | Callable[[], None]


class EngineLoop:
    """Repeats: carry out commands, report, compute a step, emit its output.

    `stats` and `stalled_s` may be read from any thread.

    Args:
        engine: belongs to the loop's thread from now on.
        emit: takes the output of each step; called in the loop's thread, like the next two.
        before_step: called before each step, and twice a second without work.
        reporter: reports load and cache to the shell, if there is one.
        clock: seconds.
    """

    def __init__(
        self,
        engine: EngineCore,
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
        self._preparing: dict[str, tuple[GenerateRequest, Future[Any]]] = {}  # by id, until the future is done
        self._wake = threading.Event()
        self._is_closing = False
        self._stalled_since_s: float | None = None  # None while idle or after progress
        self._next_report_s = -inf  # no report before it while the engine is busy
        self._turned_s: float | None = None  # the start of the current turn; None while the loop sleeps or does not run
        self._num_queued_tokens = 0

    @property
    def stalled_s(self) -> float:
        """Seconds without progress while the engine has work: no output, and no prompt tokens computed.

        A turn of the loop that hangs counts as well, wherever it hangs.
        """
        begins_s = [each for each in (self._stalled_since_s, self._turned_s) if each is not None]
        return self._clock() - min(begins_s) if begins_s else 0.0

    def submit(self, command: Command) -> None:
        """Queue a command and return at once; it is carried out before the next step.

        The slow part of an `Add` runs in a separate thread, so that steps and other commands do not wait for it.
        """
        self._commands.append(command)
        self.wake()

    def abort_all(self) -> None:
        """Queue the end of every request, because the shell is gone."""
        self.submit(self._abort_all)

    def wake(self) -> None:
        """Wake the loop, because there is news for the engine. May be called from any thread."""
        self._wake.set()

    def run(self) -> None:
        """Compute until `close`. An error of a step passes through, and the engine is unusable after it."""
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
                self._next_report_s = -inf  # a client that has its answer finds it counted
                self._report()
            self._emit(StepOutput(tuple(chunks)))

    def _report(self) -> None:
        """Report the stats: at once when the engine starts or stops working, else at an interval."""
        now_s = self._clock()
        is_busy = self._engine.has_work and not self._engine.is_starved
        if is_busy and now_s < self._next_report_s:
            return
        # Not after each pass: the counters would have to be read from memory.
        self._next_report_s = now_s + 0.05 if is_busy else -inf
        self.stats = self._engine.stats()
        if self._reporter is not None:
            self._reporter.report(self.stats)

    def _sleep(self) -> None:
        self._turned_s = None
        if not self._commands and not self._is_closing:
            # `before_step` runs without work too, so that an idle engine meets a new draft process.
            self._wake.wait(0.5)
        self._wake.clear()

    def _carry_out_commands(self) -> None:
        while self._commands:
            match self._commands.popleft():
                case Add(request):
                    self._prepare(request)
                case Abort(request_id):
                    self._preparing.pop(request_id, None)
                    self._engine.abort(request_id)
                case AskSnapshot():
                    if self._reporter is not None:
                        self._reporter.send_snapshot()
                case act:
                    act()
        self._add_prepared()

    def _abort_all(self) -> None:
        self._preparing.clear()
        self._engine.close()

    def _prepare(self, request: GenerateRequest) -> None:
        """Add a request, or start its preparation and add it afterwards."""
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
        # The message is left out: it may quote a schema, and text of a prompt is never logged.
        logger.info("request %s: refused: %s of %s", request.request_id, type(error).__name__, error.param)
        self._emit(Refused.of(request.request_id, error))


class StatusReporter:
    """Sends load and cache to the shell if they have changed. The engine's thread calls it between two steps.

    Changes of `blocks`' cache are summed up until the next message. `emit` sends a message.
    """

    def __init__(
        self,
        emit: Callable[[Status | Snapshot], None],
        blocks: BlockManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._blocks = blocks
        self._clock = clock
        self._last_load: tuple[int, ...] | None = None
        self._is_stored: dict[BlockKey, bool] = {}  # blocks stored or removed since the last message
        self._is_cleared = False
        blocks.add_sink(self._record)

    def report(self, stats: EngineStats) -> None:
        """Send a frame if load or cache has changed since the last frame."""
        load = (
            stats.num_waiting,
            stats.num_running,
            stats.num_queued_prefill_tokens,
            stats.num_running_decode_tokens,
        )
        if load == self._last_load and not self._is_stored and not self._is_cleared:
            return
        self._last_load = load
        self._emit(Status(self._clock(), stats, self._take()))

    def send_snapshot(self) -> None:
        """Send the whole cache, which includes the changes so far."""
        self._take()
        self._emit(Snapshot(join_keys(self._blocks.cached_keys)))
        self._last_load = None

    def _record(self, delta: CacheDelta) -> None:
        """Add a change; changes arrive in order."""
        if delta.is_cleared:
            self._is_stored = {}
            self._is_cleared = True
        self._is_stored.update(dict.fromkeys(split_keys(delta.removed), False))
        self._is_stored.update(dict.fromkeys(split_keys(delta.stored), True))

    def _take(self) -> CacheDelta:
        """Return the sum of the changes since the last call, and start over."""
        delta = CacheDelta(
            stored=join_keys(key for key, is_stored in self._is_stored.items() if is_stored),
            removed=join_keys(key for key, is_stored in self._is_stored.items() if not is_stored),
            is_cleared=self._is_cleared,
        )
        self._is_stored = {}
        self._is_cleared = False
        return delta
