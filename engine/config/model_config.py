"""A model that an engine computes: its files, its device, its kernels, and a draft head beside it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protos.errors import ConfigError


class ModelDtype(StrEnum):
    """The numbers of a computation; AUTO is bfloat16 where the processor multiplies in it, float32 elsewhere."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    """The storage of the weights of a model's linear layers (`engine.model.linear.quantized_linear`)."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class AttentionKind(StrEnum):
    """The attention (`engine.attention.backend`); AUTO is TRITON or NATIVE where they can run, TORCH elsewhere."""

    AUTO = "auto"
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


class SamplingSource(StrEnum):
    """The defaults of what a request leaves out: the checkpoint's advice, or those of OpenAI's API."""

    AUTO = "auto"
    NONE = "none"


class GraphKind(StrEnum):
    """The recording of small passes: AUTO where the device and the model allow it.

    EAGER pads them as AUTO does and computes them call by call: for tests, and to tell a faulty recording from a faulty
    computation.
    """

    AUTO = "auto"
    OFF = "off"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """The passes to be recorded (`engine.model.cuda_graphs.graph_runner`).

    They are those of each of `batches` with each of `row_counts` per sequence; without `batches`, of any rows in all up
    to `max_batch` sequences with the most rows, by small steps. `EngineCore.from_config` fills in what follows from its
    limits; without `row_counts` nothing is recorded.

    Raises:
        ConfigError: a batch has less than 1 sequence.
    """

    kind: GraphKind = GraphKind.AUTO
    batches: tuple[int, ...] = ()
    max_batch: int = 256
    row_counts: tuple[int, ...] = ()
    max_rows: int = 2048
    has_trees: bool = False

    def __post_init__(self) -> None:
        if any(batch < 1 for batch in self.batches):
            raise ConfigError(f"target.cuda_graph_batches has {min(self.batches)}; a batch has at least 1 sequence")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The place of a model and the way it is computed.

    `path` is a local folder or a Hub id. `num_threads` is the torch thread count of the process; None leaves torch's
    choice. `deterministic` makes the bits of a token's logits depend on the text before it alone
    (`engine.model.determinism`). The model is sharded over `tensor_parallel_size` processes, each on a device of its
    own (`engine.model.runner.tensor_parallel_runner`).

    Raises:
        ConfigError: a sharded model would be quantised or deterministic.
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
    """Drafters in the target's process that read what it has computed: its hidden states, or (SELF) its KV."""

    MEDUSA = "medusa"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    SELF = "self"

    @property
    def keeps_kv(self) -> bool:
        """True if it has KV of its own, which replicas that compute blocks for others must compute too."""
        return self in (HeadKind.EAGLE3, HeadKind.MTP)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head and its folder or Hub id; `path` is None for those made of the target's own weights (mtp, self).

    Of kind SELF the target's weights draft in another `quantization`, or the first `num_layers` of its layers, or both.
    """

    kind: HeadKind
    path: str | None = None
    quantization: Quantization = Quantization.NONE
    num_layers: int | None = None
