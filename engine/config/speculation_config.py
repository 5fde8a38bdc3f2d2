"""The number of drafts, their shape, and the rule that verifies them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.config.step_config import StepConfig
from protos.errors import ConfigError
from protos.messages import SpeculationMethod, VerifyMode

MAX_DRAFT_TOKENS = 64
MAX_TREE_NODES = 64


class DraftVocabulary(StrEnum):
    """The way from a draft model's tokens to the target's (`engine.proposer.vocab_mapping`)."""

    AUTO = "auto"  # by comparing the two tokenizers
    SAME = "same"  # one tokenizer: ids are ids
    INTERSECTION = "intersection"  # drafts are made of the tokens that both have
    TEXT = "text"  # the draft continues the text, which is encoded again


class TreeKind(StrEnum):
    """The shape of a tree: it follows the draft's probabilities or is the same in every pass."""

    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Drafts that branch while at most `max_batch` sequences decode: in larger batches every row of a pass costs.

    A tree has `num_nodes`. `parents` are a static tree's shape, as in `engine.draft.Draft`; without them it is the best
    one for the acceptance of `engine.proposer.growth.tree_shape`.

    Raises:
        ConfigError: the number of nodes is out of range, or `parents` are no shape of so many nodes.
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


def check_text_drafts(tree: TreeConfig | None, fan_out: int | None, reason: str = "draft.vocabulary is 'text'") -> None:
    """Raise ConfigError unless drafts are chains made on request, as all drafts that go through text are.

    Args:
        tree: the shape of drafts that branch; None for chains.
        fan_out: outcomes per position that are drafted ahead; None for none.
        reason: why drafts go through text.
    """
    if tree is None and fan_out is None:
        return
    conflict = "speculation.tree is set" if tree is not None else "speculation.mode is 'async'"
    raise ConfigError(
        f"{reason}, which gives chains in mode 'sync' alone, and {conflict}; remove it, "
        "or set draft.vocabulary to 'intersection'"
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The speculation of a deployment: by default, and at most for a request that asks.

    `num_tokens` is K, the drafts per pass, and `num_guess_tokens` that of suffixes and predictions, which cost nothing
    to make and end where they are not expected to go on; None: as many as a request may ask for. `methods` are those on
    offer, the default first; what is none of `SpeculationMethod` names one more draft model. When `adaptive`, each pass
    of each request gets its own K between 0 and `max_num_tokens` (or what the request asks for) and `num_tokens` is
    only the first one; a deployment with `num_tokens` 0 still drafts for those alone that ask.

    When adaptive, drafts do not make a pass longer than `target_itl_s`, and the method AUTO is one of the others by
    class of requests (`engine.proposer.adaptive.method_chooser`).

    With a `tree` drafts branch, and K is how deep they go. With `steps` a request may ask for approximate reasoning
    steps; without, nothing here is ever anything but exact.

    Raises:
        ConfigError: `max_num_tokens` is above `MAX_DRAFT_TOKENS`, or another length above `max_num_tokens`.
    """

    num_tokens: int = 4
    verify: VerifyMode = VerifyMode.COUPLED
    max_num_tokens: int = 16
    methods: tuple[str, ...] = (SpeculationMethod.MODEL, SpeculationMethod.NONE)
    tree: TreeConfig | None = None
    adaptive: bool = False
    steps: StepConfig | None = None
    num_guess_tokens: int | None = None
    target_itl_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"speculation.max_num_tokens is {self.max_num_tokens}; use 0 to {MAX_DRAFT_TOKENS}")
        for name, num_tokens in (("num_tokens", self.num_tokens), ("num_guess_tokens", self.num_guess_tokens or 0)):
            if not 0 <= num_tokens <= self.max_num_tokens:
                raise ConfigError(
                    f"speculation.{name} is {num_tokens}; it must be between 0 and speculation.max_num_tokens, "
                    f"{self.max_num_tokens}: lower it or raise the limit"
                )

    def without_drafts(self) -> SpeculationConfig:
        """Return this configuration for an engine without a proposer: K is 0 everywhere."""
        return replace(self, num_tokens=0, max_num_tokens=0, num_guess_tokens=None)

    @property
    def method(self) -> str:
        """The method of a request that names none."""
        return self.methods[0] if self.methods else SpeculationMethod.NONE

    @property
    def choices(self) -> tuple[str, ...]:
        """The methods among which AUTO chooses."""
        aside = (SpeculationMethod.AUTO, SpeculationMethod.NONE)
        return tuple(method for method in self.methods if method not in aside)

    @property
    def guess_limit(self) -> int:
        """K of drafts that cost nothing to make, for a request that does not say."""
        if self.num_tokens == 0:
            return 0
        return self.max_num_tokens if self.num_guess_tokens is None else self.num_guess_tokens

    @property
    def can_draft(self) -> bool:
        """True if any request can have drafts."""
        return self.max_num_tokens > 0 and any(method != SpeculationMethod.NONE for method in self.methods)
