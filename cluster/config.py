"""The schema of deploy.yaml's `args`, the only place where a deployment is configured.

Every key is checked once, at start: an unknown one is refused with the nearest valid one, a value this version cannot
honour with those it can. Nothing is ignored. The rest of the code sees frozen dataclasses built from it.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.approximate.config import JudgeKind, StepConfig
from engine.config import MAX_TREE_NODES, DraftVocabulary, GraphConfig, GraphKind, HeadKind, TreeConfig, TreeKind
from protos.errors import ConfigError
from protos.messages import SpeculationMethod, VerifyMode


def _one_of(*available: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in available:
            raise ValueError(f"{value!r} is not available; this version offers {', '.join(available)}")
        return value

    return AfterValidator(check)


_HEAD_KINDS = tuple(map(str, HeadKind))
_KINDS_WITH_PATH = ("model", *(str(kind) for kind in HeadKind if kind is not HeadKind.MTP))
_KINDS_WITH_LAWS = ("model", *_HEAD_KINDS)  # they say more than one text, and so can branch
SERVES_OWN_POLICY = "power_of_two"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetSection(_Section):
    """The model whose law is served. `path` is a local folder or a Hub id; dtype auto follows the processor;
    quantization is of the linear layers' weights; attention auto is our Triton kernel on GPUs and torch elsewhere.
    deterministic: the same text has the same logits, bit for bit, with speculation on and off and in any batch.

    `tensor_parallel_size` processes divide the model among them, each on a GPU of its own in one NVLink group (without
    GPUs: all on the processor, which is for trying it out). num_threads is then of each process.

    On GPUs passes of up to so many sequences as `cuda_graph_batches` has, with one row each or with their drafts, are
    recorded at start and replayed; `cuda_graphs` off computes every pass anew.
    """

    path: str
    dtype: Annotated[str, _one_of("auto", "bfloat16", "float16", "float32")] = "auto"
    quantization: Annotated[str, _one_of("none", "int8", "int4")] = "none"
    attention: Annotated[str, _one_of("auto", "torch", "triton")] = "auto"
    deterministic: bool = False
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    cuda_graphs: Annotated[str, _one_of("auto", "off")] = "auto"
    cuda_graph_batches: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    num_threads: int | None = Field(default=None, ge=1, le=1024)  # None: from the cores the pair owns

    @model_validator(mode="after")
    def _batches_belong_to_graphs(self) -> TargetSection:
        if self.cuda_graph_batches is not None and self.cuda_graphs == "off":
            raise ValueError("cuda_graph_batches are what is recorded, and cuda_graphs is 'off'; remove one of the two")
        return self

    def graphs(self) -> GraphConfig:
        """What the engine takes."""
        if self.cuda_graph_batches is None:
            return GraphConfig(GraphKind(self.cuda_graphs))
        return GraphConfig(GraphKind(self.cuda_graphs), tuple(self.cuda_graph_batches))

    @model_validator(mode="after")
    def _sums_between_ranks_have_no_order(self) -> TargetSection:
        if self.tensor_parallel_size > 1 and self.deterministic:
            raise ValueError(
                f"deterministic is for one device, and tensor_parallel_size is {self.tensor_parallel_size}; "
                "set deterministic to false, or the size to 1"
            )
        return self

    @model_validator(mode="after")
    def _divided_weights_are_whole_numbers(self) -> TargetSection:
        if self.tensor_parallel_size > 1 and self.quantization != "none":
            raise ValueError(
                f"quantization {self.quantization!r} is for one device, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}; set one of them to 'none' or 1"
            )
        return self


class DraftSection(_Section):
    """Who guesses: a second model in its own process, a head on the target's hidden states in the target's process,
    n-grams of the text itself, suffixes of it and of earlier ones under the same cache_salt, or nobody.

    medusa and eagle3: heads with files of their own, at `path`. mtp: the layer for it among the target's own weights.
    Heads compute in the target's dtype, on its device and threads.

    `vocabulary` is how a model's tokens become the target's: same (one tokenizer), intersection (drafts are made of the
    tokens that both have), text (it continues the text, which is encoded again), or auto, which compares the two.

    `gpu` is where a draft model runs on GPU nodes: `own` is a GPU beside the target's, a number that of this rank of
    the target (0 where it has but one), auto an own one where every pair can have it, else the target's last.
    """

    kind: Annotated[str, _one_of("model", "medusa", "eagle3", "mtp", "ngram", "suffix", "none")] = "model"
    path: str | None = None
    vocabulary: Annotated[str, _one_of(*DraftVocabulary)] = "auto"
    dtype: Annotated[str, _one_of("auto", "bfloat16", "float16", "float32")] = "auto"
    quantization: Annotated[str, _one_of("none", "int8", "int4")] = "none"
    attention: Annotated[str, _one_of("auto", "torch", "triton")] = "auto"
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    gpu: Literal["auto", "own"] | Annotated[int, Field(ge=0)] = "auto"

    @model_validator(mode="after")
    def _path_belongs_to_models(self) -> DraftSection:
        if self.kind in _KINDS_WITH_PATH and self.path is None:
            raise ValueError(f"kind {self.kind!r} needs path, the draft's folder or Hub id")
        if self.kind not in _KINDS_WITH_PATH and self.path is not None:
            raise ValueError(
                f"kind {self.kind!r} loads no model of its own; remove path {self.path!r} or set kind to "
                f"{' or '.join(map(repr, _KINDS_WITH_PATH))}"
            )
        return self

    @model_validator(mode="after")
    def _heads_are_computed_as_their_target(self) -> DraftSection:
        own = self.model_fields_set - {"kind", "path"}
        if self.kind in _HEAD_KINDS and own:
            raise ValueError(f"kind {self.kind!r} computes as its target does; remove {', '.join(sorted(own))}")
        if self.kind != "model" and "vocabulary" in self.model_fields_set:
            raise ValueError(f"vocabulary is for kind 'model', and the kind is {self.kind!r}; remove one of the two")
        return self


class TreeSection(_Section):
    """Drafts that branch, in passes of at most `max_batch` sequences; `num_tokens` is then how deep they go.

    kind dynamic: the `num_nodes` likeliest nodes of each pass. static: the same shape in every pass, by `parents` (of
    each node the one before it, -1 for the committed tokens), or without them the best for `num_nodes`. Drafts drawn
    for `rejection` have the static shape of their size in either kind; `block` judges chains.
    """

    kind: Annotated[str, _one_of(*TreeKind)] = "dynamic"
    num_nodes: int | None = Field(default=None, ge=1, le=MAX_TREE_NODES)
    parents: list[int] | None = Field(default=None, min_length=1, max_length=MAX_TREE_NODES)
    max_batch: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _is_a_tree(self) -> TreeSection:
        try:
            self.config()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def config(self) -> TreeConfig:
        """What the engine takes; a shape says how many nodes it has."""
        parents = tuple(self.parents or ())
        num_nodes = self.num_nodes or len(parents) or TreeConfig().num_nodes
        return TreeConfig(TreeKind(self.kind), num_nodes, self.max_batch, parents)


_STEPS = StepConfig()


class StepsSection(_Section):
    """Allows requests to ask for reasoning steps that are NOT exact (`speculation: {"mode": "approximate"}`).

    The draft writes a step, up to `step_end` or `max_step_tokens`; the target scores it from 0 to 9 in one pass; from
    `threshold` on it is committed as it is. judge rating: the digit the target expects to say behind `rating_prompt`.
    likelihood: how near the step comes to what the target finds likeliest. Steps are drafted between the two markers
    `think` (null: anywhere), at most `max_steps` per request.
    """

    threshold: float = Field(default=_STEPS.threshold, strict=False)
    judge: Annotated[str, _one_of(*JudgeKind)] = _STEPS.judge
    rating_prompt: str = Field(default=_STEPS.rating_prompt, min_length=1)
    step_end: str = _STEPS.step_end
    think: list[str] | None = Field(default=list(_STEPS.think or ()), min_length=2, max_length=2)
    max_step_tokens: int = _STEPS.max_step_tokens
    max_steps: int = _STEPS.max_steps

    @model_validator(mode="after")
    def _are_steps(self) -> StepsSection:
        try:
            self.config()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def config(self) -> StepConfig:
        """What the engine takes."""
        think = None if self.think is None else (self.think[0], self.think[1])
        return StepConfig(
            self.threshold,
            JudgeKind(self.judge),
            self.rating_prompt,
            self.step_end,
            think,
            self.max_step_tokens,
            self.max_steps,
        )


class SpeculationSection(_Section):
    """K drafts per pass, by default and at most for a request that asks, how they are verified, who guesses, and when.

    When adaptive, every pass of every request gets its own K, from 0 to what the request may ask for, and num_tokens is
    the first one; otherwise K is num_tokens.

    A request may choose among `methods`: left out, all that need no more than the deployment has. One that does not
    choose gets `method`: left out, the draft's kind.

    mode sync: a draft model drafts when the target has committed, and the target waits for it. async: it drafts while
    the target verifies, for the `fan_out` likeliest tokens at each position where the pass may end.

    steps: reasoning steps that are not exact, for requests that ask for them; left out, there are none.
    """

    num_tokens: int = Field(default=4, ge=0, le=64)
    max_num_tokens: int = Field(default=16, ge=0, le=64)
    mode: Annotated[str, _one_of("sync", "async")] = "sync"
    fan_out: int = Field(default=3, ge=1, le=16)
    verify: Annotated[str, _one_of(*VerifyMode)] = "coupled"
    method: Annotated[str, _one_of(*SpeculationMethod)] | None = None
    methods: list[Annotated[str, _one_of(*SpeculationMethod)]] | None = None
    adaptive: bool = False
    tree: TreeSection | None = None
    steps: StepsSection | None = None

    @model_validator(mode="after")
    def _steps_are_waited_for(self) -> SpeculationSection:
        if self.steps is not None and self.mode != "sync":
            raise ValueError(f"steps are for mode 'sync', and the mode is {self.mode!r}; remove one of the two")
        return self

    @model_validator(mode="after")
    def _tree_has_its_own_size(self) -> SpeculationSection:
        if self.tree is not None and self.adaptive:
            raise ValueError("adaptive is for chains, and tree sets its own size; remove one of the two")
        return self

    @model_validator(mode="after")
    def _tree_is_waited_for(self) -> SpeculationSection:
        if self.tree is not None and self.mode != "sync":
            raise ValueError(f"tree is for mode 'sync', and the mode is {self.mode!r}; remove one of the two")
        return self

    @model_validator(mode="after")
    def _fan_out_belongs_to_async(self) -> SpeculationSection:
        if "fan_out" in self.model_fields_set and self.mode != "async":
            raise ValueError(f"fan_out {self.fan_out} is for mode 'async'; set mode to it, or remove fan_out")
        return self

    @model_validator(mode="after")
    def _default_within_limit(self) -> SpeculationSection:
        if self.num_tokens > self.max_num_tokens:
            raise ValueError(
                f"num_tokens is {self.num_tokens}, more than max_num_tokens, {self.max_num_tokens}; "
                "lower it or raise the limit"
            )
        return self


class CacheSection(_Section):
    """The KV pool of the target: a budget, or a number of blocks. dtype int8 holds about twice the tokens of bfloat16
    in the same memory, and changes the law a little (docs/performance.md).
    """

    block_size: int = Field(default=16, ge=1, le=1024)
    memory_gib: float | None = Field(default=None, gt=0, strict=False)
    num_blocks: int | None = Field(default=None, ge=2)
    dtype: Annotated[str, _one_of("auto", "int8")] = "auto"

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


class _Scaled(_Section):
    """A deployment with a fixed number of replicas, or a moving one."""

    num_replicas: int | None
    autoscaling: AutoscalingSection | None = None

    @model_validator(mode="after")
    def _one_count(self) -> _Scaled:
        if self.num_replicas is not None and self.autoscaling is not None:
            raise ValueError("num_replicas and autoscaling contradict each other; keep one of them")
        return self


class PairSection(_Scaled):
    """How many draft-target pairs serve, and how many requests may wait in each before it says 429."""

    num_replicas: int | None = Field(default=None, ge=1)
    max_queued_requests: int = Field(default=256, ge=0)

    @property
    def max_replicas(self) -> int:
        """Replicas that must be placeable."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas or 1


