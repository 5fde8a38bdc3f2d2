"""The length, shape, time and verification of drafts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cluster.schema.models import NAME_PATTERN
from cluster.schema.section import EngineSection, Section, one_of
from engine.config import ScorerKind, SpeculationConfig, StepConfig, TreeConfig
from protos.messages import SpeculationMethod, VerifyMode


class DraftMode(StrEnum):
    """When a draft model drafts."""

    SYNC = "sync"  # after the target has committed; the target waits
    ASYNC = "async"  # while the target verifies


class TreeSection(EngineSection):
    """Draft trees of up to `num_nodes` nodes: the likeliest ones of each pass.

    With `adaptive` each pass has chains or trees, of the size that pays; otherwise all drafts have `num_nodes` nodes
    and a depth of `num_tokens`. For `rejection` a tree has the best shape of its size, and with `mode` async drafts are
    chains. A sampled request with `block` gets chains.
    """

    num_nodes: int = TreeConfig().num_nodes

    def to_engine(self) -> TreeConfig:
        """Return the engine's trees."""
        return TreeConfig(num_nodes=self.num_nodes)


def _as_method(value: Any) -> SpeculationMethod | str:
    """Return the method with this name, or the name itself, for a member of `drafts`."""
    if not isinstance(value, str) or re.fullmatch(NAME_PATTERN, value) is None:
        raise ValueError(f"{value!r} is no method; name one, or one of drafts")
    return SpeculationMethod(value) if value in tuple(SpeculationMethod) else value


_Method = Annotated[SpeculationMethod | str, BeforeValidator(_as_method)]


class StepsSection(EngineSection):
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
    the target verifies, for the three likeliest tokens at each position where the pass may end.

    `steps` allows requests to ask for reasoning steps that are not exact. By default they are refused.
    """

    num_tokens: int = 4
    max_num_tokens: int = 16
    mode: Annotated[DraftMode, one_of(*DraftMode)] = DraftMode.SYNC
    verify: Annotated[VerifyMode, one_of(*VerifyMode)] = VerifyMode.COUPLED
    method: _Method | None = None
    adaptive: bool = True
    target_itl_ms: float | None = Field(default=None, gt=0, strict=False)
    tree: TreeSection | None = None
    steps: StepsSection | None = None

    def to_engine(self, methods: tuple[str, ...]) -> SpeculationConfig:
        """Return the speculation of an engine that offers `methods`, the default first."""
        return SpeculationConfig(
            self.num_tokens,
            self.verify,
            self.max_num_tokens,
            methods,
            None if self.tree is None else self.tree.to_engine(),
            self.adaptive,
            None if self.steps is None else self.steps.to_engine(),
            None if self.target_itl_ms is None else self.target_itl_ms / 1000,
        )

    def conflicts(self) -> Iterator[str]:
        if self.steps is not None and self.mode is not DraftMode.SYNC:
            yield f"steps are for mode 'sync', and the mode is '{self.mode}'; remove one of the two"
        if self.tree is not None and self.verify is VerifyMode.BLOCK:
            yield "verify 'block' is for chains, and there is a tree; set verify to 'coupled' or remove one of the two"
        is_planned = self.adaptive and self.num_tokens > 0
        if self.method is SpeculationMethod.AUTO and not is_planned:
            yield "method 'auto' needs the measurements of adaptive lengths; set adaptive to true, or name a method"
        if self.target_itl_ms is not None and not is_planned:
            yield f"target_itl_ms {self.target_itl_ms:g} bounds adaptive lengths; set adaptive to true, or remove it"
