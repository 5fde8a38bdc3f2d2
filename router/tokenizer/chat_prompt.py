"""The prompt of a chat, by its template, and the changes without which the template would refuse it or lose a text.

A chat that the template takes and shows whole is rendered as it came. Small chats, rendered once, show which the
template refuses, which texts it drops, and which rules mend that. A text is dropped if the prompt does not contain it;
its place does not matter. Thoughts may be missing: templates omit the thoughts of earlier turns on purpose.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Any

from protos.errors import RequestError
from router.tokenizer.call_repairs import Messages, whole_tools
from router.tokenizer.chat_template import ChatTemplate, TemplateTimeError
from router.tokenizer.content_parts import Message
from router.tokenizer.template_rules import PLAINEST, Rule, adapt

logger = logging.getLogger(__name__)

_LIMIT_S = 2.0  # of processor time, for all chats; one takes some 0.2 ms
_WORD = re.compile("qz[a-z]{3}q")  # the texts of probes; no template writes them itself
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "qztooq",
        "description": "reads",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "a text"}},
            "required": ["x"],
        },
    },
}
Rules = frozenset[Rule]


class ChatPrompt:
    """Renders chats by one template, whose rules are learnt here once."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._learnt = {has_tools: _Learner(template, has_tools=has_tools).learn() for has_tools in (False, True)}
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


class _ProbeResult(Enum):
    SHOWN = auto()
    LOST = auto()
    REFUSED = auto()


def _turn(role: str, word: str, **more: Any) -> Message:
    return {"role": role, "content": f"qz{word}q" if word else "", **more}


def _call(id_: str | None = "abcdefgh1", word: str = "arg", **function: Any) -> dict[str, Any]:
    named = {"name": "qzcalq", "arguments": {"x": f"qz{word}q"}} | function
    return {**({} if id_ is None else {"id": id_}), "type": "function", "function": named}


def _calls(*calls: dict[str, Any], word: str = "", **more: Any) -> Message:
    return _turn("assistant", word, tool_calls=list(calls), **more)


def _result(id_: str | None = "abcdefgh1", word: str = "res") -> Message:
    return _turn("tool", word, **({} if id_ is None else {"tool_call_id": id_}))


_SYSTEM, _LATE = _turn("system", "sys"), _turn("system", "lat")
_USER, _USER_2, _USER_3 = _turn("user", "usa"), _turn("user", "usb"), _turn("user", "usc")
_SAID, _SAID_2 = _turn("assistant", "asa"), _turn("assistant", "asb")
_CALLED, _RESULT = _calls(_call()), _result()
_CALLED_2, _RESULT_2 = _calls(_call("abcdefgh2", "arh")), _result("abcdefgh2", "ret")
_CALLED_3, _RESULT_3 = _calls(_call("abcdefgh2", "ari")), _result("abcdefgh2", "reu")  # the id of another call
_NAMELESS = _result(None, "reu")
_BOTH = _calls(_call(), _call("abcdefgh2", "arh"))
_TALKING = _calls(_call(), word="tal")
_HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
_FOREIGN_IDS = ("call_abcdefghijklmnopqrstuvwx", "toolu_01AbCd", "functions.f:0", "x", "0-1-2", "", None)
_AROUND = {Rule.ALTERNATING_AROUND_TOOLS}

