"""gRPC messages that are not read: without a key, and beyond so many at once; also at the server that Serve starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc.aio._server import Server
from ray.serve._private.grpc_util import gRPCGenericServer

from cluster.local.ports import free_port
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.generation.generation_service import GenerationService
from router.grpc_api import reading_gate
from router.grpc_api.reading_gate import ReadingGate
from router.grpc_api.serve_gate import gate_serve
from tests.router.fake_backend import FakeBackend
from tests.router.grpc_channel import grpc_channel
from tests.router.key_files import api_keys

KEYS = ("first tenant=one", "second tenant=other")
MODEL = pb2.GetModelRequest()


def unfinished(channel: grpc.aio.Channel, key: str) -> Any:
    """Begin a call whose message does not come: a stream of messages looks like one on the wire."""
    call = channel.stream_unary("/outrider.v1.Generation/GetModel")
    return call(metadata=credentials(key))


def credentials(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_nothing_is_read_of_a_call_without_a_key(service: GenerationService) -> None:
    async with grpc_channel(service, api_keys(*KEYS)) as channel:
        async with asyncio.timeout(10):
            assert await unfinished(channel, "wrong").code() is grpc.StatusCode.UNAUTHENTICATED
        assert 'status="UNAUTHENTICATED"} 1.0' in service.metrics.text()


async def test_messages_that_do_not_come_take_no_place_of_other_tenants(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_gate, "_WAIT_S", 0.3)
    async with grpc_channel(service, api_keys(*KEYS)) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        slow = [unfinished(channel, "first") for _ in range(8)]
        await asyncio.sleep(0.5)
        with pytest.raises(grpc.aio.AioRpcError, match="8 messages of this client, or 16 of all") as refused:
            await stub.GetModel(MODEL, metadata=credentials("first"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata())["retry-after"] == "0.3"
        await stub.GetModel(MODEL, metadata=credentials("second"))
        await slow[0].write(MODEL.SerializeToString())
        await slow[0].done_writing()
        await slow[0]
        await stub.GetModel(MODEL, metadata=credentials("first"))
        for call in slow:
            call.cancel()


async def test_a_stream_takes_no_place_while_it_runs(service: GenerationService, backend: FakeBackend) -> None:
    backend.step_s = 0.5
    async with grpc_channel(service, api_keys(*KEYS)) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        request = pb2.GenerateRequest(model="fake", prompt="a", max_tokens=100)
        streams = [stub.GenerateStream(request, metadata=credentials("first")) for _ in range(20)]
        async with asyncio.timeout(20):
            for stream in streams:
                await stream.read()
        for stream in streams:
            stream.cancel()


async def test_memory_is_given_back_behind_large_messages(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(ReadingGate, "_trim", lambda gate: trims.append(1))
    monkeypatch.setattr(reading_gate, "_LAST_TRIM_S", 0.1)
    async with grpc_channel(service) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        for num_mib, num_trims in ((0, 0), (7, 2)):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(pb2.GenerateRequest(model="fake", prompt="a" * (200 + (num_mib << 20))))
            await asyncio.sleep(1.0)
            assert len(trims) == num_trims


async def test_a_place_is_another_s_after_a_while(service: GenerationService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_gate, "_READ_S", 0.5)
    async with grpc_channel(service, api_keys(*KEYS)) as channel:
        slow = [unfinished(channel, "first") for _ in range(8)]
        await asyncio.sleep(0.2)
        for _ in range(20):
            await outrider_pb2_grpc.GenerationStub(channel).GetModel(MODEL, metadata=credentials("first"))
        for call in slow:
            call.cancel()


@pytest.fixture
async def serves_server(service: GenerationService, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of a server as Serve makes it for clients, with all calls answered alike."""
    monkeypatch.setattr(Server, "__init__", Server.__init__)  # to be set back
    gate_serve(ReadingGate(api_keys(*KEYS), service.metrics))

    async def answer(request: pb2.GetModelRequest, context: Any) -> bytes:
        return pb2.Model(id="served").SerializeToString()

    server = gRPCGenericServer(lambda service_method, streaming_type: answer, extra_options=[])
    outrider_pb2_grpc.add_GenerationServicer_to_server(outrider_pb2_grpc.GenerationServicer(), server)
    address = f"127.0.0.1:{free_port()}"
    server.add_insecure_port(address)
    await server.start()
    yield address
    await server.stop(None)


async def test_the_server_that_serve_starts_reads_through_the_gate(serves_server: str) -> None:
    async with grpc.aio.insecure_channel(serves_server) as channel, asyncio.timeout(20):
        assert await unfinished(channel, "wrong").code() is grpc.StatusCode.UNAUTHENTICATED
        stub = outrider_pb2_grpc.GenerationStub(channel)
        assert (await stub.GetModel(MODEL, metadata=credentials("first"))).id == "served"
