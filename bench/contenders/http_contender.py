"""Outrider served: the whole application, driven over HTTP with streaming."""

from __future__ import annotations

from bench.contenders.contender import ContenderRun, Prompts
from bench.contenders.event_streams import Body, Event, run_streams

_TIMEOUT_S = 600.0


class HttpContender:
    """Streams from a running application; `speculation` is that field of each request."""

    def __init__(self, base_url: str, model: str, speculation: Body, repetition_penalty: float = 1.0) -> None:
        self.name = f"outrider HTTP, {'draft' if speculation['enabled'] else 'plain'}"
        self._url = f"{base_url}/completions"
        self._model = model
        self._speculation = speculation
        self._repetition_penalty = repetition_penalty
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        self._num_runs += 1
        streams = run_streams(self._url, [self._body(prompt, num_tokens) for prompt in prompts], _TIMEOUT_S)
        return ContenderRun.of_streams(streams, _token_ids)

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
            "cache_salt": f"{self._speculation} {self._num_runs}",
            "speculation": self._speculation,
        }

    def close(self) -> None:
        pass


def _token_ids(event: Event) -> list[int]:
    return [token for choice in event.data.get("choices", ()) for token in choice.get("token_ids") or ()]
