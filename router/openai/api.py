"""The HTTP frontend: OpenAI's endpoints, and the few that operators need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic_core import to_json

from protos.client_text import guard_logs
from protos.errors import AuthenticationError, OverloadedError, RequestError, ServingError
from router.api_keys import ApiKeys, Client
from router.backend import SharedAnswer
from router.generation.generation import Generation
from router.generation.generation_service import GenerationService
from router.metrics.exposition import ANSWERS_HEADER, CONTENT_TYPE, merge_metrics, proxy_text
from router.metrics.ingress_metrics import count_requests
from router.metrics.tracing import trace_requests
from router.openai.chat_writer import ChatWriter, CompletionWriter
from router.openai.draft_admin import DraftAdmin, running_draft
from router.openai.errors import add_error_handlers
from router.openai.http_body import BodyReader, ignore_fields
from router.openai.messages_request import MessagesRequest, MessagesWriter
from router.openai.openapi import (
    DetokenizeAnswer,
    HealthAnswer,
    InputTokens,
    ServedModel,
    TokenizeAnswer,
    openapi_document,
)
from router.openai.request_head import (
    add_cors,
    around,
    begin_in_turn,
    check_host,
    close_unread,
    name_ignored_fields,
    names_of_server,
    one_slash,
    origins_pattern,
    unless_disconnected,
)
from router.openai.response_writer import Body, ResponseWriter, body_json, start_stream
from router.openai.responses_request import ResponsesRequest, ResponsesWriter
from router.openai.static_page import PAGE_PREFIX, add_pages
from router.requests.chat_request import ChatCompletionRequest, ForeignChat, unread_parts
from router.requests.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest

logger = logging.getLogger(__name__)

# For the page, for probes and scrapers, which have no key.
_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready", "/live", "/metrics"})


class OpenAIApi:
    """The endpoints, as methods over one service."""

    def __init__(self, service: GenerationService, api_keys: ApiKeys, *, is_metrics_private: bool = False) -> None:
        self._service = service
        self._api_keys = api_keys
        self._tokenizer = service.files.tokenizer
        self._is_strict = service.config.strict_fields
        self._bodies = BodyReader(service.config.limits, service.metrics, service.body_work, is_strict=self._is_strict)
        self.drafts = DraftAdmin(service.backend, self._bodies, service.forget_card)
        self._is_metrics_private = is_metrics_private
        self._metrics_texts = {
            is_private: SharedAnswer(partial(self._read_metrics, is_private=is_private)) for is_private in (False, True)
        }

    async def authenticate(self, request: Request) -> None:
        """Refuse a call without a known key, if keys are configured."""
        if request.url.path not in _OPEN_PATHS and not request.url.path.startswith(PAGE_PREFIX):
            self._client(request)

    def _client(self, request: Request) -> Client:
        """Return the client of a call. Raises AuthenticationError if its key is missing or unknown."""
        return self._api_keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))

    async def completions(self, request: Request) -> Response:
        """Continue each prompt."""
        body = await self._bodies.read(request, CompletionRequest)
        generation = await self._service.complete(body)
        return await self._answer(request, generation, CompletionWriter(generation, self._tokenizer))

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        body = await self._bodies.read(request, ChatCompletionRequest)
        ignore_fields(request, [f"messages.{rank}" for rank in unread_parts(body.messages)])
        generation = await self._service.chat(body)
        return await self._answer(request, generation, ChatWriter(generation, self._tokenizer))

    async def responses(self, request: Request) -> Response:
        """Answer a turn of OpenAI's Responses API, which keeps nothing here."""
        body = await self._bodies.read(request, ResponsesRequest)
        with body.naming_fields():
            generation = await self._service.chat(await self._chat_body(request, body))
        return await self._answer(request, generation, ResponsesWriter(generation, self._tokenizer, body))

    async def messages(self, request: Request) -> Response:
        """Answer a turn of Anthropic's Messages API."""
        body = await self._bodies.read(request, MessagesRequest)
        if body.max_tokens is None:
            raise RequestError("Missing required parameter: max_tokens.", param="max_tokens")
        with body.naming_fields():
            generation = await self._service.chat(await self._chat_body(request, body))
        return await self._answer(request, generation, MessagesWriter(generation, self._tokenizer))

    async def count_tokens(self, request: Request) -> Response:
        """Answer with the number of tokens that a message's prompt has."""
        body = await self._bodies.read(request, MessagesRequest)
        with body.naming_fields():
            num_tokens = await self._service.count_tokens(await self._chat_body(request, body))
        return JSONResponse(InputTokens(input_tokens=num_tokens))

    async def _chat_body(self, request: Request, body: ResponsesRequest | MessagesRequest) -> ChatCompletionRequest:
        return await self._bodies.work(request, lambda: self._chat_of(request, body.to_chat()))

    def _chat_of(self, request: Request, turn: ForeignChat) -> ChatCompletionRequest:
        """Return a turn of another API as a chat.

        Tools that only its own servers run are named as ignored, as are parts of its history without text.
        """
        if turn.foreign_tools and self._is_strict:
            raise RequestError(
                f"{turn.foreign_tools[0]} is no function; this server runs no tools itself.",
                param=turn.foreign_tools[0],
            )
        chat = turn.chat_request()
        ignore_fields(request, turn.ignored(chat))
        return chat

    async def _answer(self, request: Request, generation: Generation, writer: ResponseWriter) -> Response:
        logger.debug("request %s is %s", request.headers.get("x-request-id"), generation.id)
        if generation.fields.stream:
            return await unless_disconnected(request, start_stream(generation, writer))
        return _json(writer.full(await unless_disconnected(request, generation.choices())))

    async def models(self) -> Response:
        """List the one model that is served, by each of its names."""
        model = await self._model()
        names = (self._service.config.model_id, *self._service.config.model_aliases)
        entries = [model.model_copy(update={"id": name}).model_dump(exclude_unset=True) for name in names]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, model_id: str) -> Response:
        """Describe one model by its id."""
        self._service.check_model(model_id)
        return _json((await self._model()).model_copy(update={"id": model_id}))

    async def _model(self) -> ServedModel:
        card = await self._service.card()
        return ServedModel(
            id=self._service.config.model_id,
            object="model",
            created=self._service.created_s,
            owned_by="outrider",
            max_model_len=card.max_model_len,
            root=self._service.config.model_id,
            parent=None,
            permission=[_permission(self._service.config.model_id, self._service.created_s)],
        )

    async def tokenize(self, request: Request) -> Response:
        """Answer with the token ids of a text or of a chat, as generation would see them."""
        body = await self._bodies.read(request, TokenizeRequest)
        ignore_fields(request, [f"messages.{rank}" for rank in unread_parts(body.messages or [])])
        tokens = await self._service.tokenize(body)
        card = await self._service.card()
        answer = TokenizeAnswer(count=len(tokens), max_model_len=card.max_model_len, tokens=list(tokens))

        def written() -> bytes:
            if body.return_token_strs:
                answer["token_strs"] = [self._tokenizer.token_name(token_id) for token_id in tokens]
            return to_json(answer)

        return Response(await self._bodies.work(request, written), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of token ids."""
        body = await self._bodies.read(request, DetokenizeRequest)
        return JSONResponse(DetokenizeAnswer(prompt=await self._service.detokenize(body)))

    async def live(self) -> Response:
        """Answer 200 while this process answers, whatever the pairs do."""
        return JSONResponse(HealthAnswer(status="ok"))

    async def health(self) -> Response:
        """Answer 200 while a pair answers; a busy pair is healthy."""
        answer = HealthAnswer(status="ok")
        with suppress(OverloadedError):
            card = await self._service.fresh_card()
            if card.alarms:
                answer["alarms"] = list(card.alarms)
            if card.draft is not None:
                answer["draft"] = running_draft(card.draft)
        return JSONResponse(answer)

    async def metrics(self, request: Request) -> Response:
        """Answer with the metrics of all ingress replicas, or of this one, and of the pairs if they answer.

        Tenants are named to admins alone, and where nobody but the operator gets here.
        """
        is_private = self._is_metrics_private
        with suppress(AuthenticationError):
            is_private = self._client(request).is_admin or is_private
        text = await self._metrics_texts[is_private].get() + proxy_text(request.headers.get(ANSWERS_HEADER, ""))
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    async def _read_metrics(self, *, is_private: bool) -> str:
        replica_texts, frontend_texts = await asyncio.gather(self._replica_texts(), self._service.frontend_metrics())
        model_id = self._service.config.model_id
        return await asyncio.to_thread(merge_metrics, frontend_texts, replica_texts, model_id, is_private=is_private)

    async def _replica_texts(self) -> Sequence[str]:
        try:
            return await self._service.replica_metrics()
        except ServingError as error:
            logger.warning("the pairs' metrics are missing: %s", error)
            return []


def build_app(
    service: GenerationService, api_keys: ApiKeys, http_host: str | None = None, *, is_metrics_private: bool = False
) -> FastAPI:
    """Return the FastAPI application over a service; Serve adds the `X-Request-Id` header around it.

    `http_host` is the address that clients reach, if it is known: on loopback the app answers to its names alone.
    `is_metrics_private`: nobody but the operator gets to `/metrics`.
    """
    guard_logs()
    api = OpenAIApi(service, api_keys, is_metrics_private=is_metrics_private)
    service.metrics.watch_keys(api_keys)
    app = FastAPI(
        dependencies=[Depends(api.authenticate)],
        docs_url=None,  # a page that asks other servers for its scripts; ours is in `add_pages`
        redoc_url=None,
        redirect_slashes=False,  # `one_slash` finds the path; a redirect would name http:// where TLS ends earlier
    )
    app.openapi = partial(openapi_document, is_strict=service.config.strict_fields)  # type: ignore[method-assign]
    # Middleware: the last one added sees a request first.
    add_error_handlers(app)
    app.add_middleware(around(name_ignored_fields))
    app.add_middleware(around(count_requests, metrics=service.metrics))
    if service.tracer is not None:
        app.add_middleware(around(trace_requests, tracer=service.tracer))
    add_cors(app, service.config.cors_origins)
    if names := names_of_server(http_host, service.config.allowed_hosts):
        pattern = None if service.config.api_keys_file else origins_pattern(service.config.cors_origins)
        app.add_middleware(around(check_host, names=names, origins=pattern))
    app.add_middleware(around(one_slash))
    app.add_middleware(around(close_unread))
    app.add_middleware(around(begin_in_turn, places=asyncio.Semaphore(8)))
    _add_routes(app, api)
    add_pages(app)
    return app


def _add_routes(app: FastAPI, api: OpenAIApi) -> None:
    """Add the routes of `api`. Answers are built by hand, so FastAPI validates no response."""
    for path, post in (
        ("/v1/completions", api.completions),
        ("/v1/chat/completions", api.chat_completions),
        ("/v1/responses", api.responses),
        ("/v1/messages", api.messages),
        ("/v1/messages/count_tokens", api.count_tokens),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
        ("/admin/drafts/kill", api.drafts.kill),
        ("/admin/drafts/swap", api.drafts.swap),
        ("/admin/drafts/canary", api.drafts.canary),
        ("/admin/drafts/canary/stop", api.drafts.stop_canary),
    ):
        app.add_api_route(path, post, methods=["POST"], response_model=None)
    for path, get in (
        ("/v1/models", api.models),
        ("/v1/models/{model_id:path}", api.model),
        ("/admin/drafts", api.drafts.show),
        ("/live", api.live),
        ("/ready", api.health),
        ("/health", api.health),
        ("/metrics", api.metrics),
    ):
        app.add_api_route(path, get, methods=["GET", "HEAD"], response_model=None)


def _permission(model_id: str, created_s: int) -> dict[str, Any]:
    """Return the `permission` entry that older clients expect; it grants exactly the served features."""
    return {
        "id": f"modelperm-{model_id}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def _json(body: Body) -> Response:
    return Response(body_json(body), media_type="application/json")
