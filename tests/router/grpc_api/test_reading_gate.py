"""gRPC messages that are not read: without a key, from strangers, beyond so many at once; also at Serve's servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc.aio._server import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve.generated.serve_pb2_grpc import (
    RayServeAPIServiceServicer,
    add_RayServeAPIServiceServicer_to_server,
)

from cluster.local.serve_environment import free_port
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.grpc_api import callers, reading_gate
from router.grpc_api.api import GrpcApi, start_grpc_server
from router.grpc_api.callers import ReadingLimits
from router.grpc_api.reading_gate import OPEN_METHODS, ReadingGate
from router.grpc_api.serve_gate import gate_proxy, gate_serve
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys
from tests.serve.attacks.grpc_calls import first_part, half_calls

KEYS = ("first tenant=one", "second tenant=other")
MODEL = pb2.GetModelRequest()
CHECK = "/grpc.health.v1.Health/Check"
GET_MODEL = "/outrider.v1.Generation/GetModel"
AN_ANSWER_S = 2.5  # on a machine with other work; a stalled gate refused after 5 s


def unfinished(channel: grpc.aio.Channel, key: str, method: str = GET_MODEL) -> Any:
    """Begin a call whose message does not come: a stream of messages looks like one on the wire."""
    return channel.stream_unary(method)(metadata=credentials(key))


def credentials(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@dataclass(frozen=True, slots=True)
class Gated:
    """A served gate, and a channel to it."""

    gate: ReadingGate
    address: str
    channel: grpc.aio.Channel

    async def check(self) -> None:
        """Ask for the health, and get it in time."""
        async with asyncio.timeout(AN_ANSWER_S):
            answer = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def is_empty(self) -> None:
        """Wait until no message has a place."""
        for _ in range(100):
            if len(self.gate.places) + len(self.gate.open_places) == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("places are kept")


@asynccontextmanager
async def gated(
    service: GenerationService,
    keys: ApiKeys | None = None,
    add_more: Callable[[grpc.aio.Server], str] | None = None,
    **limits: ReadingLimits,
) -> AsyncIterator[Gated]:
    keys, address = keys or ApiKeys(), f"127.0.0.1:{free_port()}"
    gate = ReadingGate(keys, service.metrics.count_request, **limits)
    server = await start_grpc_server(GrpcApi(service, keys), gate, address, add_more)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Gated(gate, address, channel)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("number", [8, 40])
@pytest.mark.parametrize("data", [b"", first_part(0, 64), first_part(17_000, 1 << 20)], ids=["none", "head", "17 kB"])
async def test_a_health_check_passes_health_checks_that_have_stalled(
    service: GenerationService, number: int, data: bytes
) -> None:
    async with gated(service, api_keys(*KEYS)) as served:
        stalled = await half_calls(served.address, CHECK, number, data=data)
        await asyncio.sleep(0.2)
        for _ in range(3):
            await served.check()
        stalled.close()
        await served.is_empty()


@pytest.mark.parametrize("keys", [(), KEYS], ids=["no keys", "keys"])
async def test_a_health_check_passes_stalled_calls_of_every_other_kind(
    service: GenerationService, keys: tuple[str, ...]
) -> None:
    methods = (GET_MODEL, "/outrider.v1.Generation/Generate", "/grpc.health.v1.Health/Watch", *OPEN_METHODS)
    async with gated(service, api_keys(*keys) if keys else None) as served:
        stalled = [await half_calls(served.address, each, 10, key="first") for each in methods]
        await asyncio.sleep(0.2)
        await served.check()
        for each in stalled:
            each.close()
        await served.is_empty()


async def test_a_call_passes_stalled_ones_where_there_are_no_keys(service: GenerationService) -> None:
    async with gated(service) as served:
        stalled = await half_calls(served.address, GET_MODEL, 24, data=first_part(100, 1 << 20))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(3):
            await outrider_pb2_grpc.GenerationStub(served.channel).GetModel(MODEL)
        stalled.close()
        await served.is_empty()


async def test_a_place_is_given_back_on_every_way_out(service: GenerationService, backend: FakeBackend) -> None:
    limits = ReadingLimits(read_s=1.0)
    async with gated(service, api_keys(*KEYS), limits=limits, open_limits=limits) as served:
        stub = outrider_pb2_grpc.GenerationStub(served.channel)
        for method in (CHECK, GET_MODEL):
            cut = await half_calls(served.address, method, 8, key="first")
            cancelled = [unfinished(served.channel, "first", method) for _ in range(8)]
            await asyncio.sleep(0.1)
            assert len(served.gate.places) + len(served.gate.open_places) > 0
            cut.close()
            for call in cancelled:
                call.cancel()
            await served.is_empty()
            late = [unfinished(served.channel, "first", method) for _ in range(3)]
            assert {await call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            await served.is_empty()
        await stub.GetModel(MODEL, metadata=credentials("first"))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetModel(pb2.GetModelRequest(model="no such"), metadata=credentials("first"))
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await served.channel.unary_unary(GET_MODEL)(b"\xff\xff", metadata=credentials("first"))
        assert wrong.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        backend.step_s = 5.0
        request = pb2.GenerateRequest(prompt="a", max_tokens=9)
        with pytest.raises(grpc.aio.AioRpcError) as expired:
            await stub.Generate(request, metadata=credentials("first"), timeout=0.5)
        assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.is_empty()


async def test_messages_without_a_key_are_small(service: GenerationService) -> None:
    async with gated(service, api_keys(*KEYS)) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        for num_bytes, code in ((62, grpc.StatusCode.NOT_FOUND), (63, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(health_pb2.HealthCheckRequest(service="a" * num_bytes))
            assert refused.value.code() is code
        reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        request = reflection_pb2.ServerReflectionRequest(file_by_filename="a" * 4096)
        with pytest.raises(grpc.aio.AioRpcError, match="reads at most 4096"):
            _ = [each async for each in reflection.ServerReflectionInfo(iter([request]))]


async def test_endless_calls_of_one_address_are_bounded(service: GenerationService) -> None:
    async with gated(service, api_keys(*KEYS)) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(80)]
        codes = [await each.code() for each in watches if await _first(each) is grpc.aio.EOF]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 16
        for each in watches:
            each.cancel()
        await asyncio.sleep(0.5)
        assert await _first(stub.Watch(health_pb2.HealthCheckRequest())) is not grpc.aio.EOF


async def test_endless_calls_of_all_addresses_are_bounded(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_gate, "_MAX_ENDLESS", 2)
    async with gated(service) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        ended = [each for each in watches if await _first(each) is grpc.aio.EOF]
        assert [await each.code() for each in ended] == [grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_an_open_call_has_limits_of_its_own(service: GenerationService) -> None:
    async with gated(service, open_limits=ReadingLimits(read_s=0.3)) as served, asyncio.timeout(5):
        late = unfinished(served.channel, "", CHECK)
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("read_s", [0.8, 9.0])
async def test_the_place_of_a_message_that_is_checked_is_kept_for_a_while(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch, read_s: float
) -> None:
    async def stay(*_: object) -> None:
        await asyncio.sleep(9)

    monkeypatch.setattr(GrpcApi, "GetModel", stay)
    limits = ReadingLimits(1, 1, grace_s=0.1, wait_s=3.0, read_s=read_s)
    async with gated(service, limits=limits) as served:
        ask = outrider_pb2_grpc.GenerationStub(served.channel).GetModel
        first = ask(MODEL)
        await asyncio.sleep(0.3)
        second = ask(MODEL)
        async with asyncio.timeout(AN_ANSWER_S + limits.wait_s):
            if read_s > limits.wait_s:
                assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            else:
                await served.is_empty()
        assert not first.done()
        first.cancel()
        second.cancel()


async def _first(call: Any) -> Any:
    try:
        return await call.read()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return grpc.aio.EOF


async def methods_of(channel: grpc.aio.Channel) -> list[str]:
    """Return every method that reflection lists, as a path."""
    found = []
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest
    [listed] = [each async for each in stub.ServerReflectionInfo(iter([ask(list_services="")]))]
    for service in listed.list_services_response.service:
        request = ask(file_containing_symbol=service.name)
        [answer] = [each async for each in stub.ServerReflectionInfo(iter([request]))]
        for each in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(each)
            services = (named for named in file.service if f"{file.package}.{named.name}" == service.name)
            found += [f"/{service.name}/{method.name}" for named in services for method in named.method]
    return found


async def test_every_method_but_the_open_ones_asks_for_a_key_and_for_the_proxy(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pytest.importorskip("router.grpc_api.vllm_engine", reason="pip install 'outrider[smg]'")
    keys = api_keys(*KEYS)
    async with gated(service, keys, engine.VllmEngineApi(service, keys).add_to) as served:
        methods = await methods_of(served.channel)
        assert {GET_MODEL, CHECK, "/vllm.grpc.engine.VllmEngine/Abort"} <= set(methods)
        without_key = {method: await _code(served.channel, method) for method in methods}
        refused = {each for each in methods if without_key[each] is grpc.StatusCode.UNAUTHENTICATED}
        assert refused == set(methods) - set(OPEN_METHODS)
        monkeypatch.setenv(callers.LOCAL_PROXY, "1")
        monkeypatch.setattr(callers, "_LOOPBACK", ("unix:",))  # this machine's calls are strangers' then
        codes = {method: await _code(served.channel, method, credentials("first")) for method in methods}
        assert set(codes.values()) == {grpc.StatusCode.PERMISSION_DENIED}


async def _code(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> grpc.StatusCode:
    call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=10)
    while await _first(call) is not grpc.aio.EOF:
        if method.endswith("/Watch"):
            call.cancel()
    return await call.code()


async def test_another_service_s_message_is_not_read_without_a_key(service: GenerationService) -> None:
    engine = pytest.importorskip("router.grpc_api.vllm_engine", reason="pip install 'outrider[smg]'")
    keys = api_keys(*KEYS)
    async with gated(service, keys, engine.VllmEngineApi(service, keys).add_to) as served:
        call = unfinished(served.channel, "wrong", "/vllm.grpc.engine.VllmEngine/Generate")
        async with asyncio.timeout(5):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_nothing_is_read_of_a_call_without_a_key(service: GenerationService) -> None:
    async with grpc_channel(service, api_keys(*KEYS)) as channel:
        async with asyncio.timeout(10):
            assert await unfinished(channel, "wrong").code() is grpc.StatusCode.UNAUTHENTICATED
        assert 'status="UNAUTHENTICATED"} 1.0' in service.metrics.text()


async def test_messages_that_do_not_come_take_no_place_of_other_tenants(service: GenerationService) -> None:
    limits = ReadingLimits(wait_s=0.3, grace_s=9.0)
    async with grpc_channel(service, api_keys(*KEYS), limits=limits) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        slow = [unfinished(channel, "first") for _ in range(8)]
        await asyncio.sleep(0.5)
        with pytest.raises(grpc.aio.AioRpcError, match="8 messages of this client, or 16 in total") as refused:
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


async def test_a_place_is_another_s_after_a_while(service: GenerationService) -> None:
    limits = ReadingLimits(read_s=0.5, grace_s=9.0)
    async with grpc_channel(service, api_keys(*KEYS), limits=limits) as channel:
        slow = [unfinished(channel, "first") for _ in range(8)]
        await asyncio.sleep(0.2)
        for _ in range(20):
            await outrider_pb2_grpc.GenerationStub(channel).GetModel(MODEL, metadata=credentials("first"))
        assert {await call.code() for call in slow} == {grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.fixture
async def serves_server(service: GenerationService, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of a server as Serve makes it for clients, with all calls answered alike."""
    monkeypatch.setattr(Server, "__init__", Server.__init__)  # to be set back
    gate_serve(ReadingGate(api_keys(*KEYS), service.metrics.count_request, has_proxy=True))
    assert gate_proxy() == []  # as Serve calls it in an ingress too: its gate stays

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


