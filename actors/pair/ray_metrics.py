"""Exports the pair's metrics through Ray, as `ray_outrider_*` next to the cluster's metrics."""

from __future__ import annotations

from prometheus_client.registry import Collector
from ray.util.metrics import Gauge


class RayMetrics:
    """Copies a collector's samples into Ray gauges with their labels and names; counters use the family's name."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def export(self, collector: Collector) -> None:
        """Set every gauge to the collector's present value. Ray exports them at its own interval."""
        for family in collector.collect():
            for sample in family.samples:
                name = family.name if family.type == "counter" else sample.name  # each `_bucket` gets its own gauge
                gauge = self._gauge(name, family.documentation, tuple(sample.labels))
                gauge.set(sample.value, tags=dict(sample.labels))

    def _gauge(self, name: str, documentation: str, labels: tuple[str, ...]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=documentation, tag_keys=labels)
        return self._gauges[name]
