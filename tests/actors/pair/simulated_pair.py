"""A pair whose drafts have known speeds, and whose time passes where it is waited for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from actors.pair.pair_draft import PairDraft
from engine.accounting.goodput import GoodputStats
from protos.errors import DeadlineExceededError, UnavailableError
from protos.served_model import DraftReport

OLD = DraftReport("pair-1", "/old", "old", 10.0, is_deployed=True)


@dataclass
class SimulatedTrialPair:
    """A pair with `speeds[path]` tokens per second, with a little noise; time passes only in sleeps.

    `failing` holds the numbers of the starts that fail. The target restarts at `restart_at_s`.
    """

    speeds: dict[str, float]
    failing: frozenset[int] = frozenset()
    restart_at_s: float | None = None
    now_s: float = 0.0
    path: str = "/old"
    starts: list[str] = field(default_factory=list)
    sums: GoodputStats = field(default_factory=lambda: GoodputStats(1))
    noise: random.Random = field(default_factory=lambda: random.Random(5))

    async def check_draft(self, path: str) -> None: ...

    async def replace_draft(self, path: str, wait_s: float) -> str:
        await asyncio.sleep(0)
        self.starts.append(path)
        if len(self.starts) in self.failing:
            raise DeadlineExceededError(f"{path} is not up")
        self.path = path
        return path.strip("/")

    async def goodput(self) -> tuple[GoodputStats, ...]:
        if self.restart_at_s is not None and self.now_s >= self.restart_at_s:
            self.restart_at_s, self.sums = None, GoodputStats(1)
            raise UnavailableError("the target restarts")
        return (self.sums,)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now_s += seconds
        speed = self.speeds[self.path] * self.noise.gauss(1.0, 0.01)
        sums = self.sums
        self.sums = GoodputStats(1, sums.num_tokens + round(speed * seconds * 100), sums.seconds + seconds)

    def draft(self) -> PairDraft:
        return PairDraft(self, OLD, self.goodput, lambda: self.now_s, self.sleep)