async def test_a_proxy_of_serve_refuses_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "__init__", Server.__init__)
    monkeypatch.setenv(callers.LOCAL_PROXY, "1")
    assert gate_proxy() == []

    async def answer(request: Any, context: Any) -> bytes:
        return b""

    server = gRPCGenericServer(lambda service_method, streaming_type: answer, extra_options=[])
    add_RayServeAPIServiceServicer_to_server(RayServeAPIServiceServicer(), server)
    server.add_insecure_port(address := f"127.0.0.1:{free_port()}")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = "/ray.serve.RayServeAPIService/ListApplications"
        assert await _code(channel, call) is grpc.StatusCode.OK
        monkeypatch.setattr(callers, "_LOOPBACK", ("unix:",))
        assert await _code(channel, call) is grpc.StatusCode.PERMISSION_DENIED
    await server.stop(None)


async def test_clients_behind_a_proxy_are_told_apart_by_its_word() -> None:
    class Call:
        def __init__(self, peer: str, **metadata: str) -> None:
            self._peer, self._metadata = peer, metadata

        def peer(self) -> str:
            return self._peer

        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [(name.replace("_", "-"), value) for name, value in self._metadata.items()]

    def address(peer: str, *, has_proxy: bool = False, **metadata: str) -> str:
        return callers.address(Call(peer, **metadata), has_proxy=has_proxy)

    proxied = {"x_forwarded_for": "192.0.2.9"}
    assert address("ipv4:127.0.0.1:9", has_proxy=True, **proxied) == "192.0.2.9"
    assert address("ipv4:127.0.0.1:9", **proxied) == "127.0.0.1"
    assert address("ipv6:%5B::ffff:192.0.2.9%5D:5") == "192.0.2.9"
    assert address("ipv6:%5B2001:db8::1%5D:5") == address("ipv6:%5B2001:db8::2%5D:77") == "2001:db8::/64"
    assert address("ipv4:127.0.0.1:9", has_proxy=True, x_forwarded_for="2001:db8::7") == "2001:db8::/64"
    assert address("unix:/a") == "unknown"
