"""The expected speed-up of drafts: the engine's choice of lengths, with a roofline's times instead of measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.planning.model_shape import ModelShape
from cluster.planning.roofline import DeviceSpec, PassCost, pass_cost
from engine.accounting.length_allocation import allocate
from protos.errors import ConfigError

_PREFILL_CHUNK = 2_048


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica: models, devices, traffic, and each position's acceptance given acceptance of the earlier ones.

    `draft` is None if the drafts come from the text (suffix, n-gram) and cost nothing.
    """

    target: ModelShape
    draft: ModelShape | None
    device: DeviceSpec
    num_devices: int
    acceptance: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def context(self) -> int:
        """Tokens in the cache of a sequence, on average."""
        return self.prompt_tokens + self.output_tokens // 2

    def target_pass(self, num_streams: int, num_drafts: int = 0) -> PassCost:
        """Return the cost of a pass with `num_drafts` drafts in all and one row per stream."""
        rows = num_streams + num_drafts
        return pass_cost(self.target, self.device, self.num_devices, rows, num_streams, self.context)

    def draft_pass(self, num_streams: int) -> PassCost:
        """Return the cost of one draft token for all streams; the draft has one of the target's devices."""
        assert self.draft is not None
        return pass_cost(self.draft, self.device, 1, num_streams, num_streams, self.context)

    def draft_step_s(self, num_streams: int) -> float:
        """Return the seconds of one draft token for all streams, 0 for drafts from the text."""
        return self.draft_pass(num_streams).seconds if self.draft is not None else 0.0


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Drafts at one number of streams: drafts per stream, and tokens per second with and without them."""

    num_streams: int
    num_drafts: float
    tokens_per_pass: float
    tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def factor(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def best_speed_up(deployment: ReplicaPlan, num_streams: int) -> SpeedUp:
    """Return the choice of the adaptive engine at this load (`engine.accounting.length_allocation.allocate`)."""
    survival = np.cumprod(deployment.acceptance)
    max_drafts = num_streams * len(survival)
    row_seconds = np.array([deployment.target_pass(num_streams, drafts).seconds for drafts in range(max_drafts + 1)])
    acceptance = np.tile(survival, (num_streams, 1))
    best = allocate(acceptance, row_seconds, deployment.draft_step_s(num_streams), 0.0)
    lengths = np.asarray(best.lengths)
    tokens = 1.0 + float(sum(survival[: int(length)].sum() for length in lengths)) / num_streams
    return SpeedUp(num_streams, float(lengths.mean()), tokens, best.tokens_per_s, best.plain_tokens_per_s)


def replayed_speed_up(
    deployment: ReplicaPlan, num_streams: int, tokens_per_pass: float, drafts_per_pass: float, max_drafts: int
) -> float:
    """Return the speed-up of whole requests, from means per stream that include passes without drafts.

    Both ways prefill the prompts. A draft model makes `max_drafts` steps for every pass.
    """
    prompts_s = num_streams * prefill_seconds(deployment)
    drafted_s = deployment.target_pass(num_streams, round(num_streams * drafts_per_pass)).seconds
    drafted_s += max_drafts * deployment.draft_step_s(num_streams)
    plain_s = deployment.target_pass(num_streams).seconds * deployment.output_tokens
    return (prompts_s + plain_s) / (prompts_s + drafted_s * deployment.output_tokens / tokens_per_pass)


def prefill_seconds(deployment: ReplicaPlan) -> float:
    """Return the seconds to prefill one uncached prompt, in the target and in the draft."""
    total_s, start = 0.0, 0
    while start < deployment.prompt_tokens:
        rows = min(_PREFILL_CHUNK, deployment.prompt_tokens - start)
        context = start + rows // 2
        models = [(deployment.target, deployment.num_devices)]
        models += [(deployment.draft, 1)] if deployment.draft else []
        total_s += sum(
            pass_cost(shape, deployment.device, number, rows, 1, context).seconds for shape, number in models
        )
        start += rows
    return total_s


def acceptance_per_position(given: Sequence[float], max_drafts: int) -> tuple[float, ...]:
    """Return one chance per position: the last given chance holds for all later positions.

    Raises:
        ConfigError: a chance is outside [0, 1].
    """
    wrong = [chance for chance in given if not 0.0 <= chance <= 1.0]
    if wrong or not given:
        raise ConfigError(
            f"acceptance {wrong[0] if wrong else '(none)'} is not a probability; give numbers from 0 to 1"
        )
    return tuple(given[min(position, len(given) - 1)] for position in range(max_drafts))
