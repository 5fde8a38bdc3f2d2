"""The load on a server, and the figures of it."""

from __future__ import annotations

import math

import pytest

from cluster.cli.__main__ import main
from cluster.cli.commands.bench import Timing, due_times, quantile


def test_arrivals_have_the_rate_and_repeat_with_their_seed():
    times = due_times(2000, rate=5.0, seed=1)
    assert times == due_times(2000, rate=5.0, seed=1) != due_times(2000, rate=5.0, seed=2)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)


def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed():
    values = [float(value) for value in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([3.0], 0.5) == 3
    assert math.isnan(quantile([], 0.5))


def test_a_request_is_good_within_both_limits_from_the_time_it_was_due():
    assert Timing(due_s=10, first_s=11, last_s=12, num_tokens=11).is_within(ttft_s=1.0, itl_s=0.1)
    assert not Timing(due_s=9.9, first_s=11, last_s=12, num_tokens=11).is_within(ttft_s=1.0, itl_s=0.1)
    assert not Timing(due_s=10, first_s=11, last_s=12.2, num_tokens=11).is_within(ttft_s=1.0, itl_s=0.1)
    assert not Timing(due_s=10, error="refused").is_within(ttft_s=1.0, itl_s=0.1)


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_a_server_that_is_not_there_is_named(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "no server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err
