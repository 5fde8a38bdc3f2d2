"""`vllm.grpc.engine.VllmEngine`, the interface of the smg router to its workers: tokens in, tokens out.

The messages are in the package smg-grpc-proto, 0.4.28; without it this module is not imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from inspect import iscoroutine
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as pb2
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from protos.errors import RequestError, ServingError
from router.api_keys import ApiKeys
from router.generation.delta import Delta, join_deltas
from router.generation.generation import Generation
from router.generation.generation_service import GenerationService
from router.grpc_api.api import charged, counted, validated
from router.grpc_api.callers import CallContext, authenticate
from router.requests.completion_request import CompletionRequest

_SERVICE = pb2.DESCRIPTOR.services_by_name["VllmEngine"]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
)
_NUMBERS = ("frequency_penalty", "presence_penalty", "min_p", "min_tokens", "top_k")
_NOT_ZERO = ("top_p", "repetition_penalty", "n")  # 0 means that the field is not set
_FLAGS = ("ignore_eos", "include_stop_str_in_output")
_OPTIONAL = ("temperature", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens")
_UNREAD = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


class VllmEngineApi:
    """The calls, named as in the stubs, with the context argument named as Serve passes it."""

    def __init__(self, service: GenerationService, api_keys: ApiKeys) -> None:
        self._service = service
        self._api_keys = api_keys
        self._started_s = time.monotonic()
        # Each tenant's calls by the router's ids, possibly several per id; setting the event ends the call.
        self._running: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its name."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)
        return str(_SERVICE.full_name)

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return the calls by name, with serialized requests (`router.grpc_api.vllm_servicer`)."""
        return {
            method.name: _of_bytes(getattr(self, method.name), GetMessageClass(method.input_type))
            for method in _SERVICE.methods
        }

    async def Generate(self, request: Any, grpc_context: CallContext) -> AsyncGenerator[Any, None]:
        """Yield tokens as they arrive if `stream` is set, else each choice when it is complete."""
        async with counted(self._service, "VllmEngine.Generate", grpc_context):
            client = authenticate(self._api_keys, grpc_context)
            call, is_over = (client.tenant, request.request_id), asyncio.Event()
            self._running[call].add(is_over)
            try:
                with charged(request, client):
                    generation = await self._complete(request)
                async for answer in _answers(generation, is_over, is_streamed=request.stream):
                    yield answer
            finally:
                self._running[call].discard(is_over)
                if not self._running[call]:
                    del self._running[call]

    async def _complete(self, request: Any) -> Generation:
        room = (await self._service.card()).max_model_len - len(request.tokenized.input_ids)
        body = await self._service.body_work.run(
            request.ByteSize(), lambda: validated(_fields(request, room), CompletionRequest)
        )
        return await self._service.complete(body)

    async def Abort(self, request: Any, grpc_context: CallContext) -> Any:
        """End the tenant's calls with these ids; unknown ids are ignored."""
        async with counted(self._service, "VllmEngine.Abort", grpc_context):
            tenant = authenticate(self._api_keys, grpc_context).tenant
            for request_id in filter(None, request.request_ids):
                for is_over in self._running.get((tenant, request_id), ()):
                    is_over.set()
            return pb2.AbortResponse()

    async def HealthCheck(self, request: Any, grpc_context: CallContext) -> Any:
        """Report that the pair answers, or why it does not."""
        async with counted(self._service, "VllmEngine.HealthCheck", grpc_context):
            authenticate(self._api_keys, grpc_context)
            try:
                await self._service.fresh_card()
            except ServingError as error:
                return pb2.HealthCheckResponse(healthy=False, message=error.message)
            return pb2.HealthCheckResponse(healthy=True, message="OK")

    async def GetModelInfo(self, request: Any, grpc_context: CallContext) -> Any:
        """Describe the model; only an admin sees the server's folder."""
        async with counted(self._service, "VllmEngine.GetModelInfo", grpc_context):
            client = authenticate(self._api_keys, grpc_context)
            card, config = await self._service.card(), self._service.config
            shape = _json(Path(config.model_path) / "config.json")
            path = config.model_path if client.is_admin else config.model_id
            return pb2.GetModelInfoResponse(
                model_path=path,
                tokenizer_path=path,
                served_model_name=config.model_id,
                is_generation=True,
                max_context_length=card.max_model_len,
                max_req_input_len=card.max_model_len - 1,
                vocab_size=card.vocab_size,
                model_type=str(shape.get("model_type") or ""),
                architectures=shape.get("architectures") or (),
                eos_token_ids=card.eos_token_ids,
                bos_token_id=_token_id(shape.get("bos_token_id")),
                pad_token_id=_token_id(shape.get("pad_token_id")),
            )

    @property
    def _num_calls(self) -> int:
        return sum(map(len, self._running.values()))

    async def GetServerInfo(self, request: Any, grpc_context: CallContext) -> Any:
        """Describe the server; a grammar applies from the first token on, since no thought precedes it."""
        async with counted(self._service, "VllmEngine.GetServerInfo", grpc_context):
            authenticate(self._api_keys, grpc_context)
            card = await self._service.card()
            return pb2.GetServerInfoResponse(
                active_requests=self._num_calls,
                uptime_seconds=time.monotonic() - self._started_s,
                server_type="vllm-grpc",
                data_parallel_size=1,
                block_size=card.block_size,
                constrained_decoding_start="first_token",
            )

    async def GetLoads(self, request: Any, grpc_context: CallContext) -> Any:
        """Return the number of calls that this service runs, including waiting ones."""
        async with counted(self._service, "VllmEngine.GetLoads", grpc_context):
            authenticate(self._api_keys, grpc_context)
            num_calls = self._num_calls
            load = pb2.SchedulerLoad(num_running_reqs=num_calls, num_total_reqs=num_calls)
            return pb2.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, grpc_context: CallContext) -> AsyncGenerator[Any, None]:
        """Yield a zip archive of the tokenizer's files; the last piece has its digest."""
        async with counted(self._service, "VllmEngine.GetTokenizer", grpc_context):
            authenticate(self._api_keys, grpc_context)
            archive = await asyncio.to_thread(_archive, Path(self._service.config.model_path))
            pieces = [archive[start : start + (1 << 20)] for start in range(0, len(archive), 1 << 20)]
            for piece in pieces[:-1]:
                yield common_pb2.GetTokenizerChunk(data=piece)
            yield common_pb2.GetTokenizerChunk(data=pieces[-1], sha256=hashlib.sha256(archive).hexdigest())

    async def Embed(self, request: Any, grpc_context: CallContext) -> None:
        await self._refuse("Embed", grpc_context, "This model writes text; it has no embeddings.")

    async def FlushCache(self, request: Any, grpc_context: CallContext) -> None:
        why = "The prefix cache cannot be emptied by a call; requests may set a cache_salt."
        await self._refuse("FlushCache", grpc_context, why)

    async def StartProfile(self, request: Any, grpc_context: CallContext) -> None:
        await self._refuse("StartProfile", grpc_context, "There is no profiler here.")

    async def StopProfile(self, request: Any, grpc_context: CallContext) -> None:
        await self._refuse("StopProfile", grpc_context, "There is no profiler here.")

    async def SubscribeKvEvents(self, request: Any, grpc_context: CallContext) -> None:
        await self._refuse("SubscribeKvEvents", grpc_context, "KV events are published over ZMQ; set pair.kv_events.")

    async def _refuse(self, name: str, context: CallContext, message: str) -> None:
        async with counted(self._service, f"VllmEngine.{name}", context):
            error = RequestError(message)
            error.grpc_code = "UNIMPLEMENTED"
            raise error


