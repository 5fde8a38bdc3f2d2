"""Attacks by a tenant, or by a client without a key, on another tenant and on the logs."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import httpx
from smg_grpc_proto import vllm_engine_pb2

from tests.serve.attacks.attack import BROKEN, TENANTS, TIMEOUT_S, Answers, Face, attack, status_of

_ALICE, _BOB = TENANTS
_VLLM = "/vllm.grpc.engine.VllmEngine"
_NUM_SCHEMAS = 6
_FASTER = 0.5  # of the time of an unknown schema: the cache of grammars would give 0.17
_LOOK_AGAIN_S = 5.0  # a key file is read once a second
_INJECTED = "INJECTED-LINE"
_SECRET = f"SECRET-TEXT\n{_INJECTED}"
_MAX_LOG_BYTES = 1 << 20


def key_of(tenant: str) -> str:
    """Return the API key of a tenant on a server with keys."""
    return f"key-of-{tenant}"


def keys_text(tenants: tuple[str, ...] = TENANTS) -> str:
    """Return a file of keys."""
    return "".join(f"{key_of(each)} tenant={each}\n" for each in tenants)


async def _post(face: Face, tenant: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key_of(tenant)}", **fields.pop("headers", {})}
    async with httpx.AsyncClient(base_url=face.url, timeout=TIMEOUT_S) as client:
        return await client.post(path, json={"model": face.model, "max_tokens": 1, **fields}, headers=headers)


@attack("another tenant's prompt and schemas, in caches by count and by time", on_tenants=True)
async def _caches(face: Face) -> Answers:
    prompt = " ".join(f"word{time.time_ns()}" for _ in range(40))
    posts = [await _post(face, who, prompt=prompt, cache_salt="ours") for who in (_ALICE, _ALICE, _BOB)]
    _, own, other = (each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in posts)
    known, unknown = ([_schema(f"{kind}{each}") for each in range(_NUM_SCHEMAS)] for kind in "ku")
    for schema in known:
        await _post(face, _ALICE, prompt="x", guided_json=schema)
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in zip(known, unknown, strict=True):
        for schema, is_known in zip(pair, (True, False), strict=True):
            began_s = time.monotonic()
            await _post(face, _BOB, prompt="x", guided_json=schema)
            times[is_known].append(time.monotonic() - began_s)
    is_faster = statistics.median(times[True]) < _FASTER * statistics.median(times[False])
    found = [f"own cached {own > 0}", f"{BROKEN}another's cached" if other else "another's not cached"]
    return Counter([*found, f"{BROKEN}times differ" if is_faster else "times are alike"])


def _schema(name: str) -> dict[str, Any]:
    properties = {f"{name}_{time.time_ns()}_{each}": {"type": "integer"} for each in range(300)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


@attack("readers of /metrics, without a key and with another tenant's", on_tenants=True)
async def _metrics(face: Face) -> Answers:
    await _post(face, _ALICE, prompt="x", max_tokens=32)
    await asyncio.sleep(2.0)
    answers: Answers = Counter()
    async with httpx.AsyncClient(base_url=face.url, timeout=TIMEOUT_S) as client:
        for headers in ({}, {"Authorization": f"Bearer {key_of(_BOB)}"}):
            answer = await client.get("/metrics", headers=headers)
            answers[f"{BROKEN}names a tenant" if _ALICE in answer.text else status_of(answer)] += 1
    return answers


@attack("a key file that cannot be read, then lacks a key, then is whole again", on_tenants=True)
async def _key_file(face: Face) -> Answers:
    assert face.keys_file is not None
    whole = face.keys_file.read_bytes()
    less = b"".join(line for line in whole.splitlines(keepends=True) if _ALICE.encode() not in line)
    answers: Answers = Counter()
    try:
        for content, statuses in ((whole + b"\xc3", (200, 200)), (less, (401, 200)), (whole, (200, 200))):
            face.keys_file.write_bytes(content)
            await asyncio.sleep(_LOOK_AGAIN_S)
            for tenant, status in zip(TENANTS, statuses, strict=True):
                came = (await _post(face, tenant, prompt="x")).status_code
                answers[str(came) if came == status else f"{BROKEN}{came}, not {status}"] += 1
    finally:
        face.keys_file.write_bytes(whole)
    return answers


@attack("gRPC: Abort of another tenant's calls over vLLM's service, and the server's folder", on_tenants=True)
async def _aborts(face: Face) -> Answers:
    async with grpc.aio.insecure_channel(f"{face.host}:{face.grpc_port}") as channel:
        request = vllm_engine_pb2.GenerateRequest(request_id="chatcmpl-1", stream=True)
        request.tokenized.input_ids.extend([5, 6, 7])
        request.sampling_params.max_tokens, request.sampling_params.ignore_eos = 200, True
        answer = vllm_engine_pb2.GenerateResponse.FromString
        call = channel.unary_stream(
            f"{_VLLM}/Generate", request_serializer=lambda each: each.SerializeToString(), response_deserializer=answer
        )(request, metadata=_credentials(_ALICE), timeout=TIMEOUT_S)
        number = 0
        async for chunk in call:
            number += len(chunk.chunk.token_ids)
            if number < 100:
                await _unary(channel, "Abort", vllm_engine_pb2.AbortRequest(request_ids=["chatcmpl-1"]), _BOB)
        info = await _unary(channel, "GetModelInfo", vllm_engine_pb2.GetModelInfoRequest(), _BOB)
    named = vllm_engine_pb2.GetModelInfoResponse.FromString(info).model_path
    ended = "all tokens" if number == 200 else f"{BROKEN}{number} of 200 tokens"
    return Counter([ended, f"{BROKEN}the server's folder" if "/" in named else "no folder"])


async def _unary(channel: grpc.aio.Channel, method: str, message: Any, tenant: str) -> bytes:
    call = channel.unary_unary(f"{_VLLM}/{method}")
    answer: bytes = await call(message.SerializeToString(), metadata=_credentials(tenant), timeout=TIMEOUT_S)
    return answer


def _credentials(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", key_of(tenant)),)


@attack("line breaks, long ids and 20,000 unknown fields, and the logs", on_tenants=True)
async def _logs(face: Face) -> Answers:
    before = {file: file.stat().st_size for file in _files(face)}
    fields = (
        "user",
        "prompt",
        "model",
        "cache_salt",
        "guided_regex",
        "guided_grammar",
        "guided_json",
        "suffix",
        "stop",
    )
    bodies: list[dict[str, Any]] = [{field: _SECRET} for field in fields]
    bodies += [
        {"guided_json": {"type": _SECRET}},
        {"guided_json": {"$ref": _SECRET}},
        {"guided_grammar": f"start: {_SECRET}"},
    ]
    bodies += [{_SECRET: 1}, {f"field_{each}\n{_INJECTED}": each for each in range(20_000)}]
    headers = {"X-Request-Id": "i" * 4000, "User-Agent": "a" * 4000}
    posts = [_post(face, _BOB, **{"prompt": "x", **body}, headers=headers) for body in bodies]
    answers = Counter(status_of(each) for each in await asyncio.gather(*posts))
    await asyncio.sleep(2.0)
    written = [file.read_bytes()[before.get(file, 0) :].decode(errors="replace") for file in _files(face)]
    size = sum(map(len, written))
    answers += Counter(
        {f"{BROKEN}a line of its own": sum(len(re.findall(f"(?m)^{_INJECTED}", each)) for each in written)}
    )
    if size > _MAX_LOG_BYTES:
        answers[f"{BROKEN}{size} bytes of logs"] += 1
    return answers + Counter(["logs read" if before else f"{BROKEN}no logs"])


def _files(face: Face) -> list[Path]:
    found = [file for each in face.logs for file in ([each] if each.is_file() else each.rglob("*"))]
    return [file for file in found if file.is_file()]
