"""The pair's metrics as Ray gauges."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from ray.util.metrics import Gauge

from actors.pair.pair import export_to_ray

Family = CounterMetricFamily | HistogramMetricFamily


class _Collector(Collector):
    def collect(self) -> Iterable[Family]:
        counter = CounterMetricFamily("outrider_c", "A counter.", labels=("part",))
        counter.add_metric(("a",), 1.0)
        yield counter
        yield HistogramMetricFamily("outrider_h", "A histogram.", buckets=[("1.0", 1.0), ("+Inf", 2.0)], sum_value=3.0)


def test_every_sample_is_set_on_a_gauge_of_its_own_labels() -> None:
    gauges: dict[str, Gauge] = {}
    export_to_ray(_Collector(), gauges)  # Ray refuses a sample without a value for each label of its gauge
    assert {name: gauge.info["tag_keys"] for name, gauge in gauges.items()} == {
        "outrider_c": ("part",),
        "outrider_h_bucket": ("le",),
        "outrider_h_count": (),
        "outrider_h_sum": (),
    }