def _of_bytes(call: Callable[..., Any], message: type[Message]) -> Callable[..., Any]:
    async def read_and_call(request: bytes, grpc_context: CallContext) -> Any:
        answer = call(message.FromString(request), grpc_context)
        return await answer if iscoroutine(answer) else answer

    return read_and_call


async def _answers(generation: Generation, is_over: asyncio.Event, *, is_streamed: bool) -> AsyncGenerator[Any, None]:
    gained: dict[int, list[Delta]] = {index: [] for index in range(generation.num_choices)}
    async with aclosing(generation.deltas()) as deltas, aclosing(_until(deltas, is_over)) as gains:
        async for delta in gains:
            of_choice = gained[delta.index]
            of_choice.append(delta)
            if is_streamed and delta.token_ids:
                yield pb2.GenerateResponse(chunk=_chunk(delta, of_choice, generation))
            if delta.finish_reason is not None:
                yield pb2.GenerateResponse(complete=_complete(join_deltas(gained.pop(delta.index)), generation))
    for index, of_choice in gained.items():  # choices that were aborted
        token_ids = [token_id for delta in of_choice for token_id in delta.token_ids]
        whole = pb2.GenerateComplete(output_ids=token_ids, finish_reason="abort", index=index)
        yield pb2.GenerateResponse(complete=whole)


