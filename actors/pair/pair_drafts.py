"""The draft models of one pair that have processes, each under the method that requests name it by."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from actors.pair.pair_draft import PairDraft
from protos.errors import RequestError
from protos.served_draft import DraftOrder, DraftReport, ShowDraft, StopCanary


class PairDrafts:
    """Passes orders on to the draft that they name: left open, it is the first, the deployment's own."""

    def __init__(self, drafts: Seq[PairDraft]) -> None:
        assert drafts, "a pair without any has none of these"
        self.by_method = {each.report.method: each for each in drafts}

    @property
    def first(self) -> PairDraft:
        """The deployment's own draft model, or the first of those beside its head."""
        return next(iter(self.by_method.values()))

    @property
    def reports(self) -> tuple[DraftReport, ...]:
        """The drafts that run, the first one first."""
        return tuple(each.report for each in self.by_method.values())

    async def carry_out(self, order: DraftOrder) -> tuple[DraftReport, ...]:
        """Carry out an order as `PairDraft.carry_out` does, and return the drafts that run then.

        Raises:
            RequestError: there is no draft of that name, or it cannot be exchanged for the one that is asked for.
            ConflictError: another order is under way, for whichever draft.
            ServingError: the order failed; the draft from before it runs, or starts.
        """
        match order:
            case ShowDraft():
                pass
            case StopCanary():
                for each in self.by_method.values():
                    await each.carry_out(order)
            case _:
                await self._named(order.method).carry_out(order)
        return self.reports

    def _named(self, method: str) -> PairDraft:
        if not method:
            return self.first
        if method not in self.by_method:
            raise RequestError(
                f"No draft model is called {method!r} here; there is {', '.join(self.by_method)}.", param="method"
            )
        return self.by_method[method]
