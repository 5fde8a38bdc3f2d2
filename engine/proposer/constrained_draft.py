"""A draft under a grammar: cut at a forbidden token, and extended for free while the grammar allows only one text."""

from __future__ import annotations

from engine.batch.draft import Draft
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.sparse_distribution import one_hot
from engine.sequence.checked_draft import CheckedDraft


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
        kept = Draft(token_ids[:num_kept], distributions[:num_kept], source=checked.draft.source)
        return checked._replace(draft=kept, num_valid=num_allowed)
    # Nothing was drawn after the kept tokens, so forced tokens may follow.
    kept_ids = token_ids[:num_allowed]
    forced_ids = matcher.forced_ids(kept_ids, max_tokens - num_allowed)
    drafted_ids = (*kept_ids, *forced_ids[: matcher.num_allowed((*kept_ids, *forced_ids)) - num_allowed])
    forced_distributions = tuple(one_hot(token_id) for token_id in drafted_ids[num_allowed:]) if distributions else ()
    drafted = Draft(drafted_ids, (*distributions, *forced_distributions), source=checked.draft.source)
    return checked._replace(draft=drafted, num_valid=len(drafted_ids), num_forced=len(drafted_ids) - num_allowed)
