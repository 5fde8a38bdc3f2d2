"""A draft model in the target's process: no socket, and no second context on a shared GPU."""

from __future__ import annotations

from actors.draft_loader import load_draft
from actors.settings import PairSettings
from actors.shell_messages import DraftChannelStats
from engine.proposer.dispatch.guarded_proposer import GuardedProposer
from engine.proposer.draft_model.loader import Drafter


class InProcessDraft(GuardedProposer):
    """The draft model of a pair without a `DraftActor`, with the interface of `ChannelProposer`."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.proposer)
        self._drafter = drafter

    @classmethod
    def load(cls, settings: PairSettings) -> InProcessDraft:
        """Load the draft.

        Raises:
            ConfigError: the model cannot be loaded, or does not fit the target.
        """
        return cls(load_draft(settings))

    @property
    def stats(self) -> DraftChannelStats:
        """Whether it drafts; its time is part of the engine's. May be read from any thread."""
        return DraftChannelStats(is_connected=self.is_on, num_connections=1, translated=self._drafter.proposer.counts)

    def flush(self) -> None:
        """Do nothing, since no message is queued."""
