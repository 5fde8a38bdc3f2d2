"""The token ids of a model, and the check that keeps all other ids out of its embedding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from protos.errors import RequestError
from protos.messages import GenerateRequest


class Vocabulary(NamedTuple):
    """Token ids [0, size)."""

    size: int

    def check(self, request: GenerateRequest) -> None:
        """Raise RequestError if a request names an id that the model does not have."""
        sampling = request.sampling
        self._check_ids("prompt", (*request.prompt_token_ids, *request.output_token_ids))
        self._check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        self._check_ids("bad_words", [token_id for word in sampling.bad_words for token_id in word])
        self._check_ids("stop_token_ids", sampling.stop_token_ids)

    def num_known(self, token_ids: Seq[int]) -> int:
        """Count the leading ids that the model has."""
        if not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.size:
            return len(token_ids)
        return next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < self.size), len(token_ids))

    def _check_ids(self, param: str, token_ids: Seq[int]) -> None:
        num_known = self.num_known(token_ids)
        if num_known < len(token_ids):
            unknown_id = token_ids[num_known]
            raise RequestError(
                f"{param} has token id {unknown_id}, but the model's are 0 to {self.size - 1}; use its tokenizer",
                param=param,
            )
