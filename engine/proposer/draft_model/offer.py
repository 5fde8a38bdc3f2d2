"""A draft that the target looks up by the tokens before it."""

from __future__ import annotations

from typing import NamedTuple

from engine.batch.draft import Draft


class Offer(NamedTuple):
    """A draft after the first `base_len` committed tokens and `after`; usable once exactly these are committed.

    An offer made ahead of verification has a possible outcome in `after`. In the answer to a commit `after` is empty.
    A tuple, since it is sent as one.
    """

    request_id: str
    base_len: int
    draft: Draft
    after: tuple[int, ...] = ()
