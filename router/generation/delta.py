"""Deltas: pieces of a choice's text as they are sent to a client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

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

    Text comes later than its tokens while a character or a stop string may be incomplete. The stop token that ended a
    choice is among the tokens, not in the text.
    """

    index: int  # the choice
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # one per token if asked for; None for an echoed prompt token
    text_offsets: tuple[int, ...] = ()  # where each token's text begins, in characters; with logprobs only
    finish_reason: FinishReason | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    sources: tuple[str, ...] = ()  # one per token if asked for
    draft_ids: tuple[int, ...] = ()  # drafts that are not verified yet; never among the tokens
    draft_text: str = ""
    reasoning: str = ""  # the model's thought before the text
    num_reasoning_tokens: int = 0  # of the tokens, marks of the thought included
    stop_string: str | None = None  # the stop string that ended the text
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # of the prompt, if asked for; with the first tokens


@dataclass(frozen=True, slots=True)
class Gain:
    """A part of a choice's text: content, thought or calls."""

    text: str = ""
    thought: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    @property
    def parts(self) -> list[int]:
        """The parts that it has, by their place in a delta."""
        return [place for place, part in enumerate((self.thought, self.text, self.calls)) if part]


def split_delta(delta: Delta, gains: Iterable[Gain], finish_reason: FinishReason | None) -> list[Delta]:
    """Replace a delta's text by `gains`: return a delta for each run of thought, text and calls in this order.

    The first one has the tokens, the last one the finish reason.
    """
    runs: list[list[Gain]] = [[]]
    last = 0
    for gain in gains:
        if gain.parts:
            if gain.parts[0] < last:
                runs.append([])
            last = gain.parts[-1]
        runs[-1].append(gain)
    deltas = [Delta(delta.index, **_sums(run)) for run in runs]
    deltas[0] = replace(
        delta,
        text=deltas[0].text,
        reasoning=delta.reasoning + deltas[0].reasoning,
        tool_calls=deltas[0].tool_calls,
        finish_reason=None,
        stop_string=None,
    )
    deltas[-1] = replace(deltas[-1], finish_reason=finish_reason, stop_string=delta.stop_string)
    return deltas


def _sums(gains: Sequence[Gain]) -> dict[str, Any]:
    return {
        "text": "".join(gain.text for gain in gains),
        "reasoning": "".join(gain.thought for gain in gains),
        "tool_calls": tuple(call for gain in gains for call in gain.calls),
    }


def pieces(delta: Delta) -> Iterator[Delta]:
    """Yield deltas with one part each: a thought, a text, an entry of one call, the end, or a draft.

    Some clients read only the first entry of a chunk, some its text or its calls but not both, and some nothing next to
    a finish reason. Tokens stay with their thought or text.
    """
    parts = [*_thought_and_text(delta), *_call_entries(delta)]
    if not parts and delta.token_ids:
        parts = [Delta(delta.index, "", num_reasoning_tokens=delta.num_reasoning_tokens)]
    num_thought = delta.num_reasoning_tokens if delta.reasoning and len(parts) > 1 else len(delta.token_ids)
    for rank, piece in enumerate(parts):
        bounds = {0: (0, num_thought), 1: (num_thought, None)}.get(rank)
        yield piece if bounds is None else _with_tokens(piece, delta, slice(*bounds))
    if delta.finish_reason is not None:
        yield Delta(delta.index, "", finish_reason=delta.finish_reason, stop_string=delta.stop_string)
    if delta.draft_ids:
        yield Delta(delta.index, "", draft_ids=delta.draft_ids, draft_text=delta.draft_text)


def _thought_and_text(delta: Delta) -> Iterator[Delta]:
    if delta.reasoning:
        yield Delta(delta.index, "", reasoning=delta.reasoning, num_reasoning_tokens=delta.num_reasoning_tokens)
    if delta.text:
        yield Delta(delta.index, delta.text)


def _call_entries(delta: Delta) -> Iterator[Delta]:
    """Yield the entries of calls: the first of a call has its id and its name, the others a part of its arguments."""
    for _, entries in groupby(delta.tool_calls, key=lambda call: call.index):
        arguments = ""
        index = 0
        for call in entries:
            index = call.index
            arguments += call.arguments
            if call.id is not None:
                yield Delta(delta.index, "", tool_calls=(replace(call, arguments=""),))
        if arguments:
            yield Delta(delta.index, "", tool_calls=(ToolCallDelta(index, arguments=arguments),))


def _with_tokens(piece: Delta, whole: Delta, place: slice) -> Delta:
    """Return the piece with some of the tokens, and all that goes with them."""
    return replace(
        piece,
        token_ids=whole.token_ids[place],
        logprobs=whole.logprobs[place],
        text_offsets=whole.text_offsets[place],
        sources=whole.sources[place],
    )


def runs_of(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Join consecutive deltas of one choice as far as no thought follows a text."""
    run: list[Delta] = []
    for delta in deltas:
        if delta.reasoning and any(earlier.text for earlier in run):
            yield join_deltas(run)
            run = []
        run.append(delta)
    if run:
        yield join_deltas(run)


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of one choice; drafts are kept only if no token follows them."""
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
        draft_ids=deltas[-1].draft_ids,
        draft_text=deltas[-1].draft_text,
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
