"""The prompt of a chat, by its template, and the changes without which the template would refuse it or lose a text.

A chat that the template takes and shows whole is rendered as it came.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from protos.errors import RequestError
from router.tokenizer.call_repairs import Messages, whole_tools
from router.tokenizer.chat_template import ChatTemplate, TemplateTimeError
from router.tokenizer.template_probes import learn_rules
from router.tokenizer.template_rules import PLAINEST, Rule, adapt

logger = logging.getLogger(__name__)


class ChatPrompt:
    """Renders chats by one template, whose rules are learnt here once."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._learnt = {has_tools: learn_rules(template, has_tools=has_tools) for has_tools in (False, True)}
        for rule in self.rules:
            logger.info("chat template: %s", rule)

    @property
    def rules(self) -> list[Rule]:
        """The repairs for everything the template refuses or loses."""
        known = frozenset[Rule]().union(*(if_refused for _, if_refused in self._learnt.values()))
        if Rule.ALTERNATING_AROUND_TOOLS in known:
            known -= {Rule.ALTERNATING}  # which is a part of it
        return [rule for rule in Rule if rule in known]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt, as `ChatTemplate.render` does.

        Raises:
            RequestError: the template refuses the chat, whatever is changed.
        """
        refusal: RequestError | None = None
        tools = (variables or {}).get("tools")
        for turns, offered in self._attempts(messages, tools, is_continued=continue_final_message):
            try:
                return self._template.render(
                    turns,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables={**(variables or {}), "tools": offered},
                )
            except RequestError as error:
                if isinstance(error, TemplateTimeError) or error.param != "messages":
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _attempts(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, is_continued: bool
    ) -> Iterator[tuple[Messages, Any]]:
        """Yield the chat and its tools, each time with more changes."""
        always, if_refused = self._learnt[bool(tools)]
        if not tools:
            tools = [] if Rule.NO_TOOLS_IS_A_LIST in always else None
        last = None
        for rules in (always, if_refused, if_refused | PLAINEST):
            offered = tools if last is None or not tools else whole_tools(tools)
            attempt = (adapt(rules, messages, is_continued=is_continued), offered)
            if attempt != last:
                yield attempt
            last = attempt


@lru_cache(maxsize=8)
def chat_prompt(template: ChatTemplate) -> ChatPrompt:
    """Return the prompts of a template, whose rules are learnt in the first call."""
    return ChatPrompt(template)
