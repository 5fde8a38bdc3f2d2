"""Latency figures from arrivals, and the deployments that are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bench.contenders.contender import ContenderRun
from bench.served.latency import Case, Latency

SECOND = [0.1 + 0.01 * index for index in range(101)]  # a first token at 100 ms, then gaps of 10 ms


def test_gaps_are_those_between_the_chunks_of_each_stream() -> None:
    run = ContenderRun([[0] * 101, [0] * 101], 2.0, arrivals=[SECOND, [5.0 + each for each in SECOND]])
    latency = Latency.of(run)
    assert (latency.p50, latency.longest) == (pytest.approx(10.0), pytest.approx(10.0))
    assert (latency.first_p50, latency.first_max) == (pytest.approx(2600.0), pytest.approx(5100.0))
    assert latency.tokens_per_second == 101


@pytest.mark.parametrize(("pause_s", "is_even"), [(0.06, True), (0.09, False)])
def test_one_gap_of_more_than_eight_medians_is_uneven(pause_s: float, is_even: bool) -> None:
    late = [each + pause_s * (index >= 200) for index, each in enumerate(0.01 * step for step in range(400))]
    assert Latency.of(ContenderRun([[0] * 400], 4.0, arrivals=[late])).is_even is is_even


def test_the_target_has_the_default_threads_unless_a_number_is_asked_for() -> None:
    default, fixed = (
        yaml.safe_load(Path("deploy.yaml").read_text())["applications"][0]["args"] for _ in ("default", "3")
    )
    Case("demo", "default").change(default)
    Case("demo", "3").change(fixed)
    assert default["target"]["path"].endswith("models/demo/target"), "not the padded fixture"
    assert "num_threads" not in default["target"]
    assert fixed["target"]["num_threads"] == 3
