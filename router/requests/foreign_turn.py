"""A turn of another chat API, said in the words of `/v1/chat/completions`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from protos.errors import RequestError
from router.requests.chat_request import ChatCompletionRequest
from router.requests.validation_errors import as_request_error


@dataclass(frozen=True, slots=True)
class ForeignTurn:
    """The chat, and the tools left out of it since only the API's own servers run them."""

    chat: dict[str, Any]
    foreign_tools: list[str] = field(default_factory=list)

    def chat_request(self) -> ChatCompletionRequest:
        """Return the chat, validated. Raises `RequestError` for what no chat can be."""
        said = {name: value for name, value in self.chat.items() if value is not None}
        try:
            return ChatCompletionRequest.model_validate_json(json.dumps(said))
        except ValidationError as error:
            raise as_request_error(error, ChatCompletionRequest) from None


def text_of(content: object, kinds: tuple[str, ...], name: str) -> str:
    """Return the text of a string or of parts of these types. Raises `RequestError` for any other part."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise RequestError(f"{name} has a part of type {kind!r}; this model reads text only.", param=name)
        texts.append(text)
    return "".join(texts)
