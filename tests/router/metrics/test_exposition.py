"""Merged metrics keep the contract's names and parse as Prometheus text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics.exposition import merge_metrics


def replica_text(value: int) -> str:
    registry = CollectorRegistry()
    drafts = Counter("outrider_spec_decode_num_drafts", 'Drafts, "all"\nof them.', registry=registry)
    drafts.inc(value)
    per_position = Counter("outrider_spec_decode_num_accepted_tokens_per_pos", "p", ("position",), registry=registry)
    per_position.labels('0"\\').inc(2 * value)
    Gauge("outrider_kv_cache_usage", "u", registry=registry).set(0.25)
    Histogram("outrider_h", "h", buckets=(1, 2), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_every_family_appears_once_with_its_exact_name() -> None:
    text = merge_metrics(replica_text(1), [replica_text(3), replica_text(4)])
    assert text.count("# TYPE outrider_spec_decode_num_drafts ") == 1
    assert "_total" not in text
    assert "_created" not in text
    lines = [line for line in text.splitlines() if line.startswith("outrider_spec_decode_num_drafts")]
    assert lines == [
        "outrider_spec_decode_num_drafts 1.0",
        'outrider_spec_decode_num_drafts{replica="0"} 3.0',
        'outrider_spec_decode_num_drafts{replica="1"} 4.0',
    ]


def test_the_text_parses_with_the_exact_names() -> None:
    families = {
        family.name: family
        for family in text_string_to_metric_families(merge_metrics("", [replica_text(1), replica_text(2)]))
    }
    drafts = families["outrider_spec_decode_num_drafts"]
    assert drafts.type == "counter"
    assert {sample.name for sample in drafts.samples} == {
        "outrider_spec_decode_num_drafts_total"
    }  # as OpenMetrics has it
    per_position = families["outrider_spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(sample.labels, sample.value) for sample in per_position] == [
        ({"position": '0"\\', "replica": "0"}, 2.0),
        ({"position": '0"\\', "replica": "1"}, 4.0),
    ]
    buckets = [sample for sample in families["outrider_h"].samples if sample.name == "outrider_h_bucket"]
    assert [sample.labels["le"] for sample in buckets[:3]] == ["1.0", "2.0", "+Inf"]
    assert families["outrider_h"].type == "histogram"


def test_a_replica_that_names_itself_keeps_its_name() -> None:
    own_name = '# TYPE outrider_x gauge\noutrider_x{replica="pair-7"} 1\n'
    assert 'outrider_x{replica="pair-7"} 1.0' in merge_metrics("", [own_name])


def test_each_ingress_replica_keeps_its_own_series() -> None:
    lines = merge_metrics({"b": replica_text(3), "a": replica_text(1)}, []).splitlines()
    assert [line for line in lines if line.startswith("outrider_spec_decode_num_drafts{")] == [
        'outrider_spec_decode_num_drafts{ingress="a"} 1.0',
        'outrider_spec_decode_num_drafts{ingress="b"} 3.0',
    ]
    assert "# TYPE outrider_spec_decode_num_drafts counter" in lines


def test_what_vllm_names_comes_under_its_name_too() -> None:
    lines = merge_metrics("", [replica_text(3)], "demo").splitlines()
    assert "# TYPE vllm:spec_decode_num_drafts_total counter" in lines
    assert 'vllm:spec_decode_num_drafts_total{model_name="demo",replica="0"} 3.0' in lines
    assert 'vllm:kv_cache_usage_perc{model_name="demo",replica="0"} 0.25' in lines
    assert not any("vllm:" in line for line in merge_metrics("", [replica_text(3)]).splitlines())
