"""The configuration of a model: its files, its device, its kernels, and its draft head."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protos.errors import ConfigError


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
    """The recording of small passes: AUTO records them if the device and the model allow it.

    EAGER pads passes as AUTO does, but computes them call by call: for tests, and to find out if a fault comes from the
    recording or the computation.
    """

    AUTO = "auto"
    OFF = "off"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """The passes to record (`engine.model.cuda_graphs.graph_runner`).

    With `batches`, one graph is recorded per batch size and per entry of `row_counts` (rows per sequence). Without
    `batches`, graphs are recorded by total rows, in small steps, up to `max_batch` sequences with the most rows each.
    Without `row_counts` nothing is recorded. `load_engine` derives `row_counts` and the limits.

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
            raise ConfigError(f"GraphConfig.batches has {min(self.batches)}; a batch has at least 1 sequence")


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


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head and its folder or Hub id; `path` is None for heads made of the target's own weights (mtp, self).

    SELF drafts with the target's weights in another `quantization`, with its first `num_layers` layers, or both. MTP
    drafts with its first `num_layers` layers, or all.
    """

    kind: HeadKind
    path: str | None = None
    quantization: Quantization = Quantization.NONE
    num_layers: int | None = None
