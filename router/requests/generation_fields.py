"""The fields that every generating body has, OpenAI's and our own: types and ranges of every parameter.

One schema for both frontends: a gRPC request is validated as the `CompletionRequest` that has the same fields. Unknown
fields are refused or named as ignored (`strict_fields`); parameters that change the answer in a way that is not served
here are refused, unless they hold the value that means "off".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from protos.errors import RequestError
from protos.messages import MAX_STEP_SCORE, SpeculationMethod, VerifyMode
from router.requests.body import Body
from router.requests.structured_output import Constraints

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
MAX_LOGPROBS = 20
# Unsupported parameters of OpenAI's API that would change the answer, with the values that ask for nothing.
NOT_SERVED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),  # one that a client writes may run for ever
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"], []),
    "moderation": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def _whole(value: object) -> object:
    """Return 5.0 as 5, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: object) -> object:
    """Return a number as a text: some clients send names as numbers."""
    return str(value) if type(value) is int else value


def _token_limit(value: int, info: ValidationInfo) -> int:
    if value == 0:
        raise RequestError(
            f"{info.field_name} is 0; it must be at least 1, or -1 for what fits.", param=info.field_name
        )
    return value


def _seed(value: int) -> int | None:
    """Return the seed within 64 bits with a sign; -1 asks for any, as in vLLM and llama.cpp."""
    return None if value == -1 else value - 2 * (_INT64 + 1) if value > _INT64 else value


Int = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, BeforeValidator(_text)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenLimitOrZero = Annotated[Int, Field(ge=-1, le=_INT64)]  # -1: what fits in the context, which bounds it in any case
TokenLimit = Annotated[TokenLimitOrZero, AfterValidator(_token_limit)]
Seed = Annotated[Int, Field(ge=-_INT64 - 1, le=2 * _INT64 + 1), AfterValidator(_seed)]
PromptLimit = Annotated[Int, Field(ge=-1, le=_INT32)]


class StreamOptions(Body):
    """`stream_options`. Obfuscation is accepted and not done: it pads chunks, which a client may ignore anyway."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with `include_usage`, every chunk has the usage so far
    include_obfuscation: bool | None = None
    include_drafts: bool | None = None  # events with drafts that are not verified yet


class SpeculationFields(Body):
    """`speculation`: one request's settings; a field that is left out stays as deployed."""

    enabled: bool | None = None
    num_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    verify: Annotated[VerifyMode, Field(strict=False)] | None = None
    method: str | None = None  # checked against the methods that the deployment offers
    mode: Literal["exact", "approximate"] | None = None  # exact by default
    threshold: Annotated[float, Field(ge=0, le=MAX_STEP_SCORE)] | None = None  # of approximate steps
    explain: bool | None = None  # the answer's metrics count the passes that went without drafts, by reason

    @property
    def is_off(self) -> bool:
        """True if the request asks for plain decoding, in any of three ways."""
        return self.enabled is False or self.num_tokens == 0 or self.method == SpeculationMethod.NONE


class PredictionPart(Body):
    """A part of a prediction's content."""

    type: Literal["text"]
    text: str


class PredictionFields(Body):
    """`prediction`: a text that the output will mostly repeat; it is drafted from and changes no token."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def _as_list(value: object) -> object:
    """Return the strings that end an output; an empty one asks for none."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


class GenerationFields(Constraints):
    """The fields of both endpoints.

    A field that is null or left out takes the checkpoint's default (`ModelCard.sampling_defaults`), else OpenAI's.
    """

    model: str | None = None  # the served model if given
    n: Annotated[Int, Field(ge=1, le=_INT32)] | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None  # 0 keeps the likeliest token
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Ours, named as in vLLM where it has them.
    top_k: Annotated[Int, Field(ge=-1, le=_INT32)] | None = None  # 0 and -1 keep all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=10)] | None = None  # float32 divides by it
    min_tokens: Annotated[Int, Field(ge=0, le=_INT32)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Int], Field(max_length=1024)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None  # of a prompt in text; a chat template writes its own
    truncate_prompt_tokens: PromptLimit | None = None  # keeps the last; -1: what fits
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    receipt: bool | None = None  # by default the API key decides
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[Int, Field(ge=-_INT32, le=_INT32)] | None = None  # lower is sooner
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    speculation: SpeculationFields | None = None
    prediction: PredictionFields | None = None

    # Name a conversation for the router, the first of them that is set; neither changes the answer.
    prompt_cache_key: str | None = None
    user: Text | None = None

    # Accepted, because they change nothing in the answer.
    store: bool | None = None  # for the log that drafts are tuned on; a tenth of requests without it goes there
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # Refused unless they ask for nothing (`NOT_SERVED`).
    logits_processors: Any = None
    use_beam_search: Any = None
    functions: Any = None
    function_call: Any = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> GenerationFields:
        for name, neutral in NOT_SERVED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise RequestError(f"{name} is not supported by this server; leave it out.", param=name)
        options = {} if self.stream_options is None else self.stream_options.model_dump()
        if any(options.values()) and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is only there when stream is false.", param="prompt_logprobs")
        return self

    @property
    def has_usage_chunk(self) -> bool:
        """True if the last chunk of the stream is to hold the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_draft_events(self) -> bool:
        """True if the stream is to show drafts that are not verified yet."""
        return self.stream_options is not None and bool(self.stream_options.include_drafts)

    @property
    def has_running_usage(self) -> bool:
        """True if every chunk is to hold the usage so far."""
        return self.has_usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)
