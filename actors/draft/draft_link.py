"""The channel between target and draft: its messages, one frame per engine step each way, and the target's end.

Every message names the length of the committed tokens it refers to, so a late or repeated message is recognised and
ignored. The target resends `Open` with all committed tokens to a new draft process, and to a draft that lost a
sequence.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from actors.process.frames import FrameConnection, connect
from engine.accounting.engine_stats import TranslationCounts
from engine.batch.draft import Offer
from protos.frames import ConnectionLostError
from protos.messages import GenerateRequest, VerifyMode

logger = logging.getLogger(__name__)

DRAFT_SOCKET = "draft.sock"
PROTOCOL_VERSION = 9


class Open(msgspec.Struct, frozen=True, array_like=True):
    """Start (or restart) drafting for a request with its committed output; replaces any earlier state of it.

    The next pass can verify `num_drafts` drafts, or a tree of `num_nodes` if that is not 0. If that pass `is_next`, the
    draft offers them now; if not, it has time to prefill. If `is_ahead`, a draft that can works ahead of that pass's
    verdict.
    """

    request: GenerateRequest
    verify: VerifyMode
    num_drafts: int
    is_next: bool
    num_nodes: int = 0
    is_ahead: bool = True


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` follow the first `base_len` committed tokens; `num_drafts` more are wanted unless offered.

    They may be a tree of that depth if `num_nodes` is not 0. `is_ahead` is as in `Open`.
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_drafts: int
    num_nodes: int = 0
    is_ahead: bool = True


class Round(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step's changes for the draft, applied in this order: closes, opens, commits."""

    closes: tuple[str, ...] = ()
    opens: tuple[Open, ...] = ()
    commits: tuple[Commit, ...] = ()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The draft's first frame: it is loaded and speaks this protocol."""

    protocol_version: int
    draft_version: str


class Offers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reply to a round, or offers ahead of the next one; `lost` lists sequences that the draft does not know.

    `drafting_s` is the draft model's working time; the rest of the reply time is the channel's. `translated` counts the
    tokens that a draft with its own tokenizer could not translate since the last frame.
    """

    offers: tuple[Offer, ...] = ()
    lost: tuple[str, ...] = ()
    drafting_s: float = 0.0
    is_answer: bool = True
    translated: TranslationCounts = TranslationCounts()


DraftMessage = Hello | Offers  # sent by the draft process; the target sends rounds


class AdaptiveTimeout:
    """Allows a multiple of the usual reply time. After a miss it allows no time until the draft sends again.

    A draft that hangs therefore costs one wait. A draft that was slow once recovers.
    """

    def __init__(self) -> None:
        self._usual_s: float | None = None
        self._is_silent = False

    @property
    def allowed_s(self) -> float:
        """Seconds that a step may wait now."""
        if self._is_silent:
            return 0.0
        if self._usual_s is None:
            return 1.0
        return min(1.0, max(0.02, 4.0 * self._usual_s))

    def answered(self, latency_s: float) -> None:
        """Note offers that came `latency_s` after the request."""
        self._is_silent = False
        if self._usual_s is None:
            self._usual_s = latency_s
        self._usual_s += 0.1 * (latency_s - self._usual_s)

    def heard(self) -> None:
        """Note offers ahead of a verdict: the draft is alive."""
        self._is_silent = False

    def missed(self) -> None:
        """Note that the requested offers did not come before the deadline."""
        self._is_silent = True


class DraftLink:
    """One connection at a time. `generation` counts draft processes so far; `draft_version` is the latest one's.

    A draft is connected from its `Hello` until its socket ends or stops taking frames. Without a draft every call
    returns at once, and reconnects are tried at most ten times a second.
    """

    def __init__(self, path: Path) -> None:
        self.generation = 0
        self.is_connected = False
        self.draft_version = ""
        self._path = path
        self._connection: FrameConnection[DraftMessage] | None = None
        self._retry_at_s = 0.0

    def send(self, news: Round) -> bool:
        """Send a round; return False if no draft is connected."""
        if self._connection is None or not self.is_connected:
            return False
        try:
            self._connection.send(news, timeout_s=0.05)
        except ConnectionLostError as error:
            self._drop(error)
            return False
        return True

    def receive(self, timeout_s: float) -> list[Offers]:
        """Return offers, waiting up to `timeout_s` for the first. May accept a new draft's `Hello`."""
        self._reconnect()
        if self._connection is None:
            return []
        offers = []
        try:
            for message in self._connection.receive(timeout_s if self.is_connected else 0.0):
                if isinstance(message, Hello):
                    self._greet(message)
                else:
                    offers.append(message)
        except ConnectionLostError as error:
            self._drop(error)
            return []
        return offers

    def _reconnect(self) -> None:
        if self._connection is not None or time.monotonic() < self._retry_at_s:
            return
        self._retry_at_s = time.monotonic() + 0.1
        self._connection = connect(self._path, DraftMessage)

    def _greet(self, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ConnectionLostError(f"it speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}")
        self.is_connected = True
        self.draft_version = hello.draft_version
        self.generation += 1
        logger.info("draft connected: version=%s generation=%d", hello.draft_version, self.generation)

    def _drop(self, error: ConnectionLostError) -> None:
        logger.warning("draft lost, decoding goes on without it: %s", error)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self.is_connected = False
