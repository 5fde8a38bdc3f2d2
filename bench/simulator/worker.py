"""A simulated worker: a queue, one prefill at a time, streams that decode beside it, and a prefix cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.simulator.block_cache import BlockCache
from bench.simulator.clock import Clock
from bench.simulator.prefill_pool import PrefillPool
from bench.simulator.rates import ServingRates
from bench.simulator.trace import TraceRequest, num_cached_blocks
from protos.block_keys import join_keys
from protos.cache_delta import CacheDelta
from protos.worker_load import WorkerLoad


@dataclass(frozen=True, slots=True)
class Job:
    """A request on its worker.

    `uncached_tokens` is what the cache leaves to compute, known for sure when prefill starts.
    """

    number: int
    request: TraceRequest
    num_cached_blocks: int
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """The receiver of a worker's news."""

    on_first_token: Callable[[str, Job], None]
    on_end: Callable[[Job], None]
    on_load: Callable[[WorkerLoad], None]
    on_change: Callable[[str, int, CacheDelta], None]  # with the worker's id and the delta's number


class SimulatedWorker:
    """Prefills first come, first served; a cached prefix is looked up when prefill starts and published when it ends.

    Streams decode beside prefill and slow it down by the context they hold (`ServingRates.decode_slowdown`). Blocks of
    running streams are not pinned. With a prefill pool, prompts go there when the pool would be done sooner.
    """

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        cache: BlockCache,
        rates: ServingRates,
        block_size: int,
        ports: WorkerPorts,
        pool: PrefillPool | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.busy_s = 0.0
        self._clock = clock
        self._cache = cache
        self._rates = rates
        self._block_size = block_size
        self._ports = ports
        self._pool = pool
        self._waiting: deque[Job] = deque()
        self._waiting_tokens = 0
        self._current: Job | None = None
        self._current_ends_s = 0.0
        self._current_speed = 1.0  # tokens per second
        self._num_remote = 0
        self._num_decoding = 0
        self._decode_tokens = 0
        self._sequence = 0

    def accept(self, number: int, request: TraceRequest) -> None:
        """Queue a request, or start it at once when nothing else is being computed."""
        job = self._job(number, request)
        if self._pool is not None and self._is_sooner_remote(self._pool, job):
            self._prefill_remotely(self._pool, job)
        else:
            self._waiting.append(job)
            self._waiting_tokens += job.uncached_tokens
            if self._current is None:
                self._start_next()
        self._tell_load()

    def snapshot(self) -> tuple[int, bytes]:
        """Return the number of the last delta sent, and the joined keys of the whole cache after it."""
        return self._sequence - 1, join_keys(self._cache)

    def load(self) -> WorkerLoad:
        """Return the worker's load now, exact but for the prefixes that queued requests will find when they start."""
        return WorkerLoad(
            worker_id=self.worker_id,
            epoch=0,
            measured_at_s=self._clock.now_s,
            num_waiting_requests=len(self._waiting),
            num_running_requests=self._num_decoding + self._num_remote + (self._current is not None),
            queued_prefill_tokens=self._waiting_tokens + self._remaining_tokens(),
            running_decode_tokens=self._decode_tokens,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_slowdown=self._rates.decode_slowdown,
            decode_tokens_per_s=self._rates.decode_tokens_per_s,
        )

    def _job(self, number: int, request: TraceRequest) -> Job:
        num_cached = num_cached_blocks(request, self._block_size, self._cache)
        return Job(number, request, num_cached, request.num_tokens - num_cached * self._block_size)

    def _remaining_tokens(self) -> int:
        if self._current is None:
            return 0
        return round((self._current_ends_s - self._clock.now_s) * self._current_speed)

    def _start_next(self) -> None:
        expected = self._waiting.popleft()
        self._waiting_tokens -= expected.uncached_tokens
        job = self._job(expected.number, expected.request)
        duration_s = self._rates.prefill_s(job.uncached_tokens, self._decode_tokens)
        self.busy_s += duration_s
        self._current = job
        self._current_ends_s = self._clock.now_s + duration_s
        self._current_speed = job.uncached_tokens / duration_s
        self._clock.at(self._current_ends_s, self._finish_current)

    def _finish_current(self) -> None:
        assert self._current is not None
        job, self._current = self._current, None
        self._begin_decode(job)
        if self._waiting:
            self._start_next()
        self._tell_load()

    def _begin_decode(self, job: Job) -> None:
        """The prompt is computed: its blocks become reusable and its stream begins."""
        self._tell_change(self._cache.put(job.request.keys))
        self._ports.on_first_token(self.worker_id, job)
        self._num_decoding += 1
        self._decode_tokens += job.request.num_tokens
        ends_s = self._clock.now_s + self._rates.decode_s(job.request.num_output_tokens)
        self._clock.at(ends_s, partial(self._end_decode, job))

    def _end_decode(self, job: Job) -> None:
        self._num_decoding -= 1
        self._decode_tokens -= job.request.num_tokens
        self._tell_load()
        self._ports.on_end(job)

    def _is_sooner_remote(self, pool: PrefillPool, job: Job) -> bool:
        queued_tokens = self._waiting_tokens + self._remaining_tokens() + job.uncached_tokens
        local_s = self._rates.prefill_s(queued_tokens, self._decode_tokens)
        return pool.duration_s(self._clock.now_s, job.uncached_tokens) < local_s

    def _prefill_remotely(self, pool: PrefillPool, job: Job) -> None:
        self._num_remote += 1
        arrives_s = pool.take(self._clock.now_s, job.uncached_tokens)
        self._clock.at(arrives_s, partial(self._finish_remote, job))

    def _finish_remote(self, job: Job) -> None:
        self._num_remote -= 1
        self._begin_decode(job)
        self._tell_load()

    def _tell_load(self) -> None:
        self._ports.on_load(self.load())

    def _tell_change(self, delta: CacheDelta) -> None:
        if delta:
            self._ports.on_change(self.worker_id, self._sequence, delta)
            self._sequence += 1
