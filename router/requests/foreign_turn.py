"""A turn of another chat API, translated to a request of `/v1/chat/completions`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from protos.errors import RequestError
from router.requests.body import as_request_error
from router.requests.chat_request import ChatCompletionRequest, UnreadPartError, unread_parts


@dataclass(slots=True)
class ForeignChat:
    """The translated messages, the name of each in the client's request, and the ignored fields."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.names.append(name)

    def open_answer(self, name: str) -> dict[str, Any]:
        """Return the assistant's message at the end, a new one where another's is."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(name, {"role": "assistant"})
        return self.messages[-1]


@dataclass(frozen=True, slots=True)
class ForeignTurn:
    """The fields of the chat, its messages, and the tools left out since only the API's own servers run them."""

    fields: dict[str, Any]
    chat: ForeignChat
    foreign_tools: list[str] = field(default_factory=list)

    def chat_request(self) -> ChatCompletionRequest:
        """Return the chat, validated. Raises `RequestError` for what no chat can be."""
        said = {name: value for name, value in self.fields.items() if value is not None}
        try:
            return ChatCompletionRequest.model_validate_json(json.dumps({**said, "messages": self.chat.messages}))
        except ValidationError as error:
            raise as_request_error(error, ChatCompletionRequest) from None
        except UnreadPartError as error:
            raise RequestError(error.message, param=self.chat.names[error.rank]) from None

    def ignored(self, request: ChatCompletionRequest) -> list[str]:
        """Return the client's names of the fields and parts that the translated request omits."""
        unread = [self.chat.names[rank] for rank in unread_parts(request.messages)]
        return list(dict.fromkeys([*self.foreign_tools, *self.chat.left_out, *unread]))
