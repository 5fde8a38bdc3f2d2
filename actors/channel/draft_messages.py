"""Messages between the target and the draft: token ids, one frame per engine step each way.

Every message names the length of the committed tokens it speaks of, so a late or repeated one is recognised and
ignored. The target replays `Open` with all committed tokens whenever it meets a new draft process, or one that lost a
sequence.
"""

from __future__ import annotations

import msgspec

from engine.proposer.draft_model.offer import Offer
from engine.proposer.vocab_mapping.counts import TranslationCounts
from protos.messages import SamplingParams, VerifyMode

DRAFT_SOCKET = "draft.sock"
PROTOCOL_VERSION = 6


class Open(msgspec.Struct, frozen=True, array_like=True):
    """Start (or start again) drafting for a sequence whose committed tokens are these; replaces what was known of it.

    `num_drafts` is how many tokens the next pass can verify; the draft offers them now if that pass `is_next`, and has
    time to read the tokens before if it is not. `cache_salt` and `tenant` keep apart what the draft keeps of requests.
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


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` follow the first `base_len` committed tokens; offer `num_drafts` more, unless that has been done."""

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    num_drafts: int


class Round(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step's news for the draft, applied in this order: closes, opens, commits."""

    closes: tuple[str, ...] = ()
    opens: tuple[Open, ...] = ()
    commits: tuple[Commit, ...] = ()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The draft's first frame: it is loaded and speaks this protocol."""

    protocol_version: int
    draft_version: str


class Offers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a round, or offers ahead of the next; `lost` are sequences the draft should know and does not.

    `drafting_s` is how long the draft model worked on it; the rest of an answer's time until it is read is the
    channel's. `translated` is what a draft with a tokenizer of its own has lost since the frame before.
    """

    offers: tuple[Offer, ...] = ()
    lost: tuple[str, ...] = ()
    drafting_s: float = 0.0
    is_answer: bool = True
    translated: TranslationCounts = TranslationCounts()


DraftMessage = Hello | Offers  # what the draft process sends; the target sends rounds
