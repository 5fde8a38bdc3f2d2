"""The configuration of an engine: frozen dataclasses. `cluster.schema` bounds their numbers; they check the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from protos.errors import ConfigError
from protos.messages import SpeculationMethod, VerifyMode


class ModelDtype(StrEnum):
    """The dtype of the computation; AUTO is bfloat16 if the processor has bfloat16 products, and float32 otherwise."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    """The quantization of a model's linear layers (`engine.model.linear.quantized_linear`)."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class AttentionKind(StrEnum):
    """The attention backend (`engine.attention.backend`); AUTO is TRITON or NATIVE if it can run, else TORCH."""

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


class SamplingSource(StrEnum):
    """The source of sampling defaults: AUTO takes them from the checkpoint, NONE from OpenAI's API."""

    AUTO = "auto"
    NONE = "none"


class GraphKind(StrEnum):
    """The recording of small passes: ON records them if the device and the model allow it, AUTO only without ranks.

    No GPUs have replayed the sums of a sharded model yet.
    EAGER pads passes as AUTO does, but computes them call by call: for tests, and to find out if a fault comes from the
    recording or the computation.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """The passes to record (`engine.model.cuda_graphs.graph_runner`).

    With `batches`, one graph is recorded per batch size and per entry of `row_counts` (rows per sequence). Without
    `batches`, graphs are recorded by total rows, in small steps, up to `max_batch` sequences with the most rows each.
    Without `row_counts` nothing is recorded. `load_engine` derives `row_counts` and the limits. The steps of a draft
    model that draws ids below `draft_ids_end` are recorded too; 0 for a target.
    """

    kind: GraphKind = GraphKind.AUTO
    batches: tuple[int, ...] = ()
    max_batch: int = 256
    row_counts: tuple[int, ...] = ()
    max_rows: int = 2048
    has_trees: bool = False
    draft_ids_end: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The location of a model, and how it is computed.

    `path` is a local folder or a Hub id. `num_threads` is torch's number of threads; None keeps torch's default. With
    `deterministic`, the bits of a token's logits depend only on the text before it (`engine.model.determinism`). The
    model is sharded over `tensor_parallel_size` processes with one device each
    (`engine.model.runner.tensor_parallel_runner`). `chat_template` is the text of a template in place of the model's
    own: its end of a turn ends a text.

    Raises:
        ConfigError: a sharded model is quantised or deterministic.
    """

    path: str
    dtype: ModelDtype = ModelDtype.AUTO
    device: str = "auto"
    quantization: Quantization = Quantization.NONE
    num_threads: int | None = None
    attention: AttentionKind = AttentionKind.AUTO
    deterministic: bool = False
    tensor_parallel_size: int = 1
    generation_config: SamplingSource = SamplingSource.AUTO
    chat_template: str | None = None
    graphs: GraphConfig = GraphConfig()

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        if size > 1 and self.quantization != Quantization.NONE:
            raise ConfigError(
                f"target.quantization is '{self.quantization}' and target.tensor_parallel_size is {size}; "
                "quantised weights are not sharded: set one of them to 'none' or 1"
            )
        if size > 1 and self.deterministic:
            raise ConfigError(
                f"target.deterministic is true and target.tensor_parallel_size is {size}; sums between ranks have no "
                "fixed order: set deterministic to false, or the size to 1"
            )


