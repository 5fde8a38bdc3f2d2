"""The path of both frontends from a validated body to a running generation."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from protos.errors import ContextLengthError, ModelNotFoundError, RequestError, ServingError
from protos.messages import Grammar
from protos.served_model import ModelCard, with_tokenizer
from router.api_keys import current_client
from router.backend import Backend, OpenStream, SharedAnswer, answered
from router.backend.migration import MigratingStreams
from router.config import IngressConfig
from router.generation.generation import Generation
from router.generation.receipts import OpenReceipt, digests_of, key_for, read_private_key
from router.generation.tool_formats import PROMPTED, find_format
from router.metrics.ingress_metrics import IngressMetrics
from router.metrics.tracing import traced, tracer_from_environment
from router.requests.body import BodyWork
from router.requests.chat_request import ChatCompletionRequest, ChatPromptFields
from router.requests.completion_request import CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.requests.generation_fields import GenerationFields
from router.requests.reasoning_format import HARMONY, Thinking, find_reasoning, thinking_after
from router.requests.sampling_params import GenerateParams, Prompt, bad_word_forms, check_token_ids
from router.requests.sequence_requests import check_num_choices, check_room, generate_requests, truncated
from router.requests.structured_output import Constraint
from router.requests.tools import ToolUse, with_prompted_tools
from router.tokenizer.chat_prompt import chat_prompt
from router.tokenizer.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from router.generation.response_template import ResponseReader

logger = logging.getLogger(__name__)


class GenerationService:
    """Turns validated bodies into running generations, for both frontends."""

    def __init__(
        self,
        backend: Backend,
        files: TokenizerFiles,
        config: IngressConfig,
        metrics: IngressMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        """`tracer` defaults to the one the environment configures, usually no tracing."""
        self.config = config
        self.files = files
        self.metrics = metrics
        self._receipt_key = None if config.receipt_key_file is None else read_private_key(config.receipt_key_file)
        metrics.wanted_pairs.set(config.min_pairs)
        self.tracer = tracer_from_environment() if tracer is None else tracer
        # Streams, from inside out: the backend, migration, tracing.
        migrating = MigratingStreams(backend.generate, metrics.migrations.inc, self.forget_card)
        self._gate = migrating.gate
        self._open_stream: OpenStream = migrating.generate
        if self.tracer:
            self._open_stream = traced(migrating.generate, self.tracer, config.model_id)
        self.backend = backend
        self.peers: Callable[[], Awaitable[Mapping[str, str]]] | None = None  # all ingress replicas' metrics, by name
        self.created_s = int(time.time())
        # Find the forms of thoughts and calls that the chat template shows.
        template = files.chat_template.source if files.chat_template else ""
        self._prompts_tools = config.tool_format == PROMPTED and "tools" not in template
        self._reasoning = find_reasoning(files.tokenizer, template, config.reasoning_format)
        if files.chat_template is not None:
            chat_prompt(files.chat_template)  # learns its rules now, and not in the first request
        format_ = find_format(template, config.tool_format)
        has_messages = self._reasoning is not None and self._reasoning.name == HARMONY
        is_read = format_ is not None and (has_messages or not format_.covers_thoughts)
        self._format = format_.with_tokens(files.tokenizer) if format_ is not None and is_read else None
        self._response_template = self._read_response_template()
        self.body_work = BodyWork()
        self._grammars = asyncio.Semaphore(2)  # grammars that are made at a time
        self._card: ModelCard | None = None
        self._card_read_s = 0.0
        self.fresh_card = SharedAnswer(self._read_card).get

    def _read_response_template(self) -> Callable[[str, Mapping[str, object]], ResponseReader] | None:
        """Return the maker of readers by the tokenizer's own template, where no format here reads its calls."""
        if self._format is not None or self.files.response_template is None:
            return None
        from router.generation.response_template import ResponseReader, load_template  # loads transformers

        return partial(ResponseReader, load_template(self.files.response_template))

    def check_model(self, model: str | None) -> None:
        """Raise `ModelNotFoundError` if a model is named and is not the one served here."""
        names = (self.config.model_id, *self.config.model_aliases)
        if model and model not in names:
            raise ModelNotFoundError(
                f"The model {model[:200]!r} does not exist; this server has {', '.join(map(repr, names))}.",
                param="model",
            )

    async def card(self) -> ModelCard:
        """Return the pair's model card; read again once a minute, since a redeploy may change it."""
        if self._card is None or time.monotonic() - self._card_read_s > 60.0:
            try:
                self._card = await self.fresh_card()
            except ServingError as error:
                if self._card is None:
                    raise
                logger.warning("the model card could not be read again, going on with the old one: %s", error)
                self._card_read_s = time.monotonic()
        return self._card

    def forget_card(self) -> None:
        """Read the card again for the next request."""
        self._card = None

    async def _read_card(self) -> ModelCard:
        """Return the model card, read now. Raises `UnavailableError` if no pair answers in time."""
        card = await answered(self.backend.describe())
        self._card_read_s = time.monotonic()
        return card

    async def replica_metrics(self) -> Sequence[str]:
        """Return the metrics of every pair replica. Raises `UnavailableError` if they do not answer in time."""
        return await answered(self.backend.metrics_texts(), 5.0)

    async def frontend_metrics(self) -> str | Mapping[str, str]:
        """Return the metrics of every ingress replica by its name; this one's alone where the others do not answer."""
        if self.peers is None:
            return self.metrics.text()
        try:
            async with asyncio.timeout(5.0):
                return await self.peers()
        except Exception as error:  # any of Ray's; a scrape without the others is better than none
            logger.warning("the other ingress replicas' metrics are missing: %r", error)
            return self.metrics.text()

    def _named(self, body: GenerationFields) -> str:
        """Return the model's name in the answer: an alias is answered by its name, as in vLLM."""
        return body.model or self.config.model_id

    async def complete(self, body: CompletionRequest) -> Generation:
        """Prepare a request of `/v1/completions`; it runs when its deltas are iterated."""
        self.check_model(body.model)
        check_num_choices(len(body.prompts), body.n or 1)
        self._gate.check(current_client.get().tenant_id, len(body.prompts) * (body.n or 1))
        prompts = [await self._prompt(prompt, body) for prompt in body.prompts]
        return await self._start(
            GenerateParams(
                request_id=_new_id("cmpl"),
                model_id=self._named(body),
                fields=body,
                prompts=tuple(prompts),
                max_tokens=body.max_tokens,
                num_logprobs=body.logprobs,
                has_echo=bool(body.echo),
                grammar=await self._grammar(body.constraint),
                prediction_token_ids=await self._prediction(body),
            )
        )

    async def chat(self, body: ChatCompletionRequest) -> Generation:
        """Prepare a request of `/v1/chat/completions`; it runs when its deltas are iterated."""
        self.check_model(body.model)
        self._gate.check(current_client.get().tenant_id, body.n or 1)
        # The prompt, and the thought that it leaves open.
        token_ids = await self.chat_prompt(body)
        use = body.tool_use
        thinking = thinking_after(
            token_ids,
            self._reasoning,
            self.files.tokenizer,
            is_shown=body.include_reasoning is not False,
            has_tools=use is not None,
            continued=(body.messages[-1].content or "") if body.continue_final_message else None,
        )
        # The grammar depends on both, since it begins after the thought.
        return await self._start(
            GenerateParams(
                request_id=_new_id("chatcmpl"),
                model_id=self._named(body),
                fields=body,
                prompts=(Prompt(tuple(token_ids)),),
                max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
                is_chat=True,
                num_logprobs=body.num_logprobs,
                grammar=await self._chat_grammar(body, thinking),
                thinking=thinking,
                tool_schemas={function.name: function.schema_ for function in use.callable_} if use else {},
                has_calls_alone=use is not None and use.is_required,
                prediction_token_ids=await self._prediction(body),
            )
        )

    async def _grammar(self, constraint: Constraint | None) -> Grammar | None:
        """Return the grammar of a constraint, made once: in a thread, a few at a time, since it may be large."""
        if constraint is None:
            return None
        async with self._grammars:
            return await asyncio.to_thread(constraint.grammar)

    async def _chat_grammar(self, body: ChatCompletionRequest, thinking: Thinking | None) -> Grammar | None:
        """Return the grammar of a chat's answer, which begins after its thought."""
        use, format_ = body.tool_use, self._format
        answer = await self._grammar(body.constraint)
        if use is None:
            grammar = answer
        elif format_ is None:
            _check_free(use, answer)
            return None
        else:
            async with self._grammars:
                grammar = await asyncio.to_thread(format_.grammar, use, answer)
        covers_thoughts = use is not None and format_ is not None and format_.covers_thoughts
        if grammar is None or thinking is None or covers_thoughts or body.allowed_token_ids is not None:
            return grammar
        return replace(grammar, thought=thinking.mark)

    async def chat_prompt(self, body: ChatPromptFields) -> list[int]:
        """Return the token ids of a chat's prompt, for an answer and for those who count them."""
        self.check_model(body.model)
        variables = body.template_variables
        if body.tool_use is not None:
            self._check_tools()
            variables["tools"] = await asyncio.to_thread(lambda use: use.for_template, body.tool_use)
        text = await asyncio.to_thread(self._render, body, variables)
        return await self.encode(text, "messages", add_special_tokens=bool(body.add_special_tokens))

    async def count_tokens(self, body: ChatPromptFields) -> int:
        """Return the number of tokens of a chat's prompt."""
        token_ids = await self.chat_prompt(body)
        current_client.get().take(len(token_ids))
        return len(token_ids)

    async def tokenize(self, body: TokenizeRequest) -> Sequence[int]:
        """Return the token ids of a text or of a chat's prompt, as generation would see them."""
        self.check_model(body.model)
        if body.prompt is None:
            tokens = await self.chat_prompt(body)
        else:
            has_special = body.add_special_tokens is not False
            tokens = await self.encode(body.prompt, "prompt", add_special_tokens=has_special)
        current_client.get().take(len(tokens))
        return truncated(tokens, body.truncate_prompt_tokens, None, await self.card())

    async def detokenize(self, body: DetokenizeRequest) -> str:
        """Return the text of token ids, at most as many as the context holds."""
        self.check_model(body.model)
        card, num_tokens = await self.card(), len(body.tokens)
        if num_tokens > card.max_model_len:
            raise RequestError(
                f"tokens holds {num_tokens} token ids; at most {card.max_model_len} are read at a time, the length of "
                "this model's context. Send them in parts.",
                param="tokens",
            )
        if body.tokens:
            check_token_ids(body.tokens, card, "tokens")
        current_client.get().take(num_tokens)
        return await self.files.tokenizer.decode_async(body.tokens, skip_special_tokens=body.skip_special_tokens)

    def _render(self, body: ChatPromptFields, variables: Mapping[str, object]) -> str:
        """Return the text of a prompt, by the model's template, which writes its own special tokens."""
        if self.files.chat_template is None:
            raise RequestError(
                f"The model {self.config.model_id!r} has no chat template; use /v1/completions, or add its template as "
                "chat_template.jinja to the folder of the model and start again.",
                param="messages",
            )
        turns = [message.for_template() for message in body.messages]
        if self._prompts_tools:
            turns = with_prompted_tools(turns, body.tool_use)
        return chat_prompt(self.files.chat_template).render(
            turns,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            variables=variables,
        )

    def _check_tools(self) -> None:
        """Raise `RequestError` if the model's template has no tools, or calls in a form that is not read."""
        template = self.files.chat_template.source if self.files.chat_template else ""
        if self._format is None and (self._response_template is None or "tools" not in template):
            raise RequestError(
                f"The chat template of {self.config.model_id!r} has no tools, or calls in a form that is not "
                "read here; leave tools out, or set ingress.tool_format: to 'prompted' if the template has none.",
                param="tools",
            )

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ContextLengthError: it is too long, whatever its tokens are; it is not read then.
        """
        tokenizer, card = self.files.tokenizer, await self.card()
        if len(text) > (limit := tokenizer.max_text_len(card.max_model_len)):
            num_tokens = card.max_model_len * len(text) // limit + 1  # of the longest there are
            raise ContextLengthError.of_prompt(
                param, num_tokens, card.max_model_len, f" at least, by its {len(text)} characters"
            )
        return await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    async def _prompt(self, prompt: str | list[int], body: CompletionRequest) -> Prompt:
        if isinstance(prompt, str):
            has_special = body.add_special_tokens is not False
            return Prompt(tuple(await self.encode(prompt, "prompt", add_special_tokens=has_special)), prompt)
        card = await self.card()
        kept = truncated(prompt, body.truncate_prompt_tokens, body.max_tokens, card)
        check_room(len(kept), card, "prompt")  # before anything is done for each id
        return Prompt(tuple(kept))

    async def _prediction(self, body: GenerationFields) -> tuple[int, ...]:
        """Return the predicted output in tokens, as the model would write it."""
        if body.prediction is None:
            return ()
        text = body.prediction.text[: self.files.tokenizer.max_text_len((await self.card()).max_model_len)]
        return tuple(await self.files.tokenizer.encode_async(text, add_special_tokens=False))

    async def _bad_words(self, body: GenerationFields) -> tuple[tuple[int, ...], ...]:
        """Return the forbidden words in tokens; in a thread, since there may be many."""
        if not body.bad_words:
            return ()
        return await asyncio.to_thread(bad_word_forms, body.bad_words, self.files.tokenizer)

    async def _start(self, params: GenerateParams) -> Generation:
        card = await self.card()
        key = key_for(params.fields, card, self._receipt_key)
        requests = generate_requests(
            params, card, await self._bad_words(params.fields), is_strict=self.config.strict_fields
        )
        digests = {} if key is None else digests_of(card, self.files, requests, params.fields)
        return Generation(
            params,
            requests,
            open_stream=self._open_stream,
            tokenizer=self.files.tokenizer,
            answers=self._format or self._response_template,
            metrics=self.metrics,
            system_fingerprint=with_tokenizer(card.fingerprint or card.model_version, self.files.digest),
            receipt=None if key is None else OpenReceipt(key, digests, requests),
        )


def _check_free(use: ToolUse, answer: Grammar | None) -> None:
    """Raise `RequestError` if the request needs a grammar of calls."""
    is_strict = any(function.strict for function in use.callable_) or len(use.callable_) < len(use.tools)
    if use.is_required or is_strict or not use.is_parallel or answer is not None:
        raise RequestError(
            "This model's calls are parsed by its tokenizer's response_template, which has no grammar: tool_choice, "
            "strict, parallel_tool_calls and response_format cannot be enforced together with tools. Leave them out, "
            "or set ingress.tool_format.",
            param="tool_choice",
        )


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
