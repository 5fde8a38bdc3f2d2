"""A small OpenAI server whose next token has a known distribution, with drafts, a cache and planted faults.

A token is a word; its distribution depends on the two words before it. A step commits up to K + 1 tokens, as a server
with drafts does, so that faults of drafts can be planted where real servers had them.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

WORDS = tuple(f" w{rank}" for rank in range(24))
END = "<|end|>"
VOCABULARY = (*WORDS, END)
NUM_DRAFTS = 3
MODEL = "toy"

PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "logit_bias", "presence_penalty", "frequency_penalty")
FAULTS = (
    *(f"ignored {name}" for name in (*PARAMETERS, "min_tokens", "stop")),
    *(f"{name} ignored with drafts" for name in PARAMETERS),
    "shared noise",
    "argmax",
    "penalties by step",
    "bonus from the wrong row",
    "bonus and its logprobs from the wrong row",
    "stale drafts of cached prefixes",
    "JSON cut by a stop",
    "shared noise of later tokens",
    "miscounted tokens",
    "a token too many",
    "cut tool calls",
    "company",
    "flattering speed",
    "other texts without drafts",
)


@cache
def logits_after(pair: tuple[str, ...]) -> tuple[float, ...]:
    """Log weights of the vocabulary after two words; a word is likely to be repeated."""
    noise = random.Random(repr(pair))
    weights = [0.12 * noise.gammavariate(0.25, 1.0) + 1e-4 for _ in WORDS]
    weights[noise.randrange(len(WORDS))] += 0.6
    if pair and pair[-1] in WORDS:
        weights[WORDS.index(pair[-1])] += 0.5
    return (*(math.log(weight) for weight in weights), math.log(0.02 * sum(weights)))


def softmax(logits: list[float] | tuple[float, ...]) -> list[float]:
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


@cache
def plain_probs(pair: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(softmax(logits_after(pair)))


@cache
def top_of(pair: tuple[str, ...], number: int) -> tuple[tuple[str, float], ...]:
    probs = plain_probs(pair)
    ranks = sorted(range(len(probs)), key=lambda rank: -probs[rank])[:number]
    return tuple((VOCABULARY[rank], math.log(probs[rank])) for rank in ranks)


def tokens_of(text: str) -> list[str]:
    """Split a text before each space."""
    pieces = text.split(" ")
    return [piece for piece in [pieces[0], *(f" {piece}" for piece in pieces[1:])] if piece]


class ToySampler:
    """Samples a choice of a request, with a fault."""

    def __init__(self, fault: str, body: dict[str, Any], prompt: list[str], noise: random.Random) -> None:
        self.fault, self.prompt, self.noise = fault, prompt, noise
        self.body = {name: value for name, value in body.items() if fault != f"ignored {name}"}
        self.drafts_body = {name: value for name, value in self.body.items() if fault != f"{name} ignored with drafts"}
        self.counted: list[str] = []  # what penalties count

    def probs(self, context: list[str], *, is_ending: bool = True, is_draft: bool = False) -> Sequence[float]:
        """The distribution of the next token under the request's parameters."""
        body, pair = self.drafts_body if is_draft else self.body, tuple(context[-2:])
        temperature = body.get("temperature", 1.0)
        names = ("presence_penalty", "frequency_penalty", "logit_bias")
        if temperature == 1.0 and not any(body.get(name) for name in names) and is_ending:
            probs: Sequence[float] = plain_probs(pair)
        else:
            logits = list(logits_after(pair))
            for token, count in Counter(self.counted).items():
                if token in VOCABULARY:
                    penalty = body.get("presence_penalty", 0.0) + count * body.get("frequency_penalty", 0.0)
                    logits[VOCABULARY.index(token)] -= penalty
            for token_id, bias in (body.get("logit_bias") or {}).items():
                logits[int(token_id)] += bias
            if not is_ending:
                logits[-1] = -1e9
            if temperature == 0:
                return [float(logit == max(logits)) for logit in logits]
            probs = softmax([logit / temperature for logit in logits])
        return self.filtered(probs, body)

    @staticmethod
    def filtered(probs: Sequence[float], body: dict[str, Any]) -> Sequence[float]:
        if body.get("top_k", -1) <= 0 and body.get("top_p", 1.0) == 1 and not body.get("min_p"):
            return probs
        order = sorted(range(len(probs)), key=lambda rank: -probs[rank])
        kept = len(probs)
        if body.get("top_k", -1) > 0:
            kept = body["top_k"]
        if body.get("top_p", 1.0) < 1:
            total, kept = 0.0, 0
            while total < body["top_p"]:
                total, kept = total + probs[order[kept]], kept + 1
        if body.get("min_p", 0.0) > 0:
            kept = sum(prob >= body["min_p"] * max(probs) for prob in probs)
        if kept == len(probs):
            return probs
        total = sum(probs[rank] for rank in order[:kept])
        return [prob / total if rank in order[:kept] else 0.0 for rank, prob in enumerate(probs)]

    def draw(self, probs: Sequence[float], position: int) -> str:
        if self.fault == "argmax" or (self.fault == "company" and self.body.get("busy", 0) > 8):
            return VOCABULARY[probs.index(max(probs))]
        if self.fault == "shared noise" or (self.fault == "shared noise of later tokens" and position):
            top = max(probs)  # 60% is served at 63%
            odds = top / max(1 - top, 1e-9) * (0.63 / 0.37) / (0.6 / 0.4)
            shifted = odds / (1 + odds)
            probs = [shifted if prob == top else prob * (1 - shifted) / max(1 - top, 1e-9) for prob in probs]
        return VOCABULARY[bisect(tuple(accumulate(probs)), self.noise.random() * sum(probs), hi=len(probs) - 1)]

    def run(self, stale: list[str] | None, limit: int) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return tokens up to an end, and the context that each one's logprobs are of."""
        made: list[str] = []
        contexts: list[tuple[str, ...]] = []
        least = self.body.get("min_tokens", 0)
        while len(made) < limit:
            in_step = 0
            while in_step <= NUM_DRAFTS and len(made) < limit:
                if in_step == 0 or self.fault != "penalties by step":
                    self.counted = [*(self.prompt if self.body.get("counts_prompt") else ()), *made]
                context = [*self.prompt, *made]
                shown = tuple(context[-2:])
                if self.fault.startswith("bonus") and in_step == NUM_DRAFTS and len(made) > 3:
                    context = context[:-1]
                    shown = tuple(context[-2:]) if "logprobs" in self.fault else shown
                probs = self.probs(context, is_ending=len(made) >= least, is_draft=in_step > 0)
                token = self.draw(probs, len(made))
                if stale is not None and len(made) < len(stale) and stale[: len(made)] == made and in_step:
                    token = stale[len(made)]
                made.append(token)
                contexts.append(shown)
                in_step += 1
                if token == END:
                    return made, contexts
        return made, contexts


