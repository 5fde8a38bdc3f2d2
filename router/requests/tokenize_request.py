"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from pydantic import model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.chat_request import ChatPromptFields, Messages
from router.requests.generation_fields import PromptLimit


class TokenizeRequest(ChatPromptFields):
    """The body of `/tokenize`: a text, or a chat with all that its prompt is made of.

    `add_special_tokens` is true for a text where it is left out, and false for a chat, whose template writes its own.
    """

    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    truncate_prompt_tokens: PromptLimit | None = None
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
