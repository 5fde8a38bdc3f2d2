"""From the methods a deployment offers to the proposers behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from engine.proposer import Proposer
from engine.proposer.dispatch.hybrid_proposer import HybridProposer
from engine.proposer.dispatch.method_dispatcher import MethodDispatcher, Ranking
from engine.proposer.text_match.ngram import NgramProposer
from engine.proposer.text_match.prediction import PredictionMatcher
from engine.proposer.text_match.suffix import SuffixProposer
from protos.messages import SpeculationMethod


def proposer_of(
    methods: Collection[str],
    model: Proposer | None = None,
    model_method: SpeculationMethod = SpeculationMethod.MODEL,
    others: Mapping[str, Proposer] = MappingProxyType({}),
) -> Proposer | None:
    """One proposer for all of `methods`; None where they come down to plain decoding.

    `model`, a draft model or a head, drafts for `model_method`, with n-grams in its place while it has nothing. A
    request's prediction comes before all of them. `others` are more draft models, by the names that are their methods.
    """
    suffix, ngram = SuffixProposer(), NgramProposer()
    rankings: dict[str, Ranking] = {
        SpeculationMethod.SUFFIX: (suffix,),
        SpeculationMethod.NGRAM: (ngram,),
        **{name: (draft, ngram) for name, draft in others.items()},
    }
    if model is not None:
        rankings[model_method] = (model, ngram)
        rankings[SpeculationMethod.HYBRID] = (HybridProposer(suffix, model), ngram)
    offered = {method: ranking for method, ranking in rankings.items() if method in methods}
    return HybridProposer(PredictionMatcher(), MethodDispatcher(offered)) if offered else None