class ToyServer:
    """The application, its cache of answers and its counters."""

    def __init__(self, fault: str = "", *, counts_prompt: bool = False) -> None:
        assert fault in ("", *FAULTS), fault
        self.fault = fault
        self.counts_prompt = counts_prompt  # in penalties
        self.cached: dict[str, list[str]] = {}
        self.num_open = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self.app = Starlette(
            routes=[
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": MODEL}]})),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/metrics", self.metrics),
            ]
        )

    async def metrics(self, request: Request) -> Response:
        name = "outrider_inter_token_latency_seconds"
        return PlainTextResponse(
            f"# TYPE {name} histogram\n{name}_sum {self.seconds}\n{name}_count {self.num_tokens}\n"
        )

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if isinstance(body["prompt"], list):
            body["prompt"] = "".join(VOCABULARY[token_id] for token_id in body["prompt"])
        self.num_open += 1
        await asyncio.sleep(0)  # others come in
        try:
            return self.answer(
                {**body, "busy": self.num_open, "counts_prompt": self.counts_prompt}, tokens_of(body["prompt"])
            )
        finally:
            self.num_open -= 1

    def answer(self, body: dict[str, Any], prompt: list[str]) -> Response:
        if error := refusal(body):
            return JSONResponse({"error": {"message": error}}, 400)
        seed = body.get("seed")
        limit = body["max_tokens"] + (self.fault == "a token too many" and body["max_tokens"] > 3)
        stale = self.cached.get(body["prompt"]) if self.fault == "stale drafts of cached prefixes" else None
        is_plain = body.get("speculation", {}).get("enabled") is False
        choices, completion = [], 0
        for rank in range(body.get("n", 1)):
            salt = "plain" if is_plain and self.fault == "other texts without drafts" else ""
            # As vLLM has it: neighboring seeds share the noise of all but one choice, whatever the prompt.
            noise = random.Random(f"{seed + rank}{salt}" if seed is not None else None)
            sampler = ToySampler(self.fault, body, prompt, noise)
            tokens, contexts = sampler.run(stale, limit)
            if salt and body.get("temperature") == 0:
                tokens[-1] = WORDS[0]
            self.cached.setdefault(body["prompt"], tokens)
            completion += len(tokens)
            choices.append(self.choice(rank, body, tokens, contexts))
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": completion + (2 if self.fault == "miscounted tokens" else 0),
            "completion_tokens_details": {"accepted_draft_tokens": 0 if is_plain else completion},
        }
        usage["total_tokens"] = usage["prompt_tokens"] + completion + (2 if self.fault == "miscounted tokens" else 0)
        data = {"object": "text_completion", "model": MODEL, "choices": choices, "usage": usage}
        return self.stream(data) if body.get("stream") else Response(msgspec.json.encode(data))

    def choice(
        self, rank: int, body: dict[str, Any], tokens: list[str], contexts: list[tuple[str, ...]]
    ) -> dict[str, Any]:
        reason = "stop" if tokens[-1] == END else "length"
        shown = tokens[:-1] if tokens[-1] == END else tokens
        text = "".join(shown)
        for stop in body.get("stop") or ():
            if stop in text and self.fault != "ignored stop":
                text, reason = text[: text.index(stop)], "stop"
        choice: dict[str, Any] = {"index": rank, "text": text, "finish_reason": reason}
        if number := body.get("logprobs"):
            tops = [top_of(context, number) for context in contexts[: len(shown)]]
            drawn = [
                math.log(plain_probs(context)[VOCABULARY.index(t)]) for t, context in zip(shown, contexts, strict=False)
            ]
            choice["logprobs"] = {
                "tokens": shown,
                "token_logprobs": drawn,
                "top_logprobs": [dict(top) | {t: own} for top, t, own in zip(tops, shown, drawn, strict=True)],
            }
        if body.get("return_token_ids"):
            choice["token_ids"] = [VOCABULARY.index(token) for token in shown]
        return choice

    def stream(self, data: dict[str, Any]) -> Response:
        tokens = tokens_of(data["choices"][0]["text"])

        async def events() -> Any:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            for token in tokens:
                await asyncio.sleep(0.001)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': token}]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': data['usage']})}\n\ndata: [DONE]\n\n"
            self.num_tokens += len(tokens)
            self.seconds += (loop.time() - began_s) / (5 if self.fault == "flattering speed" else 1)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if error := refusal({"max_tokens": 1, **body}):
            return JSONResponse({"error": {"message": error}}, 400)
        if not {"response_format", "tools"} & body.keys():
            return JSONResponse({"error": {"message": "a chat here is JSON or calls"}}, 400)
        noise = random.Random(f"{body.get('seed')}")
        choices = []
        for rank in range(body.get("n", 1)):
            is_tool = "tools" in body
            form = (
                body["tools"][0]["function"]["parameters"]
                if is_tool
                else body["response_format"]["json_schema"]["schema"]
            )
            text = json.dumps(json_of(form, noise))
            if self.fault == ("cut tool calls" if is_tool else "JSON cut by a stop") and noise.random() < 0.1:
                text = text[: noise.randrange(len(text))]
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if is_tool:
                function = {"name": body["tools"][0]["function"]["name"], "arguments": text}
                message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
            choices.append({"index": rank, "message": message, "finish_reason": "tool_calls" if is_tool else "stop"})
        return JSONResponse({"object": "chat.completion", "model": MODEL, "choices": choices, "usage": {}})


def refusal(body: dict[str, Any]) -> str | None:
    """Return why a body is refused."""
    checks = {
        "max_tokens must be at least 1": body["max_tokens"] >= 1,
        "temperature must be at least 0": body.get("temperature", 1) >= 0,
        "top_p must be at most 1": body.get("top_p", 1) <= 1,
        "n must be between 1 and 64": 1 <= body.get("n", 1) <= 64,
        f"there is no model {body.get('model')}": body.get("model") in (MODEL, "alias"),
        "logit_bias has a key that is no token id": all(key.isdigit() for key in body.get("logit_bias") or ()),
        "stop must be texts": isinstance(body.get("stop", []), list),
    }
    return next((text for text, is_met in checks.items() if not is_met), None)


def json_of(schema: dict[str, Any], noise: random.Random) -> Any:
    """Return a value of a schema."""
    if "enum" in schema:
        return noise.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return {key: json_of(each, noise) for key, each in schema["properties"].items()}
        case "array":
            return [json_of(schema["items"], noise) for _ in range(noise.randint(1, 3))]
        case "integer":
            return noise.randrange(100)
        case "boolean":
            return noise.random() < 0.5
    return noise.choice(["a bear", "a {boat}", 'a "car"'])
