"""The pair's metrics exported through Ray, as `ray_outrider_*` beside those of the cluster."""

from __future__ import annotations

from prometheus_client.registry import Collector
from ray.util.metrics import Gauge


class RayMetrics:
    """Copies the samples of a collector into Ray gauges of the same names and labels; a counter's has its family's."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def export(self, collector: Collector) -> None:
        """Set every gauge to the collector's present value; Ray sends them on with its own period."""
        for family in collector.collect():
            for sample in family.samples:
                name = family.name if family.type == "counter" else sample.name  # a gauge of its own for each `_bucket`
                gauge = self._gauge(name, family.documentation, tuple(sample.labels))
                gauge.set(sample.value, tags=dict(sample.labels))

    def _gauge(self, name: str, documentation: str, labels: tuple[str, ...]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=documentation, tag_keys=labels)
        return self._gauges[name]
