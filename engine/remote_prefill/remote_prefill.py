"""Remote prefill: places prompts, orders blocks, stores them on arrival, and leaves the rest to the engine.

A fetching sequence holds its slots and computes nothing. Blocks arrive in order; each advances it and is published at
once. However the fetch ends, the sequence continues from where it is:

    admitted -> offer -> fetching: KVChunk, KVChunk, ... -> FetchEnd, failure or deadline -> computes the rest
                   '-> computes all of it
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

from torch import Tensor

from engine.accounting.engine_stats import FetchFailure, RemotePrefillStats
from engine.accounting.rates import RateMeter
from engine.kv_cache.block_manager import BlockManager
from engine.remote_prefill.fetch_table import FetchTable, PrefillLoad, PrefillSource, num_fetchable_blocks
from engine.remote_prefill.kv_transfer import (
    FetchAccepted,
    FetchEnd,
    FetchNews,
    FetchOrder,
    KVChunk,
    KVFetch,
    KVPool,
    KVTransport,
)
from engine.remote_prefill.placement import LocalOutlook, PrefillPlacement, ReplicaRates, place_prefill
from engine.sequence.sequence import Sequence

logger = logging.getLogger(__name__)


class RemotePrefill(PrefillSource):
    """Fetches over a `KVTransport`.

    Only whole blocks are fetched, and never the last token's: its logits are needed, so it is always computed here. A
    fetch is given up after four times its expected time, at least five seconds.

    Args:
        transport: carries orders and blocks.
        pool: the memory of the blocks.
        blocks: block tables and keys.
        rates: this engine's own rates, for the placement.
        min_tokens: shorter prompts are always prefilled here.
        clock: returns seconds.
    """

    def __init__(
        self,
        transport: KVTransport,
        pool: KVPool,
        blocks: BlockManager,
        rates: RateMeter,
        min_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._blocks = blocks
        self._rates = rates
        self._min_tokens = min_tokens
        self._clock = clock
        self._meter = ReplicaRates(clock)
        self._fetch_ids = count()
        self._fetches = FetchTable(blocks)
        self._num_tokens = 0
        self._num_fetches = 0
        self._has_accepted = False
        self._failures: Counter[str] = Counter()
        self._last_mismatch = ""
        self._fetch_s = 0.0
        self._transfer_s = 0.0

    @property
    def stats(self) -> RemotePrefillStats:
        return RemotePrefillStats(
            num_tokens=self._num_tokens,
            num_fetches=self._num_fetches,
            num_fetching=self._fetches.num_sequences,
            failures=dict(self._failures),
            fetch_s=self._fetch_s,
            transfer_s=self._transfer_s,
        )

    def offer(self, sequence: Sequence, load: PrefillLoad) -> None:
        if not sequence.is_scoring:  # fetched blocks have no logits
            sequence.is_fetching = self._follow(sequence) or self._fetch(sequence, load)

    def withdraw(self, sequence: Sequence) -> None:
        sequence.is_fetching = False
        if fetch := self._fetches.leave(sequence):
            self._transport.cancel(fetch.fetch_id)
            self._drop(fetch)

    def receive(self, load: Callable[[], PrefillLoad]) -> bool:
        all_news = self._transport.poll(4)  # decoding sequences wait while a chunk is copied in
        for news in all_news:
            if fetch := self._fetches.get(news.fetch_id):  # else this step has given it up
                self._handle(fetch, news)
        self._give_up_late()
        for sequence in self._fetches.take_orphans():
            sequence.is_fetching = False
            self.offer(sequence, load())
        return bool(all_news)

    def _follow(self, sequence: Sequence) -> bool:
        """Wait for the fetch of this sequence's first missing block; False without such a fetch."""
        num_tokens = num_fetchable_blocks(sequence, self._blocks.block_size) * self._blocks.block_size
        return num_tokens >= self._min_tokens and self._fetches.follow(sequence)

    def _fetch(self, sequence: Sequence, load: PrefillLoad) -> bool:
        num_blocks = self._num_available_blocks(sequence)
        if num_blocks <= 0 or not self._meter.gate.is_open:
            return False
        placement = self._place(num_blocks * self._blocks.block_size, load)
        logger.debug("request %s: %s", sequence.request_id, placement)
        if placement.is_remote:
            self._order(sequence, num_blocks, placement)
        return placement.is_remote

    def _num_available_blocks(self, sequence: Sequence) -> int:
        """Count the missing blocks that the transport can deliver."""
        num_blocks = num_fetchable_blocks(sequence, self._blocks.block_size)
        end_block = self._transport.num_available_blocks(sequence.request_id)
        if end_block is None:
            return num_blocks
        return min(num_blocks, end_block - sequence.num_computed_tokens // self._blocks.block_size)

    def _place(self, num_tokens: int, load: PrefillLoad) -> PrefillPlacement:
        local = LocalOutlook(
            tokens_per_s=self._rates.prefill_tokens_per_s,
            slowdown=self._rates.decode_slowdown * load.num_decode_tokens,
            num_queued_tokens=load.num_queued_tokens,
            num_decoding=load.num_decoding,
        )
        return place_prefill(num_tokens, self._min_tokens, local, self._meter.outlook())

    def _order(self, sequence: Sequence, num_blocks: int, placement: PrefillPlacement) -> None:
        now_s = self._clock()
        first_block = sequence.num_computed_tokens // self._blocks.block_size
        end_block = first_block + num_blocks
        timeout_s = self._timeout_s(placement)
        # The first order waits for Serve's router to start; later ones are accepted at once.
        accept_timeout_s = 2.0 if self._has_accepted else 8.0
        deadline_s = now_s + min(timeout_s, accept_timeout_s)
        fetch = KVFetch(next(self._fetch_ids), sequence, first_block, end_block, now_s, timeout_s, deadline_s)
        self._fetches.add(fetch)
        self._num_fetches += 1
        self._meter.ordered(fetch.fetch_id, placement.num_tokens)
        token_ids = tuple(sequence.token_ids[: end_block * self._blocks.block_size])
        request = sequence.request
        self._transport.start(
            FetchOrder(fetch.fetch_id, request.request_id, token_ids, first_block, request.cache_salt, timeout_s)
        )

    def _timeout_s(self, placement: PrefillPlacement) -> float:
        rate = self._meter.outlook().tokens_per_s or self._rates.prefill_tokens_per_s
        if rate == 0:
            return 30.0
        return max(5.0, 4.0 * (placement.remote_s + placement.num_tokens / rate))  # four times the expected time

    def _handle(self, fetch: KVFetch, news: FetchNews) -> None:
        match news:
            case FetchAccepted():
                self._has_accepted = True
                fetch.deadline_s = fetch.began_s + fetch.timeout_s
                self._meter.accepted(fetch.fetch_id, news.load, self._clock() - fetch.began_s)
            case KVChunk():
                self._take(fetch, news)
            case FetchEnd():
                self._end(fetch, news)

    def _take(self, fetch: KVFetch, chunk: KVChunk) -> None:
        """Store a chunk; advance its sequence and followers."""
        if mistake := fetch.mistake(chunk, self._pool.bytes_per_block, self._pool.bytes_per_state):
            self._give_up(fetch, FetchFailure.GARBLED, mistake)
            return
        sequence, num_tokens = fetch.sequence, len(chunk.blocks) * self._blocks.block_size
        fetch.next_block += len(chunk.blocks)
        self._pool.import_blocks(sequence.block_table[chunk.header.first_block : fetch.next_block], chunk.blocks)
        if chunk.state is not None or not self._pool.bytes_per_state:
            self._advance(sequence, fetch.next_block * self._blocks.block_size, chunk.state)
            self._fetches.advance_followers(fetch)
        self._meter.arrived(chunk, num_tokens)
        self._num_tokens += num_tokens
        self._transfer_s += chunk.transfer_s

    def _advance(self, sequence: Sequence, num_tokens: int, state: Tensor | None) -> None:
        """Count the leading tokens as computed. Recurrent layers need the state after them too."""
        if state is not None:
            self._pool.import_state(self._blocks.reserve_state(sequence, num_tokens), state)
        sequence.num_computed_tokens = num_tokens
        self._blocks.publish(sequence, num_tokens)
        self._blocks.settle_states(sequence)

    def _end(self, fetch: KVFetch, end: FetchEnd) -> None:
        if end.failure is not None:
            self._fail(fetch, end.failure, end.detail)
        elif fetch.num_missing_blocks > 0:
            self._fail(fetch, FetchFailure.GARBLED, f"the fetch ended with {fetch.num_missing_blocks} blocks missing")
        else:
            self._meter.gate.succeeded()
            self._drop(fetch)

    def _give_up_late(self) -> None:
        now_s = self._clock()
        for fetch in self._fetches.late(now_s):
            self._give_up(fetch, FetchFailure.TIMEOUT, f"blocks missing after {now_s - fetch.began_s:.1f} s")

    def _give_up(self, fetch: KVFetch, cause: FetchFailure, detail: str) -> None:
        self._transport.cancel(fetch.fetch_id)
        self._fail(fetch, cause, detail)

    def _fail(self, fetch: KVFetch, cause: FetchFailure, detail: str) -> None:
        self._failures[cause] += 1
        self._meter.gate.failed()
        level = logging.DEBUG if detail == self._last_mismatch else logging.WARNING  # a mismatch lasts until a redeploy
        if cause is FetchFailure.MISMATCH:
            self._last_mismatch = detail
        request_id, num_blocks = fetch.sequence.request_id, fetch.num_missing_blocks
        text = "request %s: remote prefill failed (%s); computing %d blocks locally: %s"
        logger.log(level, text, request_id, cause, num_blocks, detail)
        self._drop(fetch)

    def _drop(self, fetch: KVFetch) -> None:
        """End a fetch: its sequence computes the missing tokens, its followers are offered again."""
        self._fetches.drop(fetch)
        fetch.sequence.is_fetching = False
        self._meter.ended(fetch.fetch_id)
        elapsed_s = self._clock() - fetch.began_s
        self._fetch_s += elapsed_s
        fetch.sequence.clock.transfer_s += elapsed_s
