"""Messages between the target and the draft: token ids, one frame per engine step each way.

Every message names the length of the committed tokens it refers to, so a late or repeated message is recognised and
ignored. The target resends `Open` with all committed tokens to a new draft process, and to a draft that lost a
sequence.
"""

from __future__ import annotations

import msgspec

from engine.accounting.engine_stats import TranslationCounts
from engine.batch.draft import Offer
from protos.messages import SamplingParams, VerifyMode

DRAFT_SOCKET = "draft.sock"
PROTOCOL_VERSION = 7


class Open(msgspec.Struct, frozen=True, array_like=True):
    """Start (or restart) drafting for a sequence with these committed tokens; replaces any earlier state of it.

    The next pass can verify `num_drafts` drafts, or a tree of `num_nodes` if that is not 0. If that pass `is_next`, the
    draft offers them now; if not, it has time to prefill. `cache_salt` and `tenant` separate requests in the draft's
    caches.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    sample_index: int
    verify: VerifyMode
    num_drafts: int
    is_next: bool
    cache_salt: str = ""
    tenant: str = ""
    num_nodes: int = 0


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` follow the first `base_len` committed tokens; `num_drafts` more are wanted unless offered.

    They may be a tree of that depth if `num_nodes` is not 0.
    """

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_drafts: int
    num_nodes: int = 0


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
