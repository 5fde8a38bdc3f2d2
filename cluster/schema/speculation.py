"""How much is guessed, in which shape, when, and how it is verified."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from cluster.schema.section import Section, one_of
from engine.config import MAX_TREE_NODES, JudgeKind, StepConfig, TreeConfig, TreeKind
from protos.errors import ConfigError
from protos.messages import SpeculationMethod, VerifyMode


class TreeSection(Section):
    """Drafts that branch, in passes of at most `max_batch` sequences; `num_tokens` is then how deep they go.

    kind dynamic: the `num_nodes` likeliest nodes of each pass. static: the same shape in every pass, by `parents` (of
    each node the one before it, -1 for the committed tokens), or without them the best for `num_nodes`. Drafts drawn
    for `rejection` have the static shape of their size in either kind; `block` judges chains.
    """

    kind: Annotated[str, one_of(*TreeKind)] = "dynamic"
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


class StepsSection(Section):
    """Allows requests to ask for reasoning steps that are NOT exact (`speculation: {"mode": "approximate"}`).

    The draft writes a step, up to `step_end` or `max_step_tokens`; the target scores it from 0 to 9 in one pass; from
    `threshold` on it is committed as it is. judge rating: the digit the target expects to say behind `rating_prompt`.
    likelihood: how near the step comes to what the target finds likeliest. Steps are drafted between the two markers
    `think` (null: anywhere), at most `max_steps` per request.
    """

    threshold: float = Field(default=_STEPS.threshold, strict=False)
    judge: Annotated[str, one_of(*JudgeKind)] = _STEPS.judge
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


class SpeculationSection(Section):
    """K drafts per pass, by default and at most for a request that asks, how they are verified, who guesses, and when.

    num_guess_tokens is K of drafts that cost nothing to make and end where they are not expected to go on: suffixes,
    also in hybrid, and a client's prediction. Left out, it is max_num_tokens.

    When adaptive, every pass of every request gets its own K, from 0 to what the request may ask for, and num_tokens is
    the first one; otherwise K is num_tokens. Left out, it is for all drafts that are chains and waited for, unless
    num_guess_tokens sets the length of some.

    A request may choose among `methods`: left out, all that need no more than the deployment has. One that does not
    choose gets `method`: left out, the draft's kind.

    mode sync: a draft model drafts when the target has committed, and the target waits for it. async: it drafts while
    the target verifies, for the `fan_out` likeliest tokens at each position where the pass may end.

    steps: reasoning steps that are not exact, for requests that ask for them; left out, there are none.
    """

    num_tokens: int = Field(default=4, ge=0, le=64)
    max_num_tokens: int = Field(default=16, ge=0, le=64)
    num_guess_tokens: int | None = Field(default=None, ge=1, le=64)
    mode: Annotated[str, one_of("sync", "async")] = "sync"
    fan_out: int = Field(default=3, ge=1, le=16)
    verify: Annotated[str, one_of(*VerifyMode)] = "coupled"
    method: Annotated[str, one_of(*SpeculationMethod)] | None = None
    methods: list[Annotated[str, one_of(*SpeculationMethod)]] | None = None
    adaptive: bool | None = None
    tree: TreeSection | None = None
    steps: StepsSection | None = None

    @property
    def is_adaptive(self) -> bool:
        """`adaptive`, or what it is where it is left out."""
        if self.adaptive is not None:
            return self.adaptive
        return self.mode == "sync" and self.tree is None and self.num_guess_tokens is None

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
    def _guesses_have_their_own_length(self) -> SpeculationSection:
        if self.num_guess_tokens is not None and self.adaptive:
            raise ValueError("adaptive sets the length of all drafts; remove num_guess_tokens, or adaptive")
        return self

    @model_validator(mode="after")
    def _default_within_limit(self) -> SpeculationSection:
        for name, num_tokens in (("num_tokens", self.num_tokens), ("num_guess_tokens", self.num_guess_tokens or 0)):
            if num_tokens > self.max_num_tokens:
                raise ValueError(
                    f"{name} is {num_tokens}, more than max_num_tokens, {self.max_num_tokens}; "
                    "lower it or raise the limit"
                )
        return self
