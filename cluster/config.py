"""The schema of deploy.yaml's `args`, the only place where a deployment is configured.

Every key is checked once, at start: an unknown one is refused with the nearest valid one, a value this version cannot
honour with those it can. Nothing is ignored. The rest of the code sees frozen dataclasses built from it.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from protos.errors import ConfigError
from protos.messages import VerifyMode


def _one_of(*available: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in available:
            raise ValueError(f"{value!r} is not available; this version offers {', '.join(available)}")
        return value

    return AfterValidator(check)


def _only(available: Any, reason: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if value != available:
            raise ValueError(f"{value!r} is not available: {reason}; leave it at {available!r}")
        return value

    return AfterValidator(check)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetSection(_Section):
    """The model whose law is served. `path` is a local folder or a Hub id; dtype auto follows the processor."""

    path: str
    dtype: Annotated[str, _one_of("auto", "bfloat16", "float16", "float32")] = "auto"
    tensor_parallel_size: Annotated[int, _only(1, "the target runs on one device")] = 1
    num_threads: int | None = Field(default=None, ge=1, le=1024)  # None: from the cores the pair owns


class DraftSection(_Section):
    """Who guesses: a second model in its own process, n-grams of the text itself, suffixes of it and of earlier ones
    under the same cache_salt, or nobody.
    """

    kind: Annotated[str, _one_of("model", "ngram", "suffix", "none")] = "model"
    path: str | None = None
    dtype: Annotated[str, _one_of("auto", "bfloat16", "float16", "float32")] = "auto"
    num_threads: int | None = Field(default=None, ge=1, le=1024)

    @model_validator(mode="after")
    def _path_belongs_to_models(self) -> DraftSection:
        if self.kind == "model" and self.path is None:
            raise ValueError("kind 'model' needs path, the draft model's folder or Hub id")
        if self.kind != "model" and self.path is not None:
            raise ValueError(f"kind {self.kind!r} loads no model; remove path {self.path!r} or set kind to 'model'")
        return self


class SpeculationSection(_Section):
    """K drafts per pass, by default and at most for a request that asks, and how they are verified."""

    num_tokens: int = Field(default=4, ge=0, le=64)
    max_num_tokens: int = Field(default=16, ge=0, le=64)
    mode: Annotated[str, _one_of("sync")] = "sync"
    verify: Annotated[str, _one_of(*VerifyMode)] = "coupled"
    adaptive: Annotated[bool, _only(False, "the number of drafts is fixed by num_tokens")] = False
    tree: Annotated[dict[str, Any] | None, _only(None, "drafts are chains")] = None

    @model_validator(mode="after")
    def _default_within_limit(self) -> SpeculationSection:
        if self.num_tokens > self.max_num_tokens:
            raise ValueError(
                f"num_tokens is {self.num_tokens}, more than max_num_tokens, {self.max_num_tokens}; "
                "lower it or raise the limit"
            )
        return self


class CacheSection(_Section):
    """The KV pool of the target: a budget, or a number of blocks."""

    block_size: int = Field(default=16, ge=1, le=1024)
    memory_gib: float | None = Field(default=None, gt=0, strict=False)
    num_blocks: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _one_size(self) -> CacheSection:
        if self.memory_gib is not None and self.num_blocks is not None:
            raise ValueError("memory_gib and num_blocks are two ways to say one thing; keep one of them")
        return self


class SchedulerSection(_Section):
    """Limits of one step and of one sequence."""

    max_num_sequences: int = Field(default=64, ge=1)
    max_tokens_per_step: int = Field(default=2048, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)


class AutoscalingSection(_Section):
    """Between how many replicas Serve may move, and the running requests per replica it aims at."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    target_ongoing_requests: float = Field(default=16.0, gt=0, strict=False)

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingSection:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class PairSection(_Section):
    """How many draft-target pairs serve, and how many requests may wait in each before it says 429."""

    num_replicas: int | None = Field(default=None, ge=1)
    autoscaling: AutoscalingSection | None = None
    max_queued_requests: int = Field(default=256, ge=0)

    @model_validator(mode="after")
    def _one_count(self) -> PairSection:
        if self.num_replicas is not None and self.autoscaling is not None:
            raise ValueError("num_replicas and autoscaling contradict each other; keep one of them")
        return self

    @property
    def max_replicas(self) -> int:
        """Replicas that must be placeable."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas or 1


class PrefillSection(_Section):
    """Separate prefill replicas; 0 means that each pair reads its own prompts."""

    num_replicas: Annotated[int, _only(0, "pairs prefill for themselves")] = 0
    min_remote_prefill_tokens: Annotated[int | None, _only(None, "there is no remote prefill")] = None


class RouterSection(_Section):
    """How the ingress chooses a pair: `load` is the lesser loaded of two."""

    policy: Annotated[str, _one_of("load")] = "load"


class LimitsSection(_Section):
    """What one client request may ask for, and how long an answer is waited for (`router.config.IngressLimits`)."""

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_choices: int = Field(default=128, ge=1)
    first_token_timeout_s: float = Field(default=600.0, gt=0, strict=False)
    inter_token_timeout_s: float = Field(default=30.0, gt=0, strict=False)
    migration_deadline_s: float = Field(default=60.0, gt=0, strict=False)
    max_migrations: int = Field(default=64, ge=0)


class IngressSection(_Section):
    """The faces. `api_keys_file` has one key per line; without it every client is served."""

    num_replicas: int = Field(default=1, ge=1)
    api_keys_file: str | None = None
    limits: LimitsSection = LimitsSection()


class DeployConfig(_Section):
    """All of deploy.yaml's `args`."""

    model_id: str = Field(min_length=1)
    target: TargetSection
    draft: DraftSection = DraftSection(kind="none")
    speculation: SpeculationSection = SpeculationSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    pair: PairSection = PairSection()
    prefill: PrefillSection = PrefillSection()
    router: RouterSection = RouterSection()
    ingress: IngressSection = IngressSection()


def parse_config(args: dict[str, Any]) -> DeployConfig:
    """Check `args` whole and report every mistake at once.

    Raises:
        ConfigError: one line per mistake: the key's path, what is wrong, and the remedy.
    """
    try:
        return DeployConfig.model_validate(args)
    except ValidationError as error:
        mistakes = [_explain(each["type"], each["loc"], each["msg"], each["input"]) for each in error.errors()]
        raise ConfigError("deploy.yaml is wrong:\n" + "\n".join(f"  {mistake}" for mistake in mistakes)) from None


def _explain(kind: str, path: tuple[int | str, ...], message: str, value: Any) -> str:
    where = ".".join(("args", *map(str, path)))
    if kind == "extra_forbidden":
        return f"{where}: unknown key{_nearest(path)}"
    if kind == "missing":
        return f"{where}: missing; it has no default"
    if kind == "value_error":
        return f"{where}: {message.removeprefix('Value error, ')}"
    return f"{where}: {message[0].lower()}{message[1:]}, and it is {value!r}"


def _nearest(path: tuple[int | str, ...]) -> str:
    valid = _keys_at(path[:-1])
    close = difflib.get_close_matches(str(path[-1]), valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid keys here are {', '.join(valid)}"


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = DeployConfig
    for key in path:
        annotation = section.model_fields[str(key)].annotation
        candidates = (annotation, *get_args(annotation))
        section = next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))
    return list(section.model_fields)
