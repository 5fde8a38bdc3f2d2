"""The block keys of a request, equal to the engines' keys; computed once, after a check that both agree."""

from __future__ import annotations

import logging
from dataclasses import replace

from protos.block_keys import PROBE_SALT, block_keys, join_keys, probe_token_ids, root_key
from protos.messages import GenerateRequest, ModelCard

logger = logging.getLogger(__name__)


class PromptKeys:
    """The block keys of requests for the last card's model; empty without a card, or if it fails the check."""

    def __init__(self) -> None:
        self._card: ModelCard | None = None
        self._is_proven = False
        self._last_text: tuple[tuple[int, ...], tuple[int, ...], str] | None = None
        self._last_keys = b""

    @property
    def is_refuted(self) -> bool:
        """True if the engines' keys of a fixed text differ from this process's: requests are routed by load alone."""
        return self._card is not None and not self._is_proven

    def learn(self, card: ModelCard) -> None:
        """Store a pair's card; check a changed one."""
        card = replace(card, alarms=())
        if card == self._card:
            return
        self._card = card
        self._last_text = None
        own = _probe_key(card)
        self._is_proven = own == card.probe_key
        if not self._is_proven:
            logger.error(
                "pairs and ingress compute different block keys (probe %s there, %s here, model version %s, "
                "block size %d): requests are routed by load alone; deploy both from one version",
                card.probe_key.hex() or "missing",
                own.hex(),
                card.model_version,
                card.block_size,
            )

    def keys_of(self, request: GenerateRequest) -> bytes:
        """Return the joined keys of the full blocks of prompt and output; samples of one prompt share the work."""
        card = self._card
        if card is None or not self._is_proven:
            return b""
        text = (request.prompt_token_ids, request.output_token_ids, request.cache_salt)
        if text != self._last_text:  # samples share one prompt object, so equality costs nothing
            token_ids = request.prompt_token_ids + request.output_token_ids
            root = root_key(card.model_version, request.cache_salt)
            self._last_keys = join_keys(block_keys(token_ids, card.block_size, root))
            self._last_text = text
        return self._last_keys


def _probe_key(card: ModelCard) -> bytes:
    root = root_key(card.model_version, PROBE_SALT)
    return block_keys(probe_token_ids(card.block_size), card.block_size, root)[-1]