class HeadKind(StrEnum):
    """Drafters in the target's process. They use the target's hidden states, or (SELF) its KV."""

    MEDUSA = "medusa"
    EAGLE3 = "eagle3"
    PEAGLE = "peagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MTP = "mtp"
    SELF = "self"

    @property
    def keeps_kv(self) -> bool:
        """True if the head has its own KV; prefill replicas must then compute it too."""
        return self not in (HeadKind.MEDUSA, HeadKind.SELF)

    @property
    def has_own_layers(self) -> bool:
        """True if the head's files have layers, whose weights may have fewer bits than the target's."""
        return self in (HeadKind.EAGLE3, HeadKind.PEAGLE, HeadKind.DFLASH, HeadKind.DSPARK)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head and its folder or Hub id; `path` is None for heads made of the target's own weights (self, mostly mtp).

    SELF drafts with the target's weights in another `quantization`, with its first `num_layers` layers, or both. MTP
    drafts with its first `num_layers` layers, or all. EAGLE3, PEAGLE, DFLASH and DSPARK round their own weights to
    `quantization`; NONE is the target's.
    """

    kind: HeadKind
    path: str | None = None
    quantization: Quantization = Quantization.NONE
    num_layers: int | None = None


DEFAULT_RATING_PROMPT = (
    "\n\nOn a scale from 0 to 9, how correct and useful is the last reasoning step above? Answer with one digit: "
)


class ScorerKind(StrEnum):
    """The source of a step's score, 0 to 9 (`engine.approximate.reasoning_sequence`)."""

    RATING = "rating"  # a digit that the target answers to a prompt
    LIKELIHOOD = "likelihood"  # the likelihood of the step's tokens


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The boundaries of reasoning steps, their greatest length, and the score that accepts one.

    A step ends at a blank line, or after `max_step_tokens`. Steps are drafted between the two markers `think`, which
    the prompt may contain; without markers, anywhere in the output. At most `max_steps` steps of a request are drafted.
    `threshold` is the default of requests.
    """

    threshold: float = 7.0
    judge: ScorerKind = ScorerKind.RATING
    rating_prompt: str = DEFAULT_RATING_PROMPT
    think: tuple[str, str] | None = None
    max_step_tokens: int = 64
    max_steps: int = 256


MAX_DRAFT_TOKENS = 64
MAX_TREE_NODES = 64
MASK_KEYS = ("pard_token", "ptd_token_id")  # in the configuration of a draft model that drafts in one pass
# In a target's configuration: the number of layers that predict further tokens.
MTP_KEYS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """A deployment's speculation: the defaults, and the limits for requests that choose their own.

    `num_tokens` is K, the drafts per pass. Suffixes and predictions, which cost nothing to make and end where they are
    not expected to continue, have up to `max_num_tokens`. `methods` lists the methods on
    offer, the default first; a name outside `SpeculationMethod` is a further draft model. A deployment with
    `num_tokens` 0 drafts only for requests that ask.

    With `tree_nodes`, drafts are trees of so many nodes and of depth K unless `adaptive`.

    With `adaptive`, each pass of each request gets its own shape: none, a chain of up to `max_num_tokens` (or the
    request's limit), or a tree of up to `tree_nodes`; `num_tokens` is only the first K. Drafts then keep a pass
    within `target_itl_s`, and the method AUTO chooses another method for each class of requests
    (`engine.accounting.request_limits`).

    With `steps`, a request may ask for approximate reasoning steps; without
    them everything is exact.

    With `can_draft_ahead`, draft models may work while the target verifies.

    Raises:
        ConfigError: `max_num_tokens` is above `MAX_DRAFT_TOKENS`, or `num_tokens` above `max_num_tokens`.
    """

    num_tokens: int = 4
    verify: VerifyMode = VerifyMode.COUPLED
    max_num_tokens: int = 16
    methods: tuple[str, ...] = (SpeculationMethod.MODEL, SpeculationMethod.NONE)
    tree_nodes: int = 0
    adaptive: bool = False
    steps: StepConfig | None = None
    target_itl_s: float | None = None
    can_draft_ahead: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"speculation.max_num_tokens is {self.max_num_tokens}; use 0 to {MAX_DRAFT_TOKENS}")
        if not 0 <= self.num_tokens <= self.max_num_tokens:
            raise ConfigError(
                f"speculation.num_tokens is {self.num_tokens}; it must be between 0 and speculation.max_num_tokens, "
                f"{self.max_num_tokens}: lower it or raise the limit"
            )

    def without_drafts(self) -> SpeculationConfig:
        """Return this configuration with K = 0 everywhere, for an engine without a proposer."""
        return replace(self, num_tokens=0, max_num_tokens=0)

    @property
    def method(self) -> str:
        """The method of a request that names none."""
        return self.methods[0] if self.methods else SpeculationMethod.NONE

    @property
    def choices(self) -> tuple[str, ...]:
        """The methods that AUTO chooses from."""
        aside = (SpeculationMethod.AUTO, SpeculationMethod.NONE)
        return tuple(method for method in self.methods if method not in aside)

    @property
    def free_draft_limit(self) -> int:
        """The default K of drafts that cost nothing to make."""
        return self.max_num_tokens if self.num_tokens > 0 else 0

    @property
    def can_draft(self) -> bool:
        """True if any request can have drafts."""
        return self.max_num_tokens > 0 and any(method != SpeculationMethod.NONE for method in self.methods)


GIB = 1 << 30
MAX_LOG_BYTES = GIB  # of logged positions: 2.7 million; a training reads the latest million


class KVDtype(StrEnum):
    """The dtype of cached keys and values (`engine.kv_cache.pool`); INT8 and FP8 take half of bfloat16's bytes."""

    AUTO = "auto"  # the model's own dtype
    INT8 = "int8"  # on processors
    FP8 = "fp8"  # on GPUs


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool: P tokens per block, and a number of blocks or a budget of bytes for all layers together.

    On a GPU `gpu_memory_utilization`, if given, replaces `memory_bytes`: the pool gets what weights and activations
    leave of this share of the GPU's memory (`engine.model.gpu_memory`). With `counts_own_use` the share covers this
    process alone, and memory used by other processes does not count.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = 1 << 30
    dtype: KVDtype = KVDtype.AUTO
    gpu_memory_utilization: float | None = None
    counts_own_use: bool = False
    num_states: int = 256  # of recurrent layers, within the budget; the engine sets it from its limits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence.

    While sequences decode, a chunk of a prompt takes at most as long as `max_stall_passes` passes without prompts; with
    None, only `max_tokens_per_step` limits it. With `max_model_len` None, the limit is the model's number of positions.
    """

    max_num_sequences: int = 64
    max_tokens_per_step: int = 2048
    max_stall_passes: float | None = 1.5
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an `EngineCore`.

    Raises:
        ConfigError: a sharded target drafts for itself.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    head: HeadConfig | None = None  # drafts in the target's process, instead of a draft model
    min_remote_prefill_tokens: int = 512  # shorter prompts are always prefilled locally
    log: str | None = None  # folder of the target's likeliest tokens, for requests that allow logging

    def __post_init__(self) -> None:
        if self.head is not None and self.head.kind is HeadKind.SELF and self.model.tensor_parallel_size > 1:
            raise ConfigError(
                f"draft.kind is 'self' and target.tensor_parallel_size is {self.model.tensor_parallel_size}; the "
                "target's weights draft on one device: set draft.kind to a model or a head, or the size to 1"
            )
