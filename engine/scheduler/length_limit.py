"""The maximum length of a sequence, by the model's positions and the pool's slots."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import RequestError


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The maximum tokens of prompt and output together, by the model and by the KV pool."""

    max_model_len: int
    num_slots: int

    @property
    def num_tokens(self) -> int:
        """The lower of the two limits."""
        return min(self.max_model_len, self.num_slots)

    def check_prompt(self, num_tokens: int) -> None:
        """Raise RequestError unless the prompt has a token and leaves room for one more."""
        if num_tokens == 0:
            raise RequestError("the prompt has no tokens; send at least 1", param="prompt")
        if num_tokens + 1 > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the model takes {self.max_model_len} for prompt and output "
                f"together; send at most {self.max_model_len - 1}",
                param="prompt",
            )
        if num_tokens + 1 > self.num_slots:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the KV cache holds {self.num_slots} for prompt and output "
                f"together; send at most {self.num_slots - 1}, or give the server more cache.memory_gib",
                param="prompt",
            )