# Chats, and the rules that may mend them, the least change first. Later chats are tried with the rules found before.
_PROBES: list[tuple[list[Messages], list[set[Rule]]]] = [
    ([[_USER], [_USER, _SAID, _USER_2]], [{Rule.CONTENT_AS_PARTS}]),
    ([[_SYSTEM, _USER], [_SYSTEM, _USER, _SAID, _USER_2]], [{Rule.NO_SYSTEM}]),
    ([[_SYSTEM, _LATE, _USER]], [{Rule.ONE_SYSTEM}]),
    (
        [
            [_USER, _LATE],
            [_SYSTEM, _USER, _LATE],
            [_SYSTEM, _USER, _LATE, _SAID, _USER_2],
            [_SYSTEM, _USER, _SAID, _LATE, _USER_2],
            [_SYSTEM, _USER, _SAID, _USER_2, _LATE],
        ],
        [{Rule.LATE_SYSTEM_AS_USER}, {Rule.LATE_SYSTEM_AS_USER, Rule.ALTERNATING}],
    ),
    ([[_USER, _USER_2], [_USER, _USER_2, _SAID, _USER_3], [_USER, _SAID, _SAID_2, _USER_2]], [{Rule.ALTERNATING}]),
    ([[_SAID, _USER], [_SYSTEM, _SAID, _USER], [_SYSTEM]], [{Rule.USER_FIRST}]),
    ([[_USER, _SAID]], [{Rule.USER_LAST}]),
    ([[_USER, {"role": "assistant"}, _USER_2]], [{Rule.CONTENT}]),
    (
        [
            [_USER, {"role": "assistant", "content": f"{_HARMONY}qzfinq<|return|>"}, _USER_2],
            [_USER, _turn("assistant", "asa", thinking=_HARMONY), _USER_2],
        ],
        [{Rule.HARMONY_AS_FIELDS}],
    ),
    (
        [[_USER, _turn("assistant", ""), _USER_2]],
        [{Rule.NO_EMPTY_ASSISTANT}, {Rule.NO_EMPTY_ASSISTANT, Rule.ALTERNATING}],
    ),
    ([[_turn("system", ""), _USER]], [{Rule.NO_EMPTY_SYSTEM}]),
    ([[_turn("user", "")], [_turn("user", ""), _SAID, _USER]], [{Rule.NO_EMPTY_USER}]),
    (
        [[_USER, _CALLED, _RESULT], [_USER, _CALLED, _RESULT, _SAID, _USER_2]],
        [
            {Rule.ARGUMENTS_AS_TEXT},
            {Rule.NO_TEXT_IS_NONE},
            {Rule.IDS_OF_FUNCTIONS},
            {Rule.RESULT_NAMES},
            {Rule.NO_TEXT_IS_NONE, Rule.ARGUMENTS_AS_TEXT},
            {Rule.RESULT_NAMES, Rule.ARGUMENTS_AS_TEXT},
            {Rule.LONG_IDS},
            {Rule.LONG_IDS, Rule.ARGUMENTS_AS_TEXT},
            {Rule.CALLS_AS_TEXT},
            {Rule.CALLS_AS_TEXT, Rule.ALTERNATING},
        ],
    ),
    (
        [
            [_SYSTEM, _USER, _CALLED, _RESULT],
            [_SYSTEM, _USER, _SAID, _USER_2, _CALLED, _RESULT],
            [_SYSTEM, _USER, _SAID],
        ],
        [{Rule.SYSTEM_IN_LAST_USER}, {Rule.NO_SYSTEM}],
    ),
    (
        [[_USER, _calls(_call(id_)), _result(id_)] for id_ in _FOREIGN_IDS],
        [{Rule.SHORT_IDS}, {Rule.LONG_IDS}],
    ),
    (
        [
            [_USER, _BOTH, _RESULT, _RESULT_2, _CALLED_3, _RESULT_3, _SAID],
            [_USER, _calls(_call(None), _call(None, "arh")), _result(None), _result(None, "ret"), _CALLED_3, _NAMELESS],
        ],
        [{Rule.UNIQUE_IDS}],
    ),
    (
        [
            [_USER, _CALLED, _RESULT, _USER_2],
            [_USER, _CALLED, _RESULT, _SAID, _SAID_2, _USER_2],
            [_USER, _SAID, _CALLED, _RESULT, _SAID_2],
            [_USER, _CALLED, _USER_2],
            [_USER, _CALLED, _SAID, _USER_2],
        ],
        [_AROUND, {Rule.TEXT_BESIDE_CALLS}, {Rule.RESULTS_FOR_CALLS}, _AROUND | {Rule.RESULTS_FOR_CALLS}],
    ),
    (
        [[_USER, _TALKING, _RESULT], [_SYSTEM, _USER, _TALKING, _RESULT]],
        [{Rule.TEXT_BEFORE_CALLS}, {Rule.TEXT_BEFORE_CALLS} | _AROUND],
    ),
    (
        [
            [_USER, _TALKING, _RESULT, _SAID],
            [_USER, _TALKING, _RESULT, _SAID, _USER_2],
            [_USER, _TALKING, _RESULT, _calls(_call("abcdefgh2"), word="tam"), _RESULT_2, _SAID, _USER_2],
        ],
        [
            {Rule.TEXT_BEFORE_ANSWERED_CALLS},
            {Rule.TEXT_BEFORE_CALLS},
            {Rule.TEXT_BEFORE_ANSWERED_CALLS} | _AROUND,
            {Rule.TEXT_BEFORE_CALLS} | _AROUND,
        ],
    ),
    (
        [[_USER, _calls(_call(), word="tal", reasoning="r", reasoning_content="r", thinking="r"), _RESULT]],
        [{Rule.TEXT_INTO_THOUGHT}],
    ),
    (
        [[_USER, _BOTH, _RESULT, _RESULT_2], [_USER, _BOTH, _RESULT, _RESULT_2, _SAID, _USER_2]],
        [{Rule.ONE_CALL}, {Rule.CALLS_AS_TEXT}, {Rule.CALLS_AS_TEXT, Rule.ALTERNATING}],
    ),
    (
        [
            [_USER, _RESULT],
            [_USER, _RESULT, _SAID, _USER_2],
            [_USER, _SAID, _RESULT],
            [_USER, _CALLED, _RESULT, _SAID, _RESULT_2],
            [_RESULT, _USER],
        ],
        [{Rule.ORPHANS_AS_TEXT}, {Rule.ORPHANS_AS_TEXT} | _AROUND, {Rule.ORPHANS_AS_TEXT, Rule.USER_FIRST} | _AROUND],
    ),
    (
        [
            [_USER, _CALLED, _USER_2, _RESULT],
            [_USER, _CALLED, _LATE, _RESULT],
            [_USER, _CALLED, _CALLED_2, _RESULT, _RESULT_2],
        ],
        [{Rule.RESULTS_AFTER_CALLS}, {Rule.RESULTS_AFTER_CALLS} | _AROUND],
    ),
    ([[_CALLED, _RESULT, _USER], [_SYSTEM, _CALLED, _RESULT]], [{Rule.USER_BEFORE_CALLS}, {Rule.USER_FIRST}]),
    ([[_USER, _CALLED, _result(word="")]], [{Rule.NO_EMPTY_RESULT}]),
    ([[_USER, _calls(_call(arguments='qzcutq{"')), _RESULT]], [{Rule.ARGUMENTS_AS_OBJECTS}]),
    ([[_USER, _CALLED]], [{Rule.RESULTS_FOR_CALLS}]),
]


