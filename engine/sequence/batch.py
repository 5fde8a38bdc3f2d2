"""The plan of one step: the rows of each sequence, and drafts that are cut to their room.

A draft is cut to its planned length and computed only up to its first unknown id. Under a grammar it is cut at a
forbidden token, and extended for free while the grammar allows only one text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.batch.draft import NO_DRAFT, Draft, depths
from engine.batch.span import Span
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.sparse_distribution import one_hot
from engine.sequence.sequence import RequestTokens, Sequence, span_states
from protos.errors import RequestError
from protos.messages import GenerateRequest, VerifyMode


@dataclass(frozen=True, slots=True)
class UnscheduledQuery:
    """A sequence and the limits of its next draft, for a draft process or for the draft of a draft.

    `max_draft_tokens` is the greatest length of a chain and depth of a tree. `max_tree_nodes` is the greatest number of
    nodes; with 0 drafts must be chains. All tokens of the sequence are committed.
    """

    sequence: RequestTokens
    max_draft_tokens: int
    max_tree_nodes: int = 0


def check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    """Raise RequestError if a request names an id that the model does not have: its embedding must not get one."""
    sampling = request.sampling
    named_ids: dict[str, Seq[int]] = {
        "prompt": (*request.prompt_token_ids, *request.output_token_ids),
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "bad_words": [token_id for word in sampling.bad_words for token_id in word],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for param, token_ids in named_ids.items():
        count = num_known(token_ids, vocab_size)
        if count < len(token_ids):
            raise RequestError(
                f"{param} has token id {token_ids[count]}, but the model's are 0 to {vocab_size - 1}; "
                "use its tokenizer",
                param=param,
            )


def num_known(token_ids: Seq[int], vocab_size: int) -> int:
    """Count the leading ids within a vocabulary, [0, vocab_size)."""
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return len(token_ids)
    return next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size), len(token_ids))


class CheckedDraft(NamedTuple):
    """A draft with the number of its leading tokens in the vocabulary; the grammar forced the last `num_forced`.

    A draft ends with its first id outside the vocabulary. The model must not compute it, but a verifier that tests
    ratios must know of it: removing it would depend on the drawn token and bias the output.
    """

    draft: Draft
    num_valid: int
    num_forced: int = 0
    was_proposed: bool = False  # the proposer had a draft, even if it was cut to nothing
    has_unknown: bool = False  # the proposed draft had an id outside the vocabulary

    @property
    def computed(self) -> Draft:
        """The tokens that the model computes."""
        return self.draft.head(self.num_valid) if self.is_cut else self.draft

    @property
    def depth(self) -> int:
        """The most computed tokens that a verifier can accept."""
        return self.computed.depth if self.draft.parents else self.num_valid

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.draft.token_ids[: self.num_valid]

    @property
    def first_branch(self) -> tuple[int, ...]:
        """The computed tokens of a chain, or of a tree's first branch."""
        return self.computed.first_path().token_ids

    @property
    def shape(self) -> str:
        """The shape that the model computes: none, a chain, a block (a chain of one pass), a tree, or ahead.

        A chain or block is ahead if it was drafted before the last verdict.
        """
        if self.num_valid == 0:
            return "none"
        if self.draft.parents and self.num_valid > 1:
            return "tree"
        if self.draft.is_ahead:
            return "ahead"
        return "block" if self.draft.is_block else "chain"

    @property
    def is_cut(self) -> bool:
        return self.num_valid < len(self.draft.token_ids)


NOTHING = CheckedDraft(NO_DRAFT, 0)


def check_draft(draft: Draft, query: DraftQuery, vocab_size: int) -> CheckedDraft:
    """Cut a draft to the room of its query, and after its first id outside the target's vocabulary.

    A tree is cut to its first branch if the query has no room for a tree, or in block verification.
    """
    if draft.parents:
        draft = draft.head(_num_well_formed(draft, query.max_draft_tokens))
        can_branch = query.sequence.is_matched or query.sequence.verify is not VerifyMode.BLOCK
        draft = draft if can_branch and query.max_tree_nodes > 0 else draft.first_path()
    draft = draft.head(query.max_tree_nodes if draft.parents else query.max_draft_tokens)
    token_ids = draft.token_ids
    num_valid = num_known(token_ids, vocab_size)
    return CheckedDraft(draft.head(num_valid + 1), num_valid, 0, bool(token_ids), num_valid < len(token_ids))


def _num_well_formed(draft: Draft, max_depth: int) -> int:
    """Count the leading nodes that have an earlier parent and a valid depth; 0 if tokens and parents do not match."""
    if len(draft.parents) != len(draft.token_ids):
        return 0
    parents = draft.parents
    num_placed = next((i for i, parent in enumerate(parents) if not -1 <= parent < i), len(parents))
    by_depth = depths(parents[:num_placed])
    return next((i for i, depth in enumerate(by_depth) if depth > max_depth), num_placed)


