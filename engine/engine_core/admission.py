"""Turns requests into sequences, or refuses them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.accounting.draft_planning import DraftPlanning
from engine.accounting.request_limits import check_steps
from engine.engine_core.speculation import Speculation
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.vocabulary import Vocabulary
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest


class Admission:
    """Checks requests, and gives each its draft rule and its grammar.

    Args:
        vocabulary: the target's token ids.
        grammars: the compiler of grammars.
        speculation: the limits of drafts.
        planning: chooses each request's draft rule.
        clock: returns seconds; requests time out on it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammars: GrammarCompiler,
        speculation: Speculation,
        planning: DraftPlanning,
        clock: Callable[[], float],
    ) -> None:
        self.vocabulary = vocabulary
        self._grammars = grammars
        self._speculation = speculation
        self._planning = planning
        self._clock = clock

    def prepare(self, request: GenerateRequest) -> Future[Any] | None:
        """Start compiling the request's grammar; see `EngineCore.prepare`."""
        return self._grammars.prepare(request)

    def sequence(self, request: GenerateRequest, arrival_s: float | None) -> Sequence:
        """Return the sequence of a request that arrived at `arrival_s`, or now.

        Raises:
            RequestError: its token ids, its drafts or its grammar are not usable here.
        """
        self.vocabulary.check(request)
        check_steps(request, self._speculation.steps is not None, self._speculation.config)
        rule = self._planning.rule(request)
        arrival_s = self._clock() if arrival_s is None else arrival_s
        return Sequence(request, rule, arrival_s, self._grammars.matcher(request))
