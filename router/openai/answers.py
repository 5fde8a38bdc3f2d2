"""Bodies of answers without types in a required package: small ones, Anthropic's, and drafts of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal, NotRequired

from openai.types import Model
from typing_extensions import TypedDict

from protos.served_model import CanaryReport, DraftReport


class ErrorFields(TypedDict):
    """`error` of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every failure except on `/v1/messages`."""

    error: ErrorFields


class MessagesErrorFields(TypedDict):
    """`error` of Anthropic's error object."""

    type: str
    message: str


class MessagesError(TypedDict):
    """A failure of `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorFields


class ServedModel(Model):
    """An entry of `/v1/models`."""

    max_model_len: int
    root: str
    parent: str | None = None
    permission: list[dict[str, Any]]


class ModelList(TypedDict):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class TokenizeAnswer(TypedDict):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str | None]]  # null for an id without a token


class DetokenizeAnswer(TypedDict):
    """The answer of `/detokenize`."""

    prompt: str


class CanaryAnswer(TypedDict):
    """The trial of a draft against another; `gain` is new over old goodput minus 1, null while unknown."""

    name: str
    old_name: str
    outcome: Literal["running", "kept", "rolled_back", "stopped"]
    reason: str
    num_pairs: int
    gain: float | None
    low: float | None
    high: float | None


class RunningDraft(TypedDict):
    """A draft model that a pair runs; `name` is its folder's, `digest` its part of `system_fingerprint`."""

    name: str
    method: str  # requests select it by this name
    digest: str
    since: int  # Unix time
    is_deployed: bool  # false after an exchange, until deploy.yaml names it too
    canary: NotRequired[CanaryAnswer]  # the latest
    tuning: NotRequired[str]  # the state of `tune.auto`'s answer to the latest drift alarm


class PairDraftAnswer(RunningDraft):
    """The draft of one pair, as admins see it."""

    replica: str
    path: str


class DraftsAnswer(TypedDict):
    """The answer of `/admin/drafts` and of the orders below it: the draft of every pair."""

    drafts: list[PairDraftAnswer]


class HealthAnswer(TypedDict):
    """The answer of the probes; `alarms` are the pair's, if any, `draft` is a draft that can be exchanged."""

    status: Literal["ok"]
    alarms: NotRequired[list[str]]
    draft: NotRequired[RunningDraft]


class KilledDrafts(TypedDict):
    """The answer of `/admin/drafts/kill`."""

    num_drafts: int


class InputTokens(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class ThinkingBlock(TypedDict):
    """A block of an answer's thoughts; nothing here signs them."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class TextBlock(TypedDict):
    """A block of text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(TypedDict):
    """Token counts in Anthropic's form: `input_tokens` excludes cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


def running_draft(report: DraftReport) -> RunningDraft:
    """Return what every client may know: no path of the node."""
    answer = RunningDraft(
        name=_name(report.path),
        method=report.method,
        digest=report.digest,
        since=int(report.since_s),
        is_deployed=report.is_deployed,
    )
    if report.canary is not None:
        answer["canary"] = _canary(report.canary)
    if report.tuning:
        answer["tuning"] = report.tuning
    return answer


def _canary(report: CanaryReport) -> CanaryAnswer:
    return CanaryAnswer(
        name=_name(report.path),
        old_name=_name(report.old_path),
        outcome=report.outcome.value,
        reason=report.reason,
        num_pairs=report.num_pairs,
        gain=report.gain,
        low=report.low,
        high=report.high,
    )


def _name(path: str) -> str:
    return PurePath(path).name


def drafts_answer(reports: Sequence[DraftReport]) -> DraftsAnswer:
    """Return the drafts of every pair."""
    return DraftsAnswer(
        drafts=[
            PairDraftAnswer(**running_draft(report), replica=report.replica, path=report.path) for report in reports
        ]
    )
