"""Outrider served: the whole application, driven over HTTP with streaming."""

from __future__ import annotations

from dataclasses import replace

from bench.contenders.contender import ChannelTimes, Prompts, Run
from bench.contenders.event_streams import Body, Event, run_streams
from bench.contenders.served_times import read_served_times

_TIMEOUT_S = 600.0


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
        bodies = [self._body(prompt, num_tokens) for prompt in prompts]
        streams = run_streams(f"{self._base_url}/completions", bodies, _TIMEOUT_S)
        after = read_served_times(self._root_url)
        channel = ChannelTimes(
            after.channel.drafting_s - before.channel.drafting_s, after.channel.channel_s - before.channel.channel_s
        )
        run = Run.of_streams(streams, _token_ids)
        return replace(run, step_times=after.steps - before.steps, channel_times=channel)

    def _body(self, prompt: list[int], num_tokens: int) -> Body:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "repetition_penalty": self._repetition_penalty,
            "return_token_ids": True,
            "cache_salt": f"{self.name} {self._num_runs}",
            "speculation": {"enabled": self._is_speculating},
        }

    def close(self) -> None:
        pass


def _token_ids(event: Event) -> list[int]:
    return [token for choice in event.data.get("choices", ()) for token in choice.get("token_ids") or ()]
