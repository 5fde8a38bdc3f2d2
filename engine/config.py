"""What an engine is built from: frozen, checked once, and told apart by role."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.approximate.config import StepConfig
from protos.errors import ConfigError
from protos.messages import SpeculationMethod, VerifyMode

MAX_TREE_NODES = 64


class DraftVocabulary(StrEnum):
    """How a draft model's tokens become the target's (`engine.translation`); auto compares the two tokenizers."""

    AUTO = "auto"
    SAME = "same"  # one tokenizer: ids are ids
    INTERSECTION = "intersection"  # drafts are made of the tokens that both have
    TEXT = "text"  # the draft continues the text, which is encoded again


class GraphKind(StrEnum):
    """Whether small passes are recorded and replayed: AUTO where the device and the model allow it. EAGER pads them as
    AUTO does and computes them call by call: for tests, and to tell a faulty recording from a faulty computation.
    """

    AUTO = "auto"
    OFF = "off"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """The passes to be recorded (`engine.graphed_passes`): each of `batches` with each of `row_counts` per sequence.

    `EngineCore.from_config` fills in what follows from its limits; without `row_counts` nothing is recorded.
    """

    kind: GraphKind = GraphKind.AUTO
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    row_counts: tuple[int, ...] = ()
    max_rows: int = 2048
    has_trees: bool = False

    def __post_init__(self) -> None:
        if any(batch < 1 for batch in self.batches):
            raise ConfigError(f"target.cuda_graph_batches has {min(self.batches)}; a batch has at least 1 sequence")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Where a model is and how it is computed.

    `path` is a local folder or a Hub id. `dtype` is auto, bfloat16, float16 or float32; auto means bfloat16 where the
    processor computes in it, float32 elsewhere. `quantization` is none, int8 or int4 (`engine.quantized_linear`).
    `num_threads` is the torch thread count of the process; None leaves torch's choice. `attention` is auto, torch,
    native or triton (`engine.attention_backend`); auto means our own kernels where they run. `deterministic` makes the
    bits of a token's logits depend on the text before it alone (`engine.determinism`). `tensor_parallel_size` processes
    divide the model among them, each on a device of its own (`engine.leading_runner`). `generation_config` auto:
    requests that do not say otherwise are sampled as the checkpoint advises; none: as OpenAI's API does
    (`engine.generation_defaults`).
    """

    path: str
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    num_threads: int | None = None
    attention: str = "auto"
    deterministic: bool = False
    tensor_parallel_size: int = 1
    generation_config: str = "auto"
    graphs: GraphConfig = GraphConfig()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool: P tokens per block and either a number of blocks or a budget of bytes for all layers together.

    `dtype` is auto, as the model computes; int8 on processors or fp8 on GPUs, about half of bfloat16's bytes
    (`engine.kv_kind`).
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = 1 << 30
    enable_prefix_caching: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "int8", "fp8"):
            raise ConfigError(f"cache.dtype is {self.dtype!r}; it must be auto, int8 (processors) or fp8 (GPUs)")
        if self.block_size < 1:
            raise ConfigError(f"cache.block_size is {self.block_size}; it must be at least 1")
        if self.num_blocks is None and self.memory_bytes is None:
            raise ConfigError("cache has neither num_blocks nor memory_gib; set one of them")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"cache.num_blocks is {self.num_blocks}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence. `max_model_len` None means the model's own number of positions."""

    max_num_sequences: int = 64
    max_tokens_per_step: int = 2048
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ConfigError(f"scheduler.max_num_sequences is {self.max_num_sequences}; it must be at least 1")
        if self.max_tokens_per_step < 1:
            raise ConfigError(f"scheduler.max_tokens_per_step is {self.max_tokens_per_step}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"scheduler.max_model_len is {self.max_model_len}; it must be at least 2, prompt and output"
            )


class HeadKind(StrEnum):
    """Drafters that read the target's hidden states, in the target's process."""

    MEDUSA = "medusa"
    EAGLE3 = "eagle3"
    MTP = "mtp"

    @property
    def keeps_kv(self) -> bool:
        """Whether it has KV of the whole text, which whoever computes blocks for others must then compute too."""
        return self is not HeadKind.MEDUSA


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head and its folder or Hub id; `path` is None for a head that is among the target's own weights (mtp)."""

    kind: HeadKind
    path: str | None = None


