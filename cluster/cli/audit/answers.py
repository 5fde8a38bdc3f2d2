"""Whole answers: counts, stops, limits, JSON and tool calls, and their speed next to the server's own figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from cluster.cli.audit.client import CHAT, COMPLETIONS, Server
from cluster.cli.audit.evidence import HitEvidence
from cluster.cli.audit.trial import PROMPTS, Audit, Trial, all_of
from cluster.cli.audit.wire import Answer, Body, Choice, NoVerdictError, RefusedError
from cluster.cli.server import read_metrics

_FORMAT_TOKENS = 300
_EARLY_TOKENS, _EARLY_LIMIT = 40, 48

_COLORS = {"type": "string", "enum": ["red", "green", "blue"]}
_SCHEMAS: tuple[Body, ...] = (
    {"color": _COLORS, "count": {"type": "integer"}, "is_new": {"type": "boolean"}},
    {"name": {"type": "string"}, "size": {"type": "string", "enum": ["small", "large"]}},
    {
        "items": {"type": "array", "items": _COLORS, "minItems": 1, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
)
_TYPES: Mapping[str, Any] = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}


async def usage(audit: Audit, trial: Trial) -> None:
    """Compare counts of tokens with the tokens of the answer."""
    part, num_prompt = trial.add(HitEvidence()), dict[str, int | None]()
    server = audit.server
    number = min(4, server.max_choices)
    while not trial.is_enough():
        for text in PROMPTS:
            answer = await server.ask(text, max_tokens=12, n=number, logprobs=server.num_top or None)
            counts = [answer.count(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
            if None in counts:
                raise NoVerdictError("answers have no usage object with three counts")
            prompt, completion, total = (count or 0 for count in counts)
            problems = [
                f"total_tokens {total} is not {prompt} + {completion}" if total != prompt + completion else None,
                _miscount(answer, completion) if server.num_top else None,
                f"prompt_tokens {prompt} were {num_prompt[text]} before"
                if num_prompt.get(text, prompt) != prompt
                else None,
            ]
            num_prompt[text] = prompt
            trial.hit(part, answer, "counts of the tokens", next(filter(None, problems), None))
    trial.sentence = f"{part.num_hits} of {part.num_draws} answers are miscounted"


def _miscount(answer: Answer, completion: int) -> str | None:
    """Return an error of the count of generated tokens; an end token may be counted or not."""
    number = sum(len(choice.tokens) for choice in answer.choices)
    ended = sum(choice.finish_reason == "stop" for choice in answer.choices)
    if number - ended <= completion <= number + ended:
        return None
    return f"completion_tokens is {completion}, and the logprobs have {number} tokens"


async def stops(audit: Audit, trial: Trial) -> None:
    """Ask for greedy texts again with a piece of them as the stop."""
    part, server = trial.add(HitEvidence()), audit.server
    greedy: Body = {"max_tokens": 24, "temperature": 0.0}
    for start in range(1, 99):
        if trial.is_enough():
            break
        for text in PROMPTS:
            whole = (await server.ask(text, **greedy)).choices[0].text
            # Take a piece of the text as the stop, further on in each turn.
            stop = whole[start * 2 :][:3]
            at = whole.find(stop)
            if len(stop) < 3 or at < 1 or not stop.strip():
                continue
            answer = await server.ask(text, **greedy, stop=[stop])
            choice = answer.choices[0]
            # The answer must end at the first place of the piece, unless it has parted from the text before.
            shared = min(at, len(choice.text))
            if choice.text[:shared].rstrip() != whole[:shared].rstrip() and stop not in choice.text:
                continue  # a near tie: another text
            seen = None
            if choice.text.rstrip() != whole[:at].rstrip():
                seen = f"{choice.text!r}"
            elif choice.finish_reason != "stop":
                seen = f"finish_reason {choice.finish_reason!r}"
            trial.hit(part, answer, f"{whole[:at]!r} with finish_reason 'stop', by the stop {stop!r}", seen)
    trial.sentence = f"{part.num_hits} of {part.num_draws} answers do not end at their stop"


async def max_tokens(audit: Audit, trial: Trial) -> None:
    """Count the tokens of answers against their limit."""
    part = trial.add(HitEvidence())
    while not trial.is_enough():
        for rank, text in enumerate(PROMPTS):
            limit = 1 + rank % 11
            answer = await audit.server.ask(text, max_tokens=limit)
            number = answer.count("completion_tokens")
            if number is None:
                raise NoVerdictError("answers do not count their tokens")
            seen = None
            if number > limit:
                seen = f"{number} tokens"
            elif answer.choices[0].finish_reason == "length" and number < limit:
                seen = f"finish_reason 'length' after {number} tokens"
            trial.hit(part, answer, f"at most {limit} tokens", seen)
    trial.sentence = f"{part.num_hits} of {part.num_draws} answers miss their limit"


async def min_tokens(audit: Audit, trial: Trial) -> None:
    """Ask for more tokens than some answers have by themselves."""
    server, part = audit.server, trial.add(HitEvidence())
    text = await _ends_early(server)
    while not trial.is_enough():
        fields = {"max_tokens": _EARLY_LIMIT, "min_tokens": _EARLY_TOKENS, "n": server.max_choices, "logprobs": 1}
        answer = await server.ask(text, **fields)
        for choice in answer.choices:
            seen = f"{len(choice.tokens)} tokens" if _is_early(choice) else None
            trial.hit(part, answer, f"at least {_EARLY_TOKENS} tokens", seen)
    trial.sentence = f"{part.num_hits} of {part.num_draws} answers end before min_tokens"


async def _ends_early(server: Server) -> str:
    if not server.num_top:
        raise NoVerdictError("without logprobs the tokens of a choice cannot be counted")
    for text in ("Yes or no? Answer:", *PROMPTS):
        answer = await server.ask(text, max_tokens=_EARLY_LIMIT, n=min(16, server.max_choices), logprobs=1)
        # Enough choices that end early by themselves.
        if sum(map(_is_early, answer.choices)) >= 0.2 * len(answer.choices):
            return text
    raise NoVerdictError(f"no answer ends within {_EARLY_TOKENS} tokens by itself")


def _is_early(choice: Choice) -> bool:
    return choice.finish_reason == "stop" and len(choice.tokens) < _EARLY_TOKENS - 1


async def json_schemas(audit: Audit, trial: Trial) -> None:
    """Validate answers that must match a JSON schema."""

    def fields(schema: Body) -> Body:
        form = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": form}}

    await _validate(audit, trial, fields, lambda choice: [choice.text])


async def tool_calls(audit: Audit, trial: Trial) -> None:
    """Validate the arguments of required tool calls."""

    def fields(schema: Body) -> Body:
        tool = {"type": "function", "function": {"name": "note", "description": "Keeps a note.", "parameters": schema}}
        return {"tools": [tool], "tool_choice": "required"}

    await _validate(audit, trial, fields, lambda choice: [arguments for _, arguments in choice.calls])


async def _validate(audit: Audit, trial: Trial, fields: Any, texts: Any) -> None:
    part, num_cut = trial.add(HitEvidence()), 0
    while not trial.is_enough():
        for properties in _SCHEMAS:
            schema = {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
            for answer in await _ask_formats(audit.server, fields(schema)):
                for choice in answer.choices:
                    if choice.finish_reason == "length":
                        num_cut += 1
                        continue
                    found = texts(choice)
                    seen = (
                        None
                        if found and all(_is_valid(text, schema) for text in found)
                        else f"{choice.text!r} {choice.calls}"
                    )
                    trial.hit(part, answer, f"JSON of {json.dumps(schema)}", seen)
        if num_cut > 64 and num_cut > part.num_draws:
            raise NoVerdictError(f"{num_cut} answers ran into max_tokens {_FORMAT_TOKENS} before they were complete")
    cut = f"; {num_cut} ran into max_tokens {_FORMAT_TOKENS} and do not count" if num_cut else ""
    trial.sentence = f"{part.num_draws - part.num_hits} of {part.num_draws} are valid{cut}"


async def _ask_formats(server: Server, fields: Body) -> Sequence[Answer]:
    """Ask in a chat, or as a text where there is no chat."""
    number = min(8, server.max_choices)
    ways = [(CHAT, number), (CHAT, 1)]
    if not (server.is_chat or "tools" in fields):
        ways.append((COMPLETIONS, number))
    refusals = []
    for path, n in ways:
        asked = {**fields, "max_tokens": _FORMAT_TOKENS, "n": n, "is_chat": path == CHAT}
        bodies = [server.body("Describe a toy as JSON: ", **asked) for _ in range(server.width)]
        try:
            return await all_of(server.post(path, body) for body in bodies)
        except RefusedError as refused:
            refusals.append(refused)
    raise refusals[-1]


def _is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        return _matches(json.loads(text), schema)
    except (ValueError, RecursionError):
        return False


def _matches(value: Any, schema: Mapping[str, Any]) -> bool:
    """Check the keywords that `_SCHEMAS` uses."""
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        return False
    if kind == "array":
        is_sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return is_sized and all(_matches(each, schema["items"]) for each in value)
    if kind == "object":
        properties = schema["properties"]
        return value.keys() == properties.keys() and all(_matches(value[key], properties[key]) for key in properties)
    return value in schema.get("enum", [value])


# Histograms of seconds per token, by vLLM's names, and Outrider's and SGLang's.
_PER_TOKEN = (
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "outrider_inter_token_latency_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:time_per_output_token_seconds",
)


async def speed(audit: Audit, trial: Trial) -> None:
    """Stream texts one after the other, and compare the seconds per token with the server's metrics."""
    server = audit.server
    seen: list[float] = []
    gaps: list[float] = []
    reported: list[float] = []
    part = trial.add(HitEvidence(rate=0.9))
    for text in PROMPTS:
        if trial.is_enough():
            break
        # Measure one stream from outside, between two readings of the metrics.
        before = await _per_token(server)
        body = server.body(text, max_tokens=96, stream_options={"include_usage": True})
        times, number, claimed = await _stream(server, body)
        if number < 16 or len(times) < 2:  # too short for a speed
            continue
        seen.append((times[-1] - times[0]) / (number - 1))
        gaps += [after - earlier for earlier, after in pairwise(times)]
        after = await _per_token(server)
        if claimed is None and before and after and after[1] > before[1]:
            claimed = (after[0] - before[0]) / (after[1] - before[1])
        # A server flatters itself if a token takes twice the time that it reports.
        if claimed:
            reported.append(claimed)
            is_flattered = seen[-1] > 2.0 * claimed  # a stream's own overhead stays below twice its time
            slow = f"{1 / seen[-1]:.1f} tokens/s from outside" if is_flattered else None
            trial.hit(part, Answer(server.request(body), (), {}), f"the reported {1 / claimed:.1f} tokens/s", slow)
    if not seen:
        raise NoVerdictError("no streamed answer is long enough to measure")
    worst = sorted(gaps)[int(0.99 * (len(gaps) - 1))]
    trial.sentence = (
        f"{1 / median(seen):.1f} tokens/s from outside, "
        f"gaps p50 {1000 * median(gaps):.1f} ms, p99 {1000 * worst:.1f} ms"
    )
    if not reported:
        raise NoVerdictError(f"{trial.sentence}; the server reports no times per token")
    trial.sentence += f"; reported {1 / median(reported):.1f} tokens/s"


async def _stream(server: Server, body: Body) -> tuple[list[float], int, float | None]:
    """Return the times of texts, the number of tokens, and llama-server's own seconds per token."""
    times: list[float] = []
    number, claimed = 0, None
    async for now_s, event in server.stream(body):
        choices = event.get("choices") or [{}]
        delta: Any = choices[0].get("delta") or {}
        if choices[0].get("text") or delta.get("content"):
            times.append(now_s)
        number = int((event.get("usage") or {}).get("completion_tokens") or number)
        speed = (event.get("timings") or {}).get("predicted_per_second")
        claimed = 1 / speed if speed else claimed
    return times, number or len(times), claimed


async def _per_token(server: Server) -> tuple[float, float] | None:
    """Return the sum and the count of seconds per token so far."""
    parts = urlsplit(server.url)
    text = await server.text_of(f"{parts.scheme}://{parts.netloc}/metrics")
    try:
        reading = read_metrics(text or "")
    except ValueError:
        return None
    for name in _PER_TOKEN:
        if f"{name}_sum" in reading and f"{name}_count" in reading:
            return sum(reading[f"{name}_sum"].values()), sum(reading[f"{name}_count"].values())
    return None
