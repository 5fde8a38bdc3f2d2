"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.chat_message import MAX_MESSAGES, ChatMessageFields


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessageFields], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True  # of a text; a chat template writes its own
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _needs_one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
