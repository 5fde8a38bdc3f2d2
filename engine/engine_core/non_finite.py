"""Explains requests that end because the model's logits are not finite."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from protos.messages import FinishReason, TokenChunk

logger = logging.getLogger(__name__)


class NonFiniteReport:
    """Counts these requests.

    Args:
        model_name: the model and its dtype.
    """

    def __init__(self, model_name: str) -> None:
        self.num_requests = 0
        self._model_name = model_name
        is_narrow = " in float16" in model_name
        self._remedy = "; set target.dtype to bfloat16 or float32, which hold larger numbers" if is_narrow else ""

    def explain(self, chunks: Seq[TokenChunk]) -> None:
        """Log, count and explain each sequence that ends because its logits are not finite."""
        for chunk in chunks:
            if chunk.finish_reason is FinishReason.NON_FINITE:
                self.num_requests += 1
                chunk.error = (
                    f"{self._model_name} computed NaN or infinite logits after {chunk.offset} tokens of the answer, "
                    f"which ends there: its numbers overflow on this text. A retry gives the same{self._remedy}"
                )
                logger.warning("request %s: %s", chunk.request_id, chunk.error)
