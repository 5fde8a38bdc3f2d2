"""The proposers of a deployment's methods."""

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
    """Return one proposer for all of `methods`; None if they only allow plain decoding.

    `model`, a draft model or a head, drafts for `model_method`; n-grams replace it while it has no draft. A request's
    prediction takes precedence. `others` are further draft models, by the names of their methods.
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
