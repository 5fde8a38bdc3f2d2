"""The dashboard and the alert rules ask for metrics that exist, and the rules pass Prometheus' own tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from router.metrics.exposition import merge_metrics
from tests.repository.generated_tables import sample_metrics

FOLDER = Path(__file__).parents[3] / "docs" / "watch"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def served_names() -> set[str]:
    """Names of all samples of `/metrics`."""
    texts = sample_metrics()
    text = merge_metrics({"b": texts.ingress}, [texts.pair, texts.prefill], "m")
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]] + [
        rule["expr"] for rule in RULES
    ]


def test_every_query_asks_for_metrics_that_are_served() -> None:
    asked = {name for query in queries() for name in re.findall(r"\b(?:outrider_|vllm:)\w+", query)}
    assert len(asked) > 20
    assert asked - served_names() == set()


# Of the dashboards in vLLM's examples; `request_max_num_generation_tokens` alone is not served.
VLLM_DASHBOARD = (
    *("e2e_request_latency_seconds_bucket", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("request_time_per_output_token_seconds_bucket", "request_queue_time_seconds_sum", "request_success_total"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "prompt_tokens_total", "generation_tokens_total", "num_requests_running"),
    *("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total", "num_preemptions_total"),
)


def test_vllms_dashboards_find_their_metrics() -> None:
    assert {f"vllm:{name}" for name in VLLM_DASHBOARD} - served_names() == set()


def test_rates_are_of_counters_and_histograms_alone() -> None:
    counters = {name for query in queries() for name in re.findall(r"rate\((outrider_\w+)", query)}
    gauges = {"running", "waiting", "usage", "connected", "speedup", "alarm"}
    assert counters
    assert not any(name.rpartition("_")[2] in gauges for name in counters)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_the_rules_pass_promtool() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=60)


def test_operators_are_told_what_to_do_about_every_alarm() -> None:
    page = (FOLDER.parent / "operate.md").read_text(encoding="utf-8").partition("## Alarms")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([A-Z]\w+) \|", page, re.MULTILINE) == [rule["alert"] for rule in RULES]
    metrics = set(re.findall(r"outrider_\w+", page))
    assert {f"{name}_count" for name in metrics} <= served_names()
