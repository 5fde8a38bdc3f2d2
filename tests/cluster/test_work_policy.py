"""The number of replicas follows their work, and the limits of deploy.yaml reach Serve."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.schema.replicas import AutoscalingSection
from cluster.work_policy import WorkPolicy

REPLICAS = ["a", "b", "c"]


def context(num_requests: float = 0.0, **metrics: dict[str, float]) -> AutoscalingContext:
    known: Any = dict.fromkeys(
        ("deployment_id", "app_name", "total_queued_requests", "raw_metrics", "config", "last_scale_up_time")
    )
    return AutoscalingContext(
        **known,
        deployment_name="Pair",
        current_num_replicas=3,
        target_num_replicas=3,
        running_replicas=REPLICAS,
        total_num_requests=num_requests,
        aggregated_metrics=metrics,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_down_time=None,
        current_time=0.0,
    )


def wanted(policy: WorkPolicy, **given: Any) -> float:
    return policy(context(**given))[0]


def test_queued_prompts_and_slow_tokens_count_by_the_worse_of_the_two():
    policy = WorkPolicy(ttft_s=2.0, itl_s=0.1)
    queues, tokens = {"a": 4.0, "b": 0.0}, {"a": 0.1, "b": 0.05}
    assert wanted(policy, queued_prefill_s=queues, token_s=tokens) == pytest.approx(2.0 + 0.5)


def test_a_limit_that_is_not_set_asks_for_nothing():
    assert wanted(WorkPolicy(itl_s=0.1), queued_prefill_s={"a": 100.0}) == 0.0
    assert wanted(WorkPolicy(ttft_s=1.0), token_s={"a": 100.0}) == 0.0


def test_one_replica_stays_while_there_are_requests():
    policy = WorkPolicy(ttft_s=1.0)
    assert wanted(policy, num_requests=1.0) == 1.0
    assert wanted(policy, num_requests=0.0) == 0.0


def test_a_replica_that_has_not_reported_counts_as_idle():
    assert wanted(WorkPolicy(ttft_s=1.0), queued_prefill_s={"gone": 9.0}) == 0.0


def test_serve_takes_the_policy_with_its_limits():
    section = AutoscalingSection(max_replicas=3, itl_ms=20)
    config = AutoscalingConfig(**section.to_serve())
    assert (config.max_replicas, config.upscale_delay_s, config.downscale_delay_s) == (3, 30, 600)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert isinstance(policy, WorkPolicy)
    assert wanted(policy, token_s={"a": 0.04}) == pytest.approx(2.0)


def test_without_limits_of_latency_requests_are_counted():
    assert AutoscalingSection(max_replicas=2).to_serve()["target_ongoing_requests"] == 16


def test_a_decision_is_logged_with_its_numbers_when_it_changes(caplog: pytest.LogCaptureFixture):
    policy = WorkPolicy(itl_s=0.01)
    with caplog.at_level(logging.INFO, "ray.serve"):
        for token_s in (0.015, 0.019, 0.15, 0.19):  # 2, 2, then 9 of the 15 and 19 that are wanted
            policy(context(token_s={"a": token_s}))
    assert [each.getMessage().partition(" (")[0] for each in caplog.records] == [
        "Pair: work for 1.50 replicas",
        "Pair: work for 15.00 replicas",
    ]
