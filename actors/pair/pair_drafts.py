"""The draft models of one pair that have their own processes, by the method that requests name."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from actors.pair.pair_draft import PairDraft
from protos.errors import RequestError
from protos.served_draft import DraftOrder, DraftReport, ShowDraft, StopCanary


class PairDrafts:
    """Passes each order to the draft that it names, or to the first draft, which is the deployment's own."""

    def __init__(self, drafts: Seq[PairDraft]) -> None:
        assert drafts, "a pair without drafts has no `PairDrafts`"
        self.by_method = {each.report.method: each for each in drafts}

    @property
    def first(self) -> PairDraft:
        """The deployment's own draft model, or the first draft model next to its head."""
        return next(iter(self.by_method.values()))

    @property
    def reports(self) -> tuple[DraftReport, ...]:
        """The running drafts, in order."""
        return tuple(each.report for each in self.by_method.values())

    async def carry_out(self, order: DraftOrder) -> tuple[DraftReport, ...]:
        """Carry out an order as `PairDraft.carry_out` does, and return the running drafts.

        Raises:
            RequestError: no draft has that name, or it cannot be replaced by the requested one.
            ConflictError: another order is running, for any draft.
            ServingError: the order failed; the old draft runs, or is starting.
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
                f"No draft model is named {method!r} here; choose from {', '.join(self.by_method)}.", param="method"
            )
        return self.by_method[method]
