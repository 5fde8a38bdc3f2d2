"""The step times of a served pair, read from its /metrics."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from bench.contenders.contender import ChannelTimes
from engine.accounting.step_times import StepTimes

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """All that a pair has spent since it started."""

    steps: StepTimes
    channel: ChannelTimes


def read_served_times(root_url: str) -> ServedTimes:
    """Read `root_url`/metrics; with several pairs, their sums."""
    with urllib.request.urlopen(f"{root_url}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")  # the parser's, of counters
            key = f"{name} {sample.labels.get('part', '')}".strip()
            sums[key] = sums.get(key, 0.0) + sample.value
    parts = {
        f"{part}_s": sums.get(f"outrider_step_seconds {part}", 0.0)
        for part in ("receive", "schedule", "draft", "forward", "sample", "commit")
    }
    steps = StepTimes(**parts, num_steps=int(sums.get("outrider_num_steps", 0)))
    drafting_s = sums.get("outrider_draft_drafting_seconds", 0.0)
    return ServedTimes(steps, ChannelTimes(drafting_s, sums.get("outrider_draft_channel_seconds", 0.0)))
