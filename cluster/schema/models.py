"""The models of a pair: the target, whose distribution is served, the draft, and how it drafts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cluster.schema import Section, one_of
from engine.batch.draft import PREDICTION
from engine.config import (
    MAX_TREE_NODES,
    AttentionKind,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    ModelDtype,
    Quantization,
    SamplingSource,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
)
from protos.messages import SpeculationMethod, VerifyMode

MODEL_KINDS = tuple(method for method in SpeculationMethod if method.can_branch)  # a second model, and heads
NAME_PATTERN = "[a-z][a-z0-9_]{0,31}"  # no hyphen: it parts a method from a class of requests
_OWN_WEIGHTS = (SpeculationMethod.MTP, SpeculationMethod.SELF)
_KINDS_WITH_PATH = tuple(kind for kind in MODEL_KINDS if kind not in _OWN_WEIGHTS)
_OWN_KEYS = {SpeculationMethod.SELF: {"quantization", "num_layers"}, SpeculationMethod.MTP: {"num_layers"}} | {
    SpeculationMethod(kind): {"quantization"} for kind in HeadKind if kind.has_own_layers
}
DRAFT_KINDS = tuple(m for m in SpeculationMethod if m not in (SpeculationMethod.HYBRID, SpeculationMethod.AUTO))


class TargetSection(Section):
    """The model whose distribution is served, and how it is computed.

    `path` is a local folder, a GGUF file or a Hub id. `dtype` auto follows the processor. `quantization` applies to the
    weights of linear layers. `attention` auto uses our own kernels if they run here, else torch. With `deterministic`
    the same text has the same logits, bit for bit, with speculation on and off and in any batch. `generation_config`
    auto takes a request's missing settings (temperature, top_k, top_p, min_p, repetition_penalty) from the checkpoint's
    generation_config.json; `none` takes OpenAI's defaults.

    `tensor_parallel_size` processes share the sharded model, each on its own GPU, all in one NVLink group. Without GPUs
    all run on the processor, for a trial. `num_threads` then counts the threads of each process.

    On GPUs, small passes are recorded at start and replayed; `cuda_graphs` off records nothing, and a sharded target
    needs on. If no sequence has drafts, a recorded pass begins before the host has the tokens of the previous one.
    """

    path: str
    dtype: Annotated[ModelDtype, one_of(*ModelDtype)] = ModelDtype.AUTO
    quantization: Annotated[Quantization, one_of(*Quantization)] = Quantization.NONE
    attention: Annotated[AttentionKind, one_of(*AttentionKind)] = AttentionKind.AUTO
    deterministic: bool = False
    generation_config: Annotated[SamplingSource, one_of(*SamplingSource)] = SamplingSource.AUTO
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    cuda_graphs: Annotated[GraphKind, one_of(GraphKind.AUTO, GraphKind.ON, GraphKind.OFF)] = GraphKind.AUTO
    num_threads: int | None = Field(default=None, ge=1, le=1024)  # None follows the cores that the pair owns

    def to_engine(self) -> ModelConfig:
        """Return the configured model; `path` is not checked yet."""
        return ModelConfig(**self.model_dump(exclude={"cuda_graphs"}), graphs=GraphConfig(self.cuda_graphs))


class DraftSection(Section):
    """The source of drafts.

    `kind` model is a second model. medusa, eagle3, peagle, dflash, dspark and mtp are heads on the target's hidden
    states, in the target's process, dtype, device and threads; they have their own files at `path`, and mtp without it
    is all such layers of the target's checkpoint, or the first `num_layers`. `quantization` rounds the layers of
    eagle3, peagle, dflash and dspark; none is the target's. ngram drafts from the text itself, suffix from the text and
    earlier ones under the same cache_salt. self is the target's own weights in its process, over its own KV: in
    `quantization` (int4 if neither key is set), only the first `num_layers` layers, or both. python is a class of yours
    (`code: module:Class`), in its own process. none is plain decoding.

    A draft model may have another tokenizer (docs/speculation.md).

    `gpu` is the GPU of a draft model on GPU nodes: `own` is an additional one, a number is the GPU of that rank of the
    target (0 for the only one), and auto is an additional one if every pair can have it, else the target's last. On the
    only GPU of a target the draft is in the target's process and they take turns; otherwise it has its own process.
    """

    kind: Annotated[SpeculationMethod, one_of(*DRAFT_KINDS)] = SpeculationMethod.MODEL
    path: str | None = None
    dtype: Annotated[ModelDtype, one_of(*ModelDtype)] = ModelDtype.AUTO
    quantization: Annotated[Quantization, one_of(*Quantization)] = Quantization.NONE
    num_layers: int | None = Field(default=None, ge=1)
    code: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    gpu: Literal["auto", "own"] | Annotated[int, Field(ge=0)] = "auto"

    @property
    def head(self) -> HeadConfig | None:
        """The head that drafts in the target's process, or None."""
        if self.kind is SpeculationMethod.SELF:
            is_left_open = not _OWN_KEYS[self.kind] & self.model_fields_set
            quantization = Quantization.INT4 if is_left_open else self.quantization
            return HeadConfig(HeadKind.SELF, None, quantization, self.num_layers)
        is_head = str(self.kind) in tuple(HeadKind)
        return HeadConfig(HeadKind(self.kind), self.path, self.quantization, self.num_layers) if is_head else None

    def conflicts(self) -> Iterator[str]:
        if self.kind in _KINDS_WITH_PATH and self.path is None:
            yield f"kind '{self.kind}' needs path, the draft's folder or Hub id"
        if self.kind not in (*_KINDS_WITH_PATH, SpeculationMethod.MTP) and self.path is not None:
            yield (
                f"kind '{self.kind}' loads no model of its own; remove path {self.path!r} or set kind to "
                f"{quoted(_KINDS_WITH_PATH)}"
            )
        own = self.model_fields_set - {"kind", "path"} - _OWN_KEYS.get(self.kind, set())
        if self.head is not None and own:
            yield f"kind '{self.kind}' computes as its target does; remove {', '.join(sorted(own))}"
        if self.kind is SpeculationMethod.PYTHON and self.code is None:
            yield "kind 'python' needs code, a class as 'module:Class'"
        if self.kind is not SpeculationMethod.PYTHON and self.code is not None and self.head is None:
            yield f"code is for kind 'python', and the kind is '{self.kind}'; remove one of the two"
        if self.kind is SpeculationMethod.MTP and self.path is not None and self.num_layers is not None:
            yield f"num_layers {self.num_layers} is for the target's own layers; remove it or path {self.path!r}"
        if self.num_layers is not None and self.head is None:
            kinds = quoted(tuple(kind for kind, keys in _OWN_KEYS.items() if "num_layers" in keys))
            yield f"num_layers is for the kinds {kinds}, and the kind is '{self.kind}'; remove one of the two"


