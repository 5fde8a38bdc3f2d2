"""The metrics of `/metrics` for docs/operate.md, read from the code that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from actors.kv_transfer.direct_blocks import DirectStats
from actors.pair.pair_metrics import PairMetrics
from actors.prefill.prefill_metrics import PrefillMetrics
from actors.shell_messages import DraftChannelStats, Pong
from engine.accounting.drift import DriftStats
from engine.accounting.engine_stats import ClassStats, DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.messages import SpeculationStats
from protos.served_draft import CanaryOutcome, CanaryReport, DraftReport
from router.backend.replica_texts import up_text
from router.metrics.exposition import proxy_text
from router.metrics.ingress_metrics import IngressMetrics, Traffic
from router.routing.routed_call import Route

_OF_BUCKETS = "le"


@dataclass(frozen=True, slots=True)
class MetricTexts:
    """A text of each kind of replica with a sample of every family."""

    ingress: str
    pair: str
    prefill: str


def sample_metrics() -> MetricTexts:
    """Return the metrics of replicas that have done a little of everything."""
    engine = EngineStats(
        num_running=0,
        num_waiting=0,
        num_queued_prefill_tokens=0,
        num_running_decode_tokens=0,
        num_blocks=8,
        num_used_blocks=0,
        num_prefix_queried_tokens=0,
        num_prefix_hit_tokens=0,
        num_preemptions=0,
        drafts=DraftStats(1, 1, 1, (1,)),
        times=StepTimes(),
        speedups={"model-greedy": 1.0},
        classes=(ClassStats("model", "greedy-free", (1,), (1,)),),
        drift=(DriftStats("model-greedy-free", 0.5, 0.5, 0, False),),
    )
    ingress, pair, prefill = IngressMetrics(), PairMetrics(), PrefillMetrics()
    ingress.count_request("http", "/v1/models", "200")
    ingress.count_end("stop", 1.0, 0.5, 1, 2)
    ingress.router.record_choice(Route(0.0))
    ingress.traffic.count(Traffic(), SpeculationStats(1, 1, (0, 1)))
    canary = CanaryReport("/new", "/old", CanaryOutcome.RUNNING, "", 4, 0.1, 0.0, 0.2)
    draft = DraftReport("pair", "/new", "digest", 0.0, is_deployed=False, canary=canary)
    pair.update(Pong(0.0, engine, {"model": DraftChannelStats()}), num_refused=0, drafts=(draft,))
    prefill.update(engine, DirectStats())
    ingress_text = ingress.text() + up_text("ingress", "b", is_up=True) + proxy_text("1 1 1")
    return MetricTexts(ingress_text, pair.text(), prefill.text())


def metric_table() -> str:
    """Return Markdown tables of every metric with its labels and meaning, one per kind of replica and type."""
    texts = sample_metrics()
    parts = (
        ("ingress", "ingress", texts.ingress),
        ("pair", "replica", texts.pair),
        ("prefill", "replica", texts.prefill),
    )
    return "\n".join(table for kind, label, text in parts for table in _tables(kind, label, text))


def _tables(kind: str, source_label: str, text: str) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {_OF_BUCKETS, source_label})
        name = f"{family.name}{{{', '.join(labels)}}}" if labels else family.name
        rows.setdefault(family.type, []).append(f"| `{name}` | {family.documentation.replace('|', '/')} |\n")
    for metric_type, members in rows.items():
        yield f"| {metric_type} of each {kind} replica (label `{source_label}`) | |\n|---|---|\n{''.join(members)}"
