from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.batch.span import Span
from engine.model.cuda_graphs.draft_steps import DraftSteps


@pytest.fixture
def num_begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps in each recorded run."""
    begun: list[int] = []
    begin = DraftSteps.begin

    def counted(steps: DraftSteps, spans: Seq[Span], *others: object) -> bool:
        begun.append(len(spans[0].token_ids))
        return begin(steps, spans, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(DraftSteps, "begin", counted)
    return begun
