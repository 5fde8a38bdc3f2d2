"""Token ids that a client sends, against the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from protos.errors import RequestError
from protos.messages import ModelCard


def check_token_ids(token_ids: Sequence[int], card: ModelCard, name: str) -> None:
    """Raise `RequestError` if the list is empty or an id is not in the vocabulary; `name` is its parameter."""
    if not token_ids:
        raise RequestError(f"{name} is empty; send at least one token.", param=name)
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < card.vocab_size:
            raise RequestError(
                f"{name} holds token id {worst}; this model's vocabulary is [0, {card.vocab_size}).", param=name
            )
