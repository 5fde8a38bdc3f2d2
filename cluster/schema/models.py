"""The two models of a pair: whose law is served, and who guesses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.schema.section import Section, one_of
from engine.config import DraftVocabulary, GraphConfig, GraphKind, HeadKind

HEAD_KINDS = tuple(map(str, HeadKind))
_KINDS_WITH_PATH = ("model", *(str(kind) for kind in HeadKind if kind is not HeadKind.MTP))
KINDS_WITH_LAWS = ("model", *HEAD_KINDS)  # they say more than one text, and so can branch


class TargetSection(Section):
    """The model whose law is served. `path` is a local folder or a Hub id; dtype auto follows the processor;
    quantization is of the linear layers' weights; attention auto is our Triton kernel on GPUs and torch elsewhere.
    deterministic: the same text has the same logits, bit for bit, with speculation on and off and in any batch.
    generation_config auto: what a request leaves out (temperature, top_k, top_p, min_p, repetition_penalty) is as the
    checkpoint's generation_config.json says; none: as in OpenAI's API.

    `tensor_parallel_size` processes divide the model among them, each on a GPU of its own in one NVLink group (without
    GPUs: all on the processor, which is for trying it out). num_threads is then of each process.

    On GPUs passes of up to so many sequences as `cuda_graph_batches` has, with one row each or with their drafts, are
    recorded at start and replayed; `cuda_graphs` off computes every pass anew. Where passes are recorded, the next one
    begins before the host has seen this one's tokens, if nobody has drafts; `overlapped_passes` off waits every time.
    """

    path: str
    dtype: Annotated[str, one_of("auto", "bfloat16", "float16", "float32")] = "auto"
    quantization: Annotated[str, one_of("none", "int8", "int4")] = "none"
    attention: Annotated[str, one_of("auto", "torch", "native", "triton")] = "auto"
    deterministic: bool = False
    generation_config: Annotated[str, one_of("auto", "none")] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    cuda_graphs: Annotated[str, one_of("auto", "off")] = "auto"
    cuda_graph_batches: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    overlapped_passes: Annotated[str, one_of("auto", "off")] = "auto"
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


class DraftSection(Section):
    """Who guesses: a second model in its own process, a head on the target's hidden states in the target's process,
    n-grams of the text itself, suffixes of it and of earlier ones under the same cache_salt, or nobody.

    medusa and eagle3: heads with files of their own, at `path`. mtp: the layer for it among the target's own weights.
    Heads compute in the target's dtype, on its device and threads.

    `vocabulary` is how a model's tokens become the target's: same (one tokenizer), intersection (drafts are made of the
    tokens that both have), text (it continues the text, which is encoded again), or auto, which compares the two.

    `gpu` is where a draft model runs on GPU nodes: `own` is a GPU beside the target's, a number that of this rank of
    the target (0 where it has but one), auto an own one where every pair can have it, else the target's last.
    """

    kind: Annotated[str, one_of("model", "medusa", "eagle3", "mtp", "ngram", "suffix", "none")] = "model"
    path: str | None = None
    vocabulary: Annotated[str, one_of(*DraftVocabulary)] = "auto"
    dtype: Annotated[str, one_of("auto", "bfloat16", "float16", "float32")] = "auto"
    quantization: Annotated[str, one_of("none", "int8", "int4")] = "none"
    attention: Annotated[str, one_of("auto", "torch", "native", "triton")] = "auto"
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
        if self.kind in HEAD_KINDS and own:
            raise ValueError(f"kind {self.kind!r} computes as its target does; remove {', '.join(sorted(own))}")
        if self.kind != "model" and "vocabulary" in self.model_fields_set:
            raise ValueError(f"vocabulary is for kind 'model', and the kind is {self.kind!r}; remove one of the two")
        return self