def _checked_drafts(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError("a list of name and path is now a mapping; write drafts: {code: /models/draft-code}")
    for name in value if isinstance(value, dict) else ():
        if not isinstance(name, str) or re.fullmatch(NAME_PATTERN, name) is None:
            raise ValueError(f"the name {name!r} is not one of up to 32 letters a-z, digits and _; choose another")
        if name in (*SpeculationMethod, PREDICTION):
            raise ValueError(f"the name {name!r} names another source of drafts; choose another")
    return value


NamedDrafts = Annotated[dict[str, str], BeforeValidator(_checked_drafts)]  # name: path


def quoted(kinds: tuple[SpeculationMethod, ...]) -> str:
    """Name alternatives in a message."""
    return " or ".join(f"'{kind}'" for kind in kinds)


class TreeSection(Section):
    """Draft trees of up to `num_nodes` nodes: the likeliest ones of each pass.

    With `adaptive` each pass has chains or trees, of the size that pays; otherwise all drafts have `num_nodes` nodes
    and a depth of `num_tokens`. For `rejection` a tree has the best shape of its size, and with `mode` async drafts are
    chains. A sampled request with `block` gets chains.
    """

    num_nodes: int = Field(default=8, ge=1, le=MAX_TREE_NODES)


def _as_method(value: Any) -> SpeculationMethod | str:
    """Return the method with this name, or the name itself, for a member of `drafts`."""
    if not isinstance(value, str) or re.fullmatch(NAME_PATTERN, value) is None:
        raise ValueError(f"{value!r} is no method; name one, or one of drafts")
    return SpeculationMethod(value) if value in tuple(SpeculationMethod) else value


_Method = Annotated[SpeculationMethod | str, BeforeValidator(_as_method)]


class StepsSection(Section):
    """Permission for requests to ask for reasoning steps that are NOT exact (`speculation: {"mode": "approximate"}`).

    The draft writes a step, up to a blank line or 64 tokens. The target scores it from 0 to 9 in one pass, and commits
    it unchanged if the score is at least 7, or the request's `threshold`. `judge` rating is the digit that the target
    expects after a question; likelihood compares the step's tokens with the target's likeliest ones. Steps are drafted
    between the marks of the model's reasoning (anywhere if it has none), at most 256 per request.
    """

    judge: Annotated[ScorerKind, one_of(*ScorerKind)] = ScorerKind.RATING

    def to_engine(self) -> StepConfig:
        """Return the steps that the engine allows."""
        return StepConfig(judge=self.judge)


class SpeculationSection(Section):
    """The number K of draft tokens per pass, their verification, their source, and when they are made.

    `num_tokens` is the default K, and `max_num_tokens` the largest K that a request may ask for. Drafts that cost
    nothing to make (suffixes, also in hybrid, and a client's prediction) have up to `max_num_tokens`; they end early
    where they are unlikely to continue.

    With `adaptive`, every pass of every request gets its own K, from 0 to the request's limit, and its own shape if
    there is a `tree`; `num_tokens` is the first K. Otherwise K is `num_tokens`.

    A request may choose any method that the deployment can run, one of `drafts` by its name. A request without a choice
    gets `method`, by default the draft's kind. `auto` takes the method that was measured to be the fastest for greedy
    or for sampled requests; one request in 16 gets another method, to keep the measurements current. It needs adaptive
    lengths.

    `target_itl_ms` bounds the time of a pass under adaptive lengths: drafts never make a pass longer than this.

    In `mode` sync a draft model drafts after the target has committed, and the target waits. In async it drafts while
    the target verifies, for the three likeliest tokens at each position where the pass may end; with `adaptive`, only
    where that is measured to be faster. Heads draft from states of the target's pass, so never ahead of it.

    `steps` allows requests to ask for reasoning steps that are not exact. By default they are refused.
    """

    num_tokens: int = 4
    max_num_tokens: int = 16
    mode: Annotated[Literal["sync", "async"], one_of("sync", "async")] = "sync"
    verify: Annotated[VerifyMode, one_of(*VerifyMode)] = VerifyMode.COUPLED
    method: _Method | None = None
    adaptive: bool = True
    target_itl_ms: float | None = Field(default=None, gt=0, strict=False)
    tree: TreeSection | None = None
    steps: StepsSection | None = None

    @property
    def is_ahead(self) -> bool:
        """True if a draft model drafts while the target verifies, and not in turn with it."""
        return self.mode == "async"

    def with_methods(self, methods: tuple[str, ...]) -> SpeculationConfig:
        """Return the speculation of an engine that offers `methods`, the default first."""
        return SpeculationConfig(
            self.num_tokens,
            self.verify,
            self.max_num_tokens,
            methods,
            0 if self.tree is None else self.tree.num_nodes,
            self.adaptive,
            None if self.steps is None else self.steps.to_engine(),
            None if self.target_itl_ms is None else self.target_itl_ms / 1000,
            self.is_ahead,
        )

    def conflicts(self) -> Iterator[str]:
        if self.tree is not None and self.verify is VerifyMode.BLOCK:
            yield "verify 'block' is for chains, and there is a tree; set verify to 'coupled' or remove one of the two"
        is_planned = self.adaptive and self.num_tokens > 0
        if self.method is SpeculationMethod.AUTO and not is_planned:
            yield "method 'auto' needs the measurements of adaptive lengths; set adaptive to true, or name a method"
        if self.target_itl_ms is not None and not is_planned:
            yield f"target_itl_ms {self.target_itl_ms:g} bounds adaptive lengths; set adaptive to true, or remove it"
