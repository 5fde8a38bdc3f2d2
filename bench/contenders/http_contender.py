"""Outrider served: the whole application, driven by the OpenAI client over HTTP with streaming."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from openai import AsyncOpenAI

from bench.contenders.contender import ChannelTimes, Prompts, Run
from bench.contenders.served_times import read_served_times


@dataclass(slots=True)
class Answer:
    """The tokens of one stream, and the times of their arrival."""

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)


class HttpContender:
    """Streams from a running application; `is_speculating` False switches speculation off per request."""

    def __init__(self, base_url: str, model: str, *, is_speculating: bool, repetition_penalty: float = 1.0) -> None:
        self.name = f"outrider HTTP, {'draft' if is_speculating else 'plain'}"
        self._base_url = base_url
        self._root_url = base_url.removesuffix("/v1")
        self._model = model
        self._is_speculating = is_speculating
        self._repetition_penalty = repetition_penalty
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        before = read_served_times(self._root_url)
        run = asyncio.run(self._run(prompts, num_tokens))
        after = read_served_times(self._root_url)
        channel = ChannelTimes(
            after.channel.drafting_s - before.channel.drafting_s, after.channel.channel_s - before.channel.channel_s
        )
        return replace(run, step_times=after.steps - before.steps, channel_times=channel)

    async def _run(self, prompts: Prompts, num_tokens: int) -> Run:
        async with AsyncOpenAI(base_url=self._base_url, api_key="none", max_retries=0) as client:
            began = time.perf_counter()
            streams = (self._stream(client, prompt, num_tokens, began) for prompt in prompts)
            answers = await asyncio.gather(*streams)
            seconds = time.perf_counter() - began
        return Run([answer.token_ids for answer in answers], seconds, arrivals=[answer.arrivals for answer in answers])

    async def _stream(self, client: AsyncOpenAI, prompt: list[int], num_tokens: int, began: float) -> Answer:
        stream = await client.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            stream=True,
            extra_body={
                "ignore_eos": True,
                "repetition_penalty": self._repetition_penalty,
                "return_token_ids": True,
                "cache_salt": f"{self.name} {self._num_runs}",
                "speculation": {"enabled": self._is_speculating},
            },
        )
        answer = Answer()
        async for chunk in stream:
            token_ids = [token for choice in chunk.choices for token in getattr(choice, "token_ids", None) or ()]
            if token_ids:
                answer.token_ids.extend(token_ids)
                answer.arrivals.append(time.perf_counter() - began)
        return answer

    def close(self) -> None:
        pass