async def _until(deltas: AsyncGenerator[Delta, None], is_over: asyncio.Event) -> AsyncGenerator[Delta, None]:
    """Yield deltas to their end or until the event is set, even while none arrives."""
    items, end = aiter(deltas), asyncio.ensure_future(is_over.wait())
    step: asyncio.Future[Delta] | None = None
    try:
        while not is_over.is_set():
            step = asyncio.ensure_future(anext(items))
            await asyncio.wait({step, end}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                return
            yield step.result()
    except StopAsyncIteration:
        return
    finally:
        rest = [each for each in (step, end) if each is not None and not each.done()]
        for each in rest:
            each.cancel()
        if rest:
            await asyncio.wait(rest)


def _fields(request: Any, room: int) -> dict[str, object]:
    """Return the equivalent body of `/v1/completions`.

    Raises:
        RequestError: the request uses an unsupported feature.
    """
    for name in _UNREAD:
        if request.HasField(name):
            raise RequestError(f"{name} is set; this engine reads text only, and moves caches by itself.", param=name)
    params = request.sampling_params
    fields: dict[str, object] = {"prompt": request.text or list(request.tokenized.input_ids)}
    fields |= {name: value for name in (*_NUMBERS, *_NOT_ZERO, *_FLAGS) if (value := getattr(params, name))}
    fields |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.HasField("max_tokens") or not request.text:
        fields["max_tokens"] = params.max_tokens if params.HasField("max_tokens") else max(room, 1)
    fields |= _constraint(params)
    return fields | {"return_token_ids": True, "skip_special_tokens": params.skip_special_tokens}


def _constraint(params: Any) -> dict[str, object]:
    match params.WhichOneof("constraint"):
        case None:
            return {}
        case "json_schema":
            return {"structured_outputs": {"json": params.json_schema}}
        case "choice":
            return {"structured_outputs": {"choice": list(params.choice.choices)}}
        case "regex" | "grammar" | "json_object" as name:
            return {"structured_outputs": {name: getattr(params, name)}}
        case name:
            raise RequestError(f"{name} is not supported; send a JSON schema, a regex or a grammar.", param=name)


def _chunk(delta: Delta, of_choice: Sequence[Delta], generation: Generation) -> Any:
    return pb2.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=generation.usage.prompt_tokens,
        completion_tokens=sum(len(each.token_ids) for each in of_choice),
        cached_tokens=generation.usage.cached_tokens,
        output_logprobs=_logprobs(delta),
        index=delta.index,
    )


def _complete(choice: Delta, generation: Generation) -> Any:
    assert choice.finish_reason is not None
    usage = generation.usage
    answer = pb2.GenerateComplete(
        output_ids=choice.token_ids,
        finish_reason=choice.finish_reason.value,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=len(choice.token_ids),
        cached_tokens=usage.cached_tokens,
        output_logprobs=_logprobs(choice),
        input_logprobs=_prompt_logprobs(choice, generation.prompt_token_ids(choice.index)),
        index=choice.index,
    )
    if usage.speculation is not None:
        answer.spec_accepted_tokens = usage.speculation.num_accepted_tokens
        answer.spec_draft_tokens = usage.speculation.num_draft_tokens
    if choice.stop_string is not None:
        answer.matched_stop_str = choice.stop_string
    elif choice.token_ids and choice.token_ids[-1] in (generation.fields.stop_token_ids or ()):
        answer.matched_token_id = choice.token_ids[-1]
    return answer


def _logprobs(delta: Delta) -> Any:
    """Return the logprobs of a delta's tokens; None if they were not requested."""
    known = [(token_id, each) for token_id, each in zip(delta.token_ids, delta.logprobs, strict=False) if each]
    if not known:
        return None
    return pb2.OutputLogProbs(
        token_logprobs=[each.logprob for _, each in known],
        token_ids=[token_id for token_id, _ in known],
        top_logprobs=[_top(each.top) for _, each in known],
    )


def _prompt_logprobs(choice: Delta, prompt_token_ids: Sequence[int]) -> Any:
    if not choice.prompt_logprobs:
        return None
    return pb2.InputLogProbs(
        token_logprobs=[
            pb2.InputTokenLogProb(value=each.logprob) if each else pb2.InputTokenLogProb()
            for each in choice.prompt_logprobs
        ],
        token_ids=prompt_token_ids,
        top_logprobs=[_top(each.top if each else ()) for each in choice.prompt_logprobs],
    )


def _top(top: Sequence[tuple[int, float]]) -> Any:
    return pb2.TopLogProbs(values=[value for _, value in top], token_ids=[token_id for token_id, _ in top])


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _token_id(value: object) -> int:
    return value if isinstance(value, int) else 0


def _archive(folder: Path) -> bytes:
    """Return a zip archive of the tokenizer in a folder. Raises RequestError if it has none."""
    if not (folder / "tokenizer.json").is_file():
        raise RequestError("The model's folder has no tokenizer.json to send; give the router the tokenizer's path.")
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                archive.write(folder / name, name)
    return target.getvalue()
