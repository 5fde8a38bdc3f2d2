"""A prefill replica in the same thread: every poll is one of its steps; and every way it can fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from engine.block_export import BlockExporter, ExportedBlocks
from engine.engine_core import EngineCore
from engine.fetch_failure import FetchFailure
from engine.kv_transfer import FetchAccepted, FetchEnd, FetchNews, FetchOrder, KVChunk, RemoteLoad
from protos.errors import RequestError
from protos.messages import GenerateRequest, SamplingParams

Fault = Callable[[FetchNews], list[FetchNews]]  # what becomes of each news


def intact(news: FetchNews) -> list[FetchNews]:
    return [news]


class InProcessTransport:
    """`KVTransport` over an `EngineCore` that is stepped by `poll`."""

    def __init__(self, core: EngineCore, fault: Fault = intact, max_blocks: int = 2) -> None:
        self.orders: list[FetchOrder] = []
        self.cancelled: list[int] = []
        self._core = core
        self._fault = fault
        self._live: set[int] = set()
        self._news: deque[FetchNews] = deque()
        exporter = BlockExporter(core.runner, max_blocks, self._export)  # type: ignore[arg-type]
        core.on_computed = exporter.collect
        self._exporter = exporter

    def start(self, order: FetchOrder) -> None:
        self.orders.append(order)
        self._live.add(order.fetch_id)
        name = str(order.fetch_id)
        self._exporter.watch(name, order.first_block)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        try:
            self._core.add(GenerateRequest(name, order.token_ids, sampling, cache_salt=order.cache_salt))
        except RequestError as error:
            self._say(FetchEnd(order.fetch_id, FetchFailure.REFUSED, str(error)))
            return
        self._say(FetchAccepted(order.fetch_id, self._load()))

    def poll(self, max_news: int) -> list[FetchNews]:
        if self._core.has_work:
            for chunk in self._core.step():
                if chunk.finish_reason is not None:
                    self._say(FetchEnd(int(chunk.request_id)))
            self._core.scheduler.check_integrity()
        return [self._news.popleft() for _ in range(min(max_news, len(self._news)))]

    def cancel(self, fetch_id: int) -> None:
        self.cancelled.append(fetch_id)
        self._live.discard(fetch_id)
        self._core.abort(str(fetch_id))
        self._news = deque(news for news in self._news if news.fetch_id != fetch_id)

    def _export(self, exported: ExportedBlocks) -> None:
        fetch_id = int(exported.request_id)
        self._say(KVChunk(fetch_id, exported.first_block, exported.blocks, 0.001, self._load()))

    def _say(self, news: FetchNews) -> None:
        if news.fetch_id not in self._live:
            return
        said = self._fault(news)
        self._news += said
        if any(isinstance(each, FetchEnd) for each in said):
            self._live.discard(news.fetch_id)

    def _load(self) -> RemoteLoad:
        return RemoteLoad("replica", self._core.scheduler.num_queued_prefill_tokens, 1000.0)


def lost_after(num_chunks: int) -> Fault:
    """The replica dies when so many chunks have left it, counted over all fetches."""
    seen = 0

    def fault(news: FetchNews) -> list[FetchNews]:
        nonlocal seen
        if isinstance(news, KVChunk):
            seen += 1
        is_dead = seen > num_chunks or (num_chunks == 0 and not isinstance(news, FetchAccepted))
        return [FetchEnd(news.fetch_id, FetchFailure.LOST, "killed")] if is_dead else [news]

    return fault


def silent(news: FetchNews) -> list[FetchNews]:
    """Nothing is ever heard."""
    return []


def mismatched(news: FetchNews) -> list[FetchNews]:
    return [FetchEnd(news.fetch_id, FetchFailure.MISMATCH, "dtype is torch.float32 here and torch.bfloat16 there")]


def shuffled(news: FetchNews) -> list[FetchNews]:
    """Blocks come where others were next."""
    return [replace(news, first_block=news.first_block + 1)] if isinstance(news, KVChunk) else [news]


def too_short(news: FetchNews) -> list[FetchNews]:
    """Blocks of another size come."""
    return [replace(news, blocks=news.blocks[:, :-4])] if isinstance(news, KVChunk) else [news]


def cut_off(news: FetchNews) -> list[FetchNews]:
    """It ends as if all had come, and half has."""
    return [FetchEnd(news.fetch_id)] if isinstance(news, KVChunk) and news.first_block > 1 else [news]