class TreeKind(StrEnum):
    """Whether a tree's shape follows the draft's probabilities or is the same in every pass."""

    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Drafts that branch while at most `max_batch` sequences decode: in larger batches every row of a pass costs.

    A tree has `num_nodes`. `parents` are a static tree's shape, as in `engine.draft.Draft`; without them it is the best
    one for the acceptance of `engine.proposer.tree_shape`.
    """

    kind: TreeKind = TreeKind.DYNAMIC
    num_nodes: int = 8
    max_batch: int = 4
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_TREE_NODES:
            raise ConfigError(f"speculation.tree.num_nodes is {self.num_nodes}; use 1 to {MAX_TREE_NODES}")
        if self.parents and self.kind is not TreeKind.STATIC:
            raise ConfigError("speculation.tree.parents are the shape of a static tree; set kind to 'static'")
        if self.parents and len(self.parents) != self.num_nodes:
            raise ConfigError(
                f"speculation.tree.parents are {len(self.parents)} and num_nodes is {self.num_nodes}; give one for each"
            )
        wrong = next((node for node, parent in enumerate(self.parents) if not -1 <= parent < node), None)
        if wrong is not None:
            raise ConfigError(
                f"speculation.tree.parents has {self.parents[wrong]} for node {wrong}; a parent comes before its "
                "children, and -1 stands for the committed tokens"
            )

    def num_nodes_for(self, num_sequences: int, verify: VerifyMode) -> int:
        """Nodes of each sequence's tree where so many decode; 0 is a chain. Block verification judges chains."""
        return self.num_nodes if num_sequences <= self.max_batch and verify is not VerifyMode.BLOCK else 0


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How a deployment speculates: by default, and at most for a request that asks.

    `num_tokens` is K, the drafts per pass, and `num_guess_tokens` that of suffixes and predictions, which cost nothing
    to make and end where they are not expected to go on; None: as many as a request may ask for. `methods` are those on
    offer, the default first. When `adaptive`, each pass of each request gets its own K between 0 and `max_num_tokens`
    (or what the request asks for) and `num_tokens` is only the first one; a deployment with `num_tokens` 0 still drafts
    for those alone that ask.

    With a `tree` drafts branch, and K is how deep they go. With `steps` a request may ask for approximate reasoning
    steps; without, nothing here is ever anything but exact.
    """

    num_tokens: int = 4
    verify: VerifyMode = VerifyMode.COUPLED
    max_num_tokens: int = 16
    methods: tuple[SpeculationMethod, ...] = (SpeculationMethod.MODEL, SpeculationMethod.NONE)
    tree: TreeConfig | None = None
    adaptive: bool = False
    steps: StepConfig | None = None
    num_guess_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, num_tokens in (("num_tokens", self.num_tokens), ("num_guess_tokens", self.num_guess_tokens or 0)):
            if not 0 <= num_tokens <= self.max_num_tokens:
                raise ConfigError(
                    f"speculation.{name} is {num_tokens}; it must be between 0 and "
                    f"speculation.max_num_tokens, {self.max_num_tokens}"
                )

    @property
    def method(self) -> SpeculationMethod:
        """The method of a request that names none."""
        return self.methods[0] if self.methods else SpeculationMethod.NONE

    @property
    def guess_limit(self) -> int:
        """K of drafts that cost nothing to make, for a request that does not say."""
        if self.num_tokens == 0:
            return 0
        return self.max_num_tokens if self.num_guess_tokens is None else self.num_guess_tokens

    @property
    def can_draft(self) -> bool:
        """Whether any request can have drafts."""
        return self.max_num_tokens > 0 and any(method is not SpeculationMethod.NONE for method in self.methods)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `EngineCore` needs to know."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    head: HeadConfig | None = None  # who drafts from the target's hidden states, in the place of a draft of its own
    min_remote_prefill_tokens: int = 512  # shorter prompts are read here, whatever the prefill replicas offer
    overlap: bool = True  # where passes are recorded, the next begins before the host has seen this one's tokens
