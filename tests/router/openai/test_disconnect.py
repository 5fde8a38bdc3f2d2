"""A client that goes away stops its generation, over a real socket."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.router.fake_backend import FakeBackend


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_stops_it(base_url: str, backend: FakeBackend, n: int) -> None:
    backend.step_s = 0.02
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stream": True, "n": n}
    async with httpx.AsyncClient() as http, http.stream("POST", f"{base_url}/completions", json=body) as response:
        async for line in response.aiter_lines():
            assert json.loads(line.removeprefix("data: "))
            break
        assert backend.num_running == n
    await backend.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_stops_it(base_url: str, backend: FakeBackend, stream: bool) -> None:
    backend.step_s = 30.0
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stream": stream}
    async with httpx.AsyncClient(timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{base_url}/completions", json=body)
    await backend.until_idle()
    assert backend.num_closed == 1


async def test_leaving_a_whole_answer_stops_it(base_url: str, backend: FakeBackend) -> None:
    backend.step_s = 0.05
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "n": 2}
    async with httpx.AsyncClient(timeout=0.3) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{base_url}/completions", json=body)
    await backend.until_idle()


async def test_a_stop_string_stops_the_engine_too(base_url: str, backend: FakeBackend) -> None:
    backend.step_s = 0.01
    body = {"model": "fake", "prompt": "a", "max_tokens": 120, "stop": "d"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{base_url}/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "bc"
    assert backend.num_running == 0
