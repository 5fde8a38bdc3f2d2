"""The two models of a pair: the target, whose distribution is served, and the draft."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cluster.schema.section import EngineSection, Section, one_of
from engine.batch.draft import DraftSource
from engine.config import (
    AttentionKind,
    DraftVocabulary,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    ModelDtype,
    Quantization,
    SamplingSource,
)
from protos.messages import SpeculationMethod

MODEL_KINDS = tuple(method for method in SpeculationMethod if method.can_branch)  # a second model, and heads
NAME_PATTERN = "^[a-z][a-z0-9_]{0,31}$"  # no hyphen: it parts a method from a class of requests
_OWN_WEIGHTS = (SpeculationMethod.MTP, SpeculationMethod.SELF)
_KINDS_WITH_PATH = tuple(kind for kind in MODEL_KINDS if kind not in _OWN_WEIGHTS)
_SELF_KEYS = {"quantization", "num_layers"}
_KINDS = (*MODEL_KINDS, SpeculationMethod.NGRAM, SpeculationMethod.SUFFIX, SpeculationMethod.NONE)


class TargetSection(EngineSection):
    """The model whose distribution is served, and how it is computed.

    `path` is a local folder, a GGUF file or a Hub id. dtype auto follows the processor. quantization is of the linear
    layers' weights. attention auto is our own kernels where they run and torch elsewhere. deterministic: the same
    text has the same logits, bit for bit, with speculation on and off and in any batch. generation_config auto: what a
    request leaves out (temperature, top_k, top_p, min_p, repetition_penalty) is as the checkpoint's
    generation_config.json says; none: as in OpenAI's API.

    `tensor_parallel_size` processes share the sharded model, each on a GPU of its own in one NVLink group (without
    GPUs: all on the processor, which is for trying it out). num_threads is then of each process.

    On GPUs passes of up to as many sequences as `cuda_graph_batches` has, with one row each or with their drafts, are
    recorded at start and replayed; `cuda_graphs` off computes every pass anew. Where passes are recorded, the next one
    begins before the host has seen this one's tokens, if no sequence has drafts; `overlapped_passes` off waits every
    time.
    """

    path: str
    dtype: Annotated[ModelDtype, one_of(*ModelDtype)] = ModelDtype.AUTO
    quantization: Annotated[Quantization, one_of(*Quantization)] = Quantization.NONE
    attention: Annotated[AttentionKind, one_of(*AttentionKind)] = AttentionKind.AUTO
    deterministic: bool = False
    generation_config: Annotated[SamplingSource, one_of(*SamplingSource)] = SamplingSource.AUTO
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    cuda_graphs: Annotated[GraphKind, one_of(GraphKind.AUTO, GraphKind.OFF)] = GraphKind.AUTO
    cuda_graph_batches: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    overlapped_passes: Annotated[str, one_of("auto", "off")] = "auto"
    num_threads: int | None = Field(default=None, ge=1, le=1024)  # None: from the cores the pair owns

    def conflicts(self) -> Iterator[str]:
        if self.cuda_graph_batches is not None and self.cuda_graphs is GraphKind.OFF:
            yield "cuda_graph_batches are what is recorded, and cuda_graphs is 'off'; remove one of the two"

    def to_engine(self) -> ModelConfig:
        """Return the model as the section has it: `path` is not looked for yet."""
        engine_options = self.model_dump(exclude={"cuda_graphs", "cuda_graph_batches", "overlapped_passes"})
        return ModelConfig(**engine_options, graphs=self.graphs)

    @property
    def graphs(self) -> GraphConfig:
        """The passes to be recorded."""
        if self.cuda_graph_batches is None:
            return GraphConfig(self.cuda_graphs)
        return GraphConfig(self.cuda_graphs, tuple(self.cuda_graph_batches))


class DraftProcess(StrEnum):
    """The process in which a draft model computes."""

    AUTO = "auto"  # the target's where they share a GPU, else its own
    OWN = "own"
    TARGET = "target"


class DraftSection(Section):
    """The source of drafts.

    `kind` model: a second model. medusa, eagle3, mtp: a head on the target's hidden states, in the
    target's process, dtype, device and threads; the first two have files of their own, at `path`, and mtp is a layer
    among the target's own weights. ngram: the text itself. suffix: the text and earlier ones under the same cache_salt.
    none: plain decoding. self: the target's own weights in its process, over its own KV: in `quantization` (int4 where
    neither is set), or the first `num_layers` of its layers, or both.

    `vocabulary` is how a model's tokens become the target's: same (one tokenizer), intersection (drafts are made of the
    tokens that both have), text (it continues the text, which is encoded again), or auto, which compares the two.

    `process` is a draft model's: own, target (the two take turns on the target's GPU or threads), or auto, which is
    target where they share a GPU, and own elsewhere.

    `gpu` is the GPU of a draft model on GPU nodes: `own` is one beside the target's, a number that of this rank of the
    target (0 where it has but one), auto an own one where every pair can have it, else the target's last.
    """

    kind: Annotated[SpeculationMethod, one_of(*_KINDS)] = SpeculationMethod.MODEL
    path: str | None = None
    vocabulary: Annotated[DraftVocabulary, one_of(*DraftVocabulary)] = DraftVocabulary.AUTO
    dtype: Annotated[ModelDtype, one_of(*ModelDtype)] = ModelDtype.AUTO
    quantization: Annotated[Quantization, one_of(*Quantization)] = Quantization.NONE
    num_layers: int | None = Field(default=None, ge=1)
    attention: Annotated[AttentionKind, one_of(*AttentionKind)] = AttentionKind.AUTO
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    process: Annotated[DraftProcess, one_of(*DraftProcess)] = DraftProcess.AUTO
    gpu: Literal["auto", "own"] | Annotated[int, Field(ge=0)] = "auto"

    @property
    def head(self) -> HeadConfig | None:
        """The head that drafts in the target's process, or None."""
        if self.kind is SpeculationMethod.SELF:
            is_left_open = not _SELF_KEYS & self.model_fields_set
            quantization = Quantization.INT4 if is_left_open else self.quantization
            return HeadConfig(HeadKind.SELF, None, quantization, self.num_layers)
        return HeadConfig(HeadKind(self.kind), self.path) if str(self.kind) in tuple(HeadKind) else None

    def conflicts(self) -> Iterator[str]:
        if self.kind in _KINDS_WITH_PATH and self.path is None:
            yield f"kind '{self.kind}' needs path, the draft's folder or Hub id"
        if self.kind not in _KINDS_WITH_PATH and self.path is not None:
            yield (
                f"kind '{self.kind}' loads no model of its own; remove path {self.path!r} or set kind to "
                f"{quoted(_KINDS_WITH_PATH)}"
            )
        is_self = self.kind is SpeculationMethod.SELF
        own = self.model_fields_set - {"kind", "path"} - (_SELF_KEYS if is_self else set())
        if self.head is not None and own:
            yield f"kind '{self.kind}' computes as its target does; remove {', '.join(sorted(own))}"
        if self.num_layers is not None and not is_self:
            yield f"num_layers is for kind 'self', and the kind is '{self.kind}'; remove one of the two"
        for name in ("vocabulary", "process"):
            if self.kind is not SpeculationMethod.MODEL and name in self.model_fields_set:
                yield f"{name} is for kind 'model', and the kind is '{self.kind}'; remove one of the two"
        if self.process is DraftProcess.TARGET and self.gpu == "own":
            yield "process 'target' has no GPU beside the target's, and gpu is 'own'; remove one of the two"
        if self.process is DraftProcess.TARGET and self.num_threads is not None:
            yield "process 'target' computes on the target's threads; remove num_threads, or set process to 'own'"


class NamedDraftSection(Section):
    """One more draft model beside `draft`, for requests whose `speculation.method` is its name.

    It has a process, threads and a GPU as `draft` has them, or those that a draft model would have there.
    """

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    path: str
    vocabulary: Annotated[DraftVocabulary, one_of(*DraftVocabulary)] = DraftVocabulary.AUTO
    dtype: Annotated[ModelDtype, one_of(*ModelDtype)] = ModelDtype.AUTO
    quantization: Annotated[Quantization, one_of(*Quantization)] = Quantization.NONE
    attention: Annotated[AttentionKind, one_of(*AttentionKind)] = AttentionKind.AUTO

    def conflicts(self) -> Iterator[str]:
        if self.name in (*SpeculationMethod, *DraftSource):
            yield f"name {self.name!r} is that of another source of drafts; choose one of your own"


def quoted(kinds: tuple[SpeculationMethod, ...]) -> str:
    """Name alternatives in a message."""
    return " or ".join(f"'{kind}'" for kind in kinds)