class PrefillSection(_Scaled):
    """Replicas that read long prompts for the pairs; none of them means that each pair reads its own.

    Prompts with fewer than `min_remote_prefill_tokens` uncached tokens never go there; KV blocks come back every
    `chunk_tokens`, by `kv_transport`: through Ray's object store, or read by NIXL; auto is NIXL on GPUs where it is
    installed. Each replica has a KV pool of the size of a pair's, unless `memory_gib` says otherwise. Its engine thread
    gives way to other programs by `niceness`: left out, 10 on nodes without GPUs, where it shares cores with pairs.
    """

    num_replicas: int | None = Field(default=None, ge=0)
    min_remote_prefill_tokens: int = Field(default=512, ge=1)
    chunk_tokens: int = Field(default=512, ge=1)
    kv_transport: Annotated[str, _one_of("auto", "object_store", "nixl")] = "auto"
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    niceness: int | None = Field(default=None, ge=0, le=19)
    memory_gib: float | None = Field(default=None, gt=0, strict=False)

    @property
    def max_replicas(self) -> int:
        """Replicas that must be placeable."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas or 0


class RouterSection(_Section):
    """How the ingress chooses a pair: by predicted seconds to the first token with what each pair has cached
    (`prefix`) or as if no pair had anything (`load`), in turn, at random, or as Ray Serve does without us: the pair
    with fewer requests of two (`power_of_two`).

    `others_weight` is what the work a request brings counts for those behind it (docs/routing.md). The index has
    `index_timeout_ms` to answer; after that the request goes to the pair with the fewest requests.
    """

    policy: Annotated[str, _one_of("prefix", "load", "round_robin", "random", SERVES_OWN_POLICY)] = "prefix"
    others_weight: float = Field(default=1.5, ge=0, le=100, strict=False)
    index_timeout_ms: float = Field(default=50.0, gt=0, le=10_000, strict=False)


class LimitsSection(_Section):
    """What one client request may ask for, and how long an answer is waited for (`router.config.IngressLimits`)."""

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_choices: int = Field(default=128, ge=1)
    first_token_timeout_s: float = Field(default=600.0, gt=0, strict=False)
    inter_token_timeout_s: float = Field(default=30.0, gt=0, strict=False)
    migration_deadline_s: float = Field(default=60.0, gt=0, strict=False)
    max_migrations: int = Field(default=64, ge=0)


class IngressSection(_Section):
    """The faces. `api_keys_file` has one key per line; without it every client is served. `tool_format` is how the
    model writes tool calls; auto follows its chat template.
    """

    num_replicas: int = Field(default=1, ge=1)
    api_keys_file: str | None = None
    tool_format: Annotated[str, _one_of("auto", "hermes", "llama")] = "auto"
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

    @model_validator(mode="after")
    def _heads_have_their_target_whole(self) -> DeployConfig:
        if self.draft.kind in _HEAD_KINDS and self.target.tensor_parallel_size > 1:
            raise ValueError(
                f"draft.kind {self.draft.kind!r} computes on one device, and target.tensor_parallel_size is "
                f"{self.target.tensor_parallel_size}; set draft.kind to 'model', or the size to 1"
            )
        return self

    @model_validator(mode="after")
    def _draft_has_a_gpu(self) -> DeployConfig:
        num_ranks, gpu = self.target.tensor_parallel_size, self.draft.gpu
        if isinstance(gpu, int) and gpu >= num_ranks:
            raise ValueError(
                f"draft.gpu is {gpu}, and the target's ranks are 0 to {num_ranks - 1} "
                f"(target.tensor_parallel_size {num_ranks}); name one of them, 'own' or 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _methods_can_be_had(self) -> DeployConfig:
        possible = [str(method) for method in _possible_methods(self.draft.kind)]
        wanted = self.speculation.methods or []
        for method in (*wanted, *([self.speculation.method] if self.speculation.method else [])):
            if method not in possible:
                raise ValueError(
                    f"speculation names method {method!r}, which draft.kind {self.draft.kind!r} does not give; "
                    f"it gives {', '.join(possible)}"
                )
        if self.speculation.methods is not None and self.speculation.method not in (None, *wanted):
            raise ValueError(f"speculation.method {self.speculation.method!r} is not among speculation.methods; add it")
        return self

    @model_validator(mode="after")
    def _trees_need_a_draft_model(self) -> DeployConfig:
        if self.speculation.tree is not None and self.draft.kind not in _KINDS_WITH_LAWS:
            raise ValueError(
                f"speculation.tree needs a draft model or head, and draft.kind is {self.draft.kind!r}; "
                f"set draft.kind to {' or '.join(map(repr, _KINDS_WITH_LAWS))}, or remove the tree"
            )
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> DeployConfig:
        steps = self.speculation.steps
        if steps is not None and self.draft.kind != "model":
            raise ValueError(
                f"speculation.steps needs a draft model, and draft.kind is {self.draft.kind!r}; "
                "set draft.kind to 'model', or remove the steps"
            )
        if steps is not None and steps.max_step_tokens >= self.scheduler.max_tokens_per_step:
            raise ValueError(
                f"speculation.steps.max_step_tokens is {steps.max_step_tokens}, and no pass has room for more than "
                f"scheduler.max_tokens_per_step, {self.scheduler.max_tokens_per_step}; lower it or raise the limit"
            )
        return self

    @model_validator(mode="after")
    def _text_is_sync_and_chains(self) -> DeployConfig:
        is_async, has_tree = self.speculation.mode == "async", self.speculation.tree is not None
        if self.draft.vocabulary == DraftVocabulary.TEXT and (is_async or has_tree):
            wrong = "speculation.mode is 'async'" if is_async else "speculation.tree is set"
            raise ValueError(
                f"draft.vocabulary 'text' gives chains in mode 'sync' alone, and {wrong}; remove it, "
                "or set draft.vocabulary to 'intersection'"
            )
        return self

    @model_validator(mode="after")
    def _async_needs_a_draft_model(self) -> DeployConfig:
        if self.speculation.mode == "async" and self.draft.kind != "model":
            raise ValueError(
                f"speculation.mode 'async' needs a draft in its own process, and draft.kind is {self.draft.kind!r}; "
                "set draft.kind to 'model', or the mode to 'sync'"
            )
        return self

    @property
    def offered_methods(self) -> tuple[SpeculationMethod, ...]:
        """What a request may choose from, the default first; plain decoding is always among them."""
        possible = _possible_methods(self.draft.kind)
        default = SpeculationMethod(self.speculation.method or self.draft.kind)
        limit = possible if self.speculation.methods is None else self.speculation.methods
        others = (method for method in possible if method in limit and method is not default)
        return tuple(dict.fromkeys((default, *others, SpeculationMethod.NONE)))


def _possible_methods(draft_kind: str) -> tuple[SpeculationMethod, ...]:
    """The draft's own, alone and with suffixes, and those that need nothing but the text."""
    kind = SpeculationMethod(draft_kind)
    hybrid = (SpeculationMethod.HYBRID,) if draft_kind in _KINDS_WITH_LAWS else ()
    free = (SpeculationMethod.SUFFIX, SpeculationMethod.NGRAM, SpeculationMethod.NONE)
    return tuple(dict.fromkeys((kind, *hybrid, *free)))


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