class _Learner:
    """Learns the rules of a template for chats with or without tools."""

    def __init__(self, template: ChatTemplate, *, has_tools: bool) -> None:
        self._template = template
        self._tools: list[dict[str, Any]] | None = [_TOOL] if has_tools else None
        self._end_s = time.thread_time() + _LIMIT_S

    def learn(self) -> tuple[Rules, Rules]:
        """Find the rules, probe by probe, until the time is over.

        Without the first, for every chat, the template drops texts; the second are for a chat that it refuses.
        """
        found, losses = frozenset[Rule](), frozenset[Rule]()
        if (rule := self._rule_of_tools()) is not None:
            found = losses = frozenset({rule})
        for chats, remedies in _PROBES:
            if time.thread_time() > self._end_s:
                logger.warning("the chat template is slow to render: not all of its rules were learnt")
                break
            remedy = self._remedy(chats, self._outcomes(chats, found), found, remedies)
            if remedy is not None:
                found |= remedy
            losses |= self._against_losses(chats, losses, found, remedies)
        return losses, found | losses

    def _against_losses(self, chats: list[Messages], losses: Rules, found: Rules, remedies: list[set[Rule]]) -> Rules:
        """Return the rules for the chats that the template takes but does not show whole."""
        lost = [chat for chat in chats if self._outcome(chat, losses) is _ProbeResult.LOST]
        if not lost:
            return frozenset()
        known = [*remedies, *({rule} for rule in Rule if rule in found), set(found)]
        return self._remedy(lost, [_ProbeResult.LOST] * len(lost), losses, known) or frozenset()

    def _rule_of_tools(self) -> Rule | None:
        """Return the rule that makes the template show tools, or take chats without tools; None if it does."""
        if self._tools is None:
            is_refused = self._render([_USER], frozenset()) is None
            self._tools = [] if is_refused else None
            is_mended = is_refused and self._render([_USER], frozenset()) is not None
            return Rule.NO_TOOLS_IS_A_LIST if is_mended else None
        texts = [self._render([_USER], frozenset(rules)) for rules in ((), (Rule.SYSTEM_FOR_TOOLS,))]
        is_mended = [_TOOL["function"]["name"] in (text or "") for text in texts] == [False, True]
        return Rule.SYSTEM_FOR_TOOLS if is_mended else None

    def _remedy(
        self, chats: list[Messages], before: list[_ProbeResult], found: Rules, remedies: list[set[Rule]]
    ) -> Rules | None:
        """Return the remedy that mends the most chats and spoils none; among equals the first."""
        best, num_best = None, 0
        for rules in remedies if any(each is not _ProbeResult.SHOWN for each in before) else ():
            remedy = frozenset(rules)
            gains = [
                (outcome is _ProbeResult.SHOWN) - (was is _ProbeResult.SHOWN)
                for outcome, was in zip(self._outcomes(chats, found | remedy), before, strict=True)
            ]
            if min(gains) >= 0 and sum(gains) > num_best:
                best, num_best = remedy, sum(gains)
        return best

    def _outcomes(self, chats: list[Messages], rules: Rules) -> list[_ProbeResult]:
        return [self._outcome(chat, rules) for chat in chats]

    def _outcome(self, chat: Messages, rules: Rules) -> _ProbeResult:
        text = self._render(chat, rules)
        if text is None:
            return _ProbeResult.REFUSED
        is_shown = all(word in text for word in _WORD.findall(json.dumps(chat)))
        return _ProbeResult.SHOWN if is_shown else _ProbeResult.LOST

    def _render(self, chat: Messages, rules: Rules) -> str | None:
        """Return the prompt; None if the template refuses the chat."""
        if time.thread_time() > self._end_s:
            return None
        try:
            return self._template.render(adapt(rules, chat), variables={"tools": self._tools}, limit_s=0.25)
        except RequestError:
            return None
