"""A draft for the target to look up by the tokens that it continues."""

from __future__ import annotations

from typing import NamedTuple

from engine.draft import Draft


class Offer(NamedTuple):
    """Drafts that continue the first `base_len` committed tokens and `after`; of use once exactly these are committed.

    Offers made ahead of a verdict have one such outcome each in `after`; one that answers a commit has nothing there.
    It is a tuple because it is sent as one.
    """

    request_id: str
    base_len: int
    draft: Draft
    after: tuple[int, ...] = ()
