"""A validated client request, the same for both frontends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.messages import Grammar
from router.requests.generation_fields import GenerationFields
from router.requests.reasoning_format import Thinking


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text for a client that asks for an echo."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A request with its prompts in tokens and every parameter in its range."""

    request_id: str
    fields: GenerationFields
    prompts: tuple[Prompt, ...]
    max_tokens: int | None
    is_chat: bool = False
    num_logprobs: int | None = None
    has_echo: bool = False
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    tool_schemas: Mapping[str, object] = field(default_factory=dict)  # of tools whose calls the answer may hold
    prediction_token_ids: tuple[int, ...] = ()

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likely tokens wanted at each position of the prompt; None if none are wanted."""
        echoed = self.num_logprobs if self.has_echo else None
        return echoed if self.fields.prompt_logprobs is None else max(self.fields.prompt_logprobs, echoed or 0)

    @property
    def num_choices_per_prompt(self) -> int:
        return self.fields.n or 1
