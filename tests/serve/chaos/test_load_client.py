"""The client of `make overload`: every request is counted once, as what became of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from tests.serve.chaos.load_client import NO_ANSWER, OK, REFUSED, LoadAnswer, LoadClient

Answering = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def answers_of(num_requests: int, answering: Answering) -> list[LoadAnswer]:
    """Return the client's answers to requests to a server."""

    async def run() -> list[LoadAnswer]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await answering(json.loads(await reader.readexactly(length)), writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = LoadClient(server.sockets[0].getsockname()[1], "tiny", ("heavy", "light"))
        answers: list[LoadAnswer] = []
        for _ in range(num_requests):
            client.send(answers.append)
        await client.settle()
        server.close()
        return answers

    return asyncio.run(run())


def response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def test_tokens_are_those_of_the_answer_and_tenants_take_turns() -> None:
    bodies = []

    async def answer(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        content = response(OK, json.dumps({"usage": {"completion_tokens": 7}}).encode())
        for part in (content[:30], content[30:50], content[50:]):  # as slow networks do
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    answers = answers_of(6, answer)
    assert [(each.status, each.num_tokens, each.is_by_proxy) for each in answers] == [(OK, 7, False)] * 6
    assert sorted(each.tenant for each in answers) == ["heavy"] * 3 + ["light"] * 3
    assert all(each.sent_s < each.ended_s for each in answers)
    assert all(body["model"] == "tiny" for body in bodies)


def test_refusals_of_the_proxy_are_told_from_those_behind_it() -> None:
    texts = [b"The pairs are full; send the request again later.", b"9 requests are running or queued"]

    async def refuse(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(response(REFUSED, texts.pop()))

    assert {(each.status, each.is_by_proxy) for each in answers_of(2, refuse)} == {(REFUSED, True), (REFUSED, False)}


def test_a_connection_that_breaks_off_or_makes_no_sense_is_no_answer() -> None:
    contents = [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", response(OK, b"no JSON"), b""]

    async def break_off(_: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(contents.pop())
        await writer.drain()
        writer.close()

    assert [each.status for each in answers_of(3, break_off)] == [NO_ANSWER] * 3
