"""The names of the public contract, and where their values come from."""

from dataclasses import replace

from actors.pair.pair_metrics import PairMetrics
from actors.shell_messages import DraftChannelStats, Pong
from engine.accounting.drift import DriftStats
from engine.accounting.engine_stats import (
    ClassStats,
    DraftStats,
    EngineStats,
    FetchFailure,
    Histogram,
    RemotePrefillStats,
    TranslationCounts,
)
from engine.accounting.step_times import StepTimes
from protos.served_model import CanaryOutcome, CanaryReport, DraftReport
from router.metrics.exposition import merge_metrics

CONTRACT = {
    "outrider_spec_decode_num_drafts": 4.0,
    "outrider_spec_decode_num_draft_tokens": 16.0,
    "outrider_spec_decode_num_accepted_tokens": 6.0,
    "outrider_spec_decode_acceptance_length": 2.5,
    "outrider_kv_cache_usage": 0.25,
    "outrider_prefix_cache_hits": 32.0,
    "outrider_prefix_cache_queries": 100.0,
    "outrider_num_requests_running": 2.0,
    "outrider_num_requests_waiting": 3.0,
    "outrider_prefill_local_tokens": 68.0,
    "outrider_num_requests_refused": 7.0,
    "outrider_num_overlapped_passes": 5.0,
}


def text() -> str:
    drafts = DraftStats(4, 16, 6, (4, 2, 0, 0), num_passes_by_shape={"none": 2, "tree": 4})
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, drafts, StepTimes(), num_overlapped_passes=5)
    metrics = PairMetrics()
    channel = DraftChannelStats(is_connected=True, translated=TranslationCounts(20, 3))
    drafts = {"model": channel, "prose": DraftChannelStats(num_missed_offers=5)}
    metrics.update(Pong(0.0, engine, drafts), num_refused=7)
    return metrics.text()


def test_every_metric_of_the_contract_comes_out_under_its_name():
    lines = merge_metrics("", [text()]).splitlines()
    for name, value in CONTRACT.items():
        assert f'{name}{{replica="0"}} {value}' in lines


def test_each_draft_model_has_series_of_its_own():
    lines = merge_metrics("", [text()]).splitlines()
    for name, model, prose in (
        ("connected", 1.0, 0.0),
        ("num_missed_offers", 0.0, 5.0),
        ("foreign_tokens", 20.0, 0.0),
        ("untranslated_tokens", 3.0, 0.0),
    ):
        assert f'outrider_draft_{name}{{method="model",replica="0"}} {model}' in lines
        assert f'outrider_draft_{name}{{method="prose",replica="0"}} {prose}' in lines


def test_acceptance_is_counted_by_position():
    lines = merge_metrics("", [text()]).splitlines()
    name = "outrider_spec_decode_num_accepted_tokens_per_pos"
    assert f'{name}{{position="1",replica="0"}} 2.0' in lines


def test_speedups_are_exported_by_class():
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, DraftStats(), StepTimes(), speedups={"model-greedy": 1.5})
    metrics = PairMetrics()
    metrics.update(Pong(0.0, engine, {}), num_refused=0)
    assert 'outrider_spec_decode_speedup{class="model-greedy"} 1.5' in metrics.text().splitlines()


def test_acceptance_is_counted_by_position_method_and_class():
    classes = (ClassStats("model", "greedy-free", (4, 3), (3, 1)),)
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, DraftStats(), StepTimes(), classes=classes)
    metrics = PairMetrics("r1")
    metrics.update(Pong(0.0, engine, {}), num_refused=0)
    lines = merge_metrics("", [metrics.text()]).splitlines()
    labels = '{class="greedy-free",method="model",position="1",replica="r1"}'
    assert f"outrider_spec_decode_class_draft_tokens_per_pos{labels} 3.0" in lines
    assert f"outrider_spec_decode_class_accepted_tokens_per_pos{labels} 1.0" in lines


def test_drift_is_told_by_class():
    drift = (DriftStats("model-greedy-free", 0.4, 0.7, num_alarms=2, is_alarming=True),)
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, DraftStats(), StepTimes(), drift=drift)
    metrics = PairMetrics()
    metrics.update(Pong(0.0, engine, {}), num_refused=0)
    lines = merge_metrics("", [metrics.text()]).splitlines()
    labels = '{class="model-greedy-free",replica="0"}'
    assert f"outrider_spec_decode_drift_alarm{labels} 1.0" in lines
    assert f"outrider_spec_decode_drift_alarms{labels} 2.0" in lines
    assert f"outrider_spec_decode_recent_acceptance{labels} 0.4" in lines


def test_the_draft_that_runs_and_its_trial_are_told():
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, DraftStats(), StepTimes())
    canary = CanaryReport("/m/new", "/m/old", CanaryOutcome.KEPT, "", 7, 0.1, 0.02, 0.2)
    metrics = PairMetrics()
    draft = DraftReport("r1", "/m/new", "abcd", 0.0, is_deployed=False, canary=canary)
    metrics.update(Pong(0.0, engine, {}), num_refused=0, drafts=(draft, replace(draft, method="prose", canary=None)))
    lines = metrics.text().splitlines()
    assert 'outrider_draft_info{digest="abcd",draft="new",method="model"} 1.0' in lines
    assert 'outrider_draft_canary{method="model",outcome="kept"} 1.0' in lines
    assert 'outrider_draft_canary{method="model",outcome="running"} 0.0' in lines
    assert 'outrider_draft_canary{method="prose",outcome="kept"} 0.0' in lines
    assert 'outrider_draft_canary_gain{bound="low",method="model"} 0.02' in lines
    assert 'outrider_draft_canary_pairs{method="model"} 7.0' in lines


def test_queue_times_are_a_histogram():
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.1, 0.5, 7.0):
        histogram.observe(seconds)
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, DraftStats(), StepTimes(), queue_times=histogram.snapshot())
    metrics = PairMetrics()
    metrics.update(Pong(0.0, engine, {}), num_refused=0)
    name = "outrider_request_queue_time_seconds"
    assert [line for line in metrics.text().splitlines() if line.startswith(name)] == [
        f'{name}_bucket{{le="0.1"}} 1.0',
        f'{name}_bucket{{le="1.0"}} 2.0',
        f'{name}_bucket{{le="+Inf"}} 3.0',
        f"{name}_count 3.0",
        f"{name}_sum 7.6",
    ]


def test_there_are_no_metrics_before_the_first_pong():
    assert PairMetrics().text() == ""


def test_prompt_tokens_of_prefill_replicas_are_not_local_and_every_cause_of_a_failure_has_a_series():
    remote = RemotePrefillStats(num_tokens=20, failures={"timeout": 3})
    engine = EngineStats(2, 3, 0, 0, 8, 2, 100, 32, 0, DraftStats(), StepTimes(), remote=remote)
    metrics = PairMetrics()
    metrics.update(Pong(0.0, engine, {}), num_refused=0)
    lines = metrics.text().splitlines()
    assert "outrider_prefill_local_tokens_total 48.0" in lines
    assert "outrider_prefill_remote_tokens_total 20.0" in lines
    name = "outrider_prefill_transfers_failed_total"
    counts = {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(name)}
    assert counts == dict.fromkeys(map(str, FetchFailure), 0.0) | {"timeout": 3.0}
