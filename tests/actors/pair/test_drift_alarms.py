"""A fall of acceptance reaches the web address once; one that hangs or is gone holds nothing up."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from actors.pair import drift_alarms
from actors.pair.drift_alarms import DriftAlarms
from engine.accounting.drift import DriftStats

FALLEN = DriftStats("model-greedy-free", 0.41, 0.74, num_alarms=1, is_alarming=True)


async def listen(answer: bytes | None) -> tuple[asyncio.Server, str, list[bytes]]:
    received: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        received.append(await reader.readexactly(length))
        if answer is not None:
            writer.write(answer)
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/alarm", received


async def settle(alarms: DriftAlarms) -> None:
    await asyncio.gather(*alarms._sending)


async def test_each_alarm_is_announced_once_with_its_numbers() -> None:
    server, address, received = await listen(b"HTTP/1.1 204 No Content\r\n\r\n")
    alarms = DriftAlarms(address, "r1")
    for _ in range(3):
        alarms.update([FALLEN])
        await settle(alarms)
    server.close()
    assert alarms.ringing == ("acceptance of model-greedy-free is 0.410, and was 0.740",)
    assert [json.loads(body) for body in received] == [
        {
            "event": "acceptance_drift",
            "replica": "r1",
            "class": "model-greedy-free",
            "acceptance": 0.41,
            "usual_acceptance": 0.74,
        }
    ]


async def test_an_address_that_hangs_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drift_alarms, "_TIMEOUT_S", 0.2)
    server, address, _ = await listen(None)
    alarms = DriftAlarms(address, "r1")
    began_s = time.monotonic()
    alarms.update([FALLEN])
    assert time.monotonic() - began_s < 0.1
    async with asyncio.timeout(5):
        await settle(alarms)
    server.close()
    assert "alarm_webhook could not be reached" in caplog.text