def constrain(checked: CheckedDraft, max_tokens: int, matcher: GrammarMatcher) -> CheckedDraft:
    """Cut a draft at its first forbidden token, or append forced tokens, up to `max_tokens` in all.

    A forbidden token that was drawn from a distribution stays as the rejected end of the draft: removing it would
    depend on the draw and bias the output. Without a distribution the token is a function of the prefix, and so are the
    tokens that replace it. A tree is not changed: the verifier rejects its forbidden tokens.
    """
    if checked.draft.parents:
        return checked
    token_ids, distributions = checked.draft.token_ids, checked.draft.distributions
    num_allowed = matcher.num_allowed(checked.token_ids)
    if distributions and num_allowed < len(token_ids):
        num_kept = num_allowed + 1
        return checked._replace(draft=checked.draft.head(num_kept), num_valid=num_allowed)
    # Nothing was drawn after the kept tokens, so forced tokens may follow.
    kept_ids = token_ids[:num_allowed]
    forced_ids = matcher.forced_ids(kept_ids, max_tokens - num_allowed)
    drafted_ids = (*kept_ids, *forced_ids[: matcher.num_allowed((*kept_ids, *forced_ids)) - num_allowed])
    forced_distributions = tuple(one_hot(token_id) for token_id in drafted_ids[num_allowed:]) if distributions else ()
    drafted = replace(checked.draft, token_ids=drafted_ids, distributions=(*distributions, *forced_distributions))
    return checked._replace(draft=drafted, num_valid=len(drafted_ids), num_forced=len(drafted_ids) - num_allowed)


class ScheduledSequence(NamedTuple):
    """One sequence's rows of a step: `token_ids[start : start + num_tokens]`, then at most `max_draft_tokens` drafts.

    Rows that end before the last committed token are a prefill chunk. Otherwise the last committed token and every
    draft are sampled. The block table already has slots for all rows.

    If `max_tree_nodes` is not 0, the drafts may be a tree of at most so many nodes and at most `max_draft_tokens` deep.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_draft_tokens: int
    max_tree_nodes: int = 0

    @property
    def draft_start(self) -> int:
        """KV index of the first draft."""
        return self.start + self.num_tokens

    @property
    def max_draft_rows(self) -> int:
        """Rows and slots that the drafts may take."""
        return max(self.max_draft_tokens, self.max_tree_nodes)

    @property
    def is_sampled(self) -> bool:
        """True until the step is committed: then the sequence has grown past these rows."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_scored_rows(self) -> int:
        """Rows before the sampled ones that the prompt's log-probabilities need logits of."""
        if self.sequence.sampling.num_prompt_logprobs is None:
            return 0
        return self.num_tokens - self.is_sampled if self.sequence.is_scoring else 0

    def num_logits(self, num_drafts: int) -> int:
        """Count the rows, at the end, whose logits are computed; 0 for most prefill chunks."""
        return self.num_scored_rows + (num_drafts + 1 if self.is_sampled else 0)

    def span(self, draft_ids: Seq[int], parents: Seq[int] = ()) -> Span:
        """Return the model's input. `parents` make the drafts a tree."""
        sequence = self.sequence
        token_ids = sequence.token_ids[self.start : self.start + self.num_tokens]
        token_ids += draft_ids
        states = span_states(sequence.states, self.start, self.start + len(token_ids))
        return Span(token_ids, self.start, sequence.block_table, self.num_logits(len(draft_ids)), parents, states)


DraftQuery = ScheduledSequence | UnscheduledQuery  # the sequence that needs a draft, and the draft's limits


@dataclass(frozen=True, slots=True)
class Batch:
    """The scheduled sequences of one step, sampled ones first. Empty when there is nothing to compute.

    `sampled` are the sequences that emit tokens.
    """

    scheduled: tuple[ScheduledSequence, ...]
    sampled: tuple[ScheduledSequence, ...]

    def num_logits(self, num_drafts: Seq[int]) -> list[int]:
        """Count the logits rows of each scheduled sequence, in order. `num_drafts` has one count per sampled one."""
        padded = [*num_drafts, *([0] * (len(self.scheduled) - len(num_drafts)))]
        return [scheduled.num_logits(count) for scheduled, count in zip(self.scheduled, padded, strict=True)]

    def spans(self, drafts: Seq[Draft]) -> list[Span]:
        """Return the span of each scheduled sequence, in order. `drafts` has one draft per sampled one."""
        padded = [*drafts, *([NO_DRAFT] * (len(self.scheduled) - len(drafts)))]
        pairs = zip(self.scheduled, padded, strict=True)
        return [scheduled.span(draft.token_ids, draft.parents) for scheduled, draft in pairs]
