"""Deltas: the unit in which the text of a choice leaves for a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The gain of one tool call; its first delta has its id and its name."""

    index: int  # among the calls of its choice
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice and the tokens that became final with it.

    Text lags behind tokens while a character or a stop string may be incomplete. The stop token that ended a choice
    is among the tokens, not in the text.
    """

    index: int  # the choice
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token if asked for; None for an echoed prompt token
    text_offsets: tuple[int, ...] = ()  # where each token's text begins, in characters; with logprobs only
    finish_reason: FinishReason | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    sources: tuple[str, ...] = ()  # one per token if asked for
    guess_ids: tuple[int, ...] = ()  # drafts that are not verified yet; never among the tokens
    guess_text: str = ""
    reasoning: str = ""  # what the model thought before the text, told apart from it
    num_reasoning_tokens: int = 0  # of the tokens, marks of the thought included
    stop_string: str | None = None  # the one that ended the text
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # of the prompt, if asked for; with the first tokens


class DeltaReader(Protocol):
    """Tells the parts of one choice's text apart."""

    def read(self, delta: Delta) -> Delta:
        """Return the delta with what is certain to be content, thought or call by then."""
        ...


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Return consecutive deltas of one choice as one; drafts count where no token has come behind them."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        text_offsets=tuple(offset for delta in deltas for offset in delta.text_offsets),
        finish_reason=deltas[-1].finish_reason,
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        sources=tuple(source for delta in deltas for source in delta.sources),
        guess_ids=deltas[-1].guess_ids,
        guess_text=deltas[-1].guess_text,
        reasoning="".join(delta.reasoning for delta in deltas),
        num_reasoning_tokens=sum(delta.num_reasoning_tokens for delta in deltas),
        stop_string=deltas[-1].stop_string,
        prompt_logprobs=tuple(logprobs for delta in deltas for logprobs in delta.prompt_logprobs),
    )


def whole_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return the calls: the first delta of each names it, and all of its deltas together hold its arguments."""
    return [
        ToolCallDelta(
            first.index,
            first.id,
            first.name or "",
            "".join(delta.arguments for delta in deltas if delta.index == first.index),
        )
        for first in deltas
        if first.id is not None
    ]
