"""The keys of deploy.yaml, for docs/deploy.md and for editors, and the metrics of docs/operate.md.

`python -m tests.repository.generated_tables` writes them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import PydanticUndefined

from actors.pair.pair_metrics import PairMetrics
from actors.prefill_replica import PrefillMetrics
from actors.shell_messages import DraftChannelStats, Pong
from cluster.config import DeployConfig
from engine.accounting.drift import DriftStats
from engine.accounting.engine_stats import ClassStats, DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.messages import SpeculationStats
from protos.served_model import CanaryOutcome, CanaryReport, DraftReport
from router.backend.serve_backend import up_text
from router.metrics.exposition import proxy_text
from router.metrics.ingress_metrics import IngressMetrics
from router.routing.routed_call import Route

_OF_BUCKETS = "le"

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = DOCS / "deploy.schema.json"
_BEGIN, _END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"


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
        drafts=DraftStats(1, 1, 1, (1,), num_passes_by_shape={"chain": 1}),
        times=StepTimes(),
        speedups={"model-greedy": 1.0},
        classes=(ClassStats("model", "greedy-free", (1,), (1,)),),
        drift=(DriftStats("model-greedy-free", 0.5, 0.5, 0, False),),
    )
    ingress, pair = IngressMetrics(), PairMetrics()
    ingress.count_request("http", "/v1/models", "200")
    ingress.count_end("stop", 1.0, 0.5, 1, 2)
    ingress.router.record_choice(Route(0.0))
    ingress.count_traffic("", "completion", SpeculationStats(1, 1, (0, 1)))
    canary = CanaryReport("/new", "/old", CanaryOutcome.RUNNING, "", 4, 0.1, 0.0, 0.2)
    draft = DraftReport("pair", "/new", "digest", 0.0, is_deployed=False, canary=canary)
    pair.update(Pong(0.0, engine, {"model": DraftChannelStats()}), num_refused=0, drafts=(draft,))
    ingress_text = ingress.text() + up_text("ingress", "b", is_up=True) + proxy_text("1 1 1")
    return MetricTexts(ingress_text, pair.text(), generate_latest(PrefillMetrics(engine, (0, 0))).decode())


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


def key_table() -> str:
    """Return the Markdown table of every key under `args` with its default, a row per section."""
    rows = [f"| {_name(path)} | {', '.join(keys)} |\n" for path, keys in _sections(DeployConfig, "")]
    return "".join(["| section | keys and defaults |\n", "|---|---|\n", *rows])


def key_names() -> set[str]:
    """Return every key under `args`, with its sections: `cache.block_size`."""
    words = ((path, re.findall(r"`(\w+)", key)[0]) for path, keys in _sections(DeployConfig, "") for key in keys)
    return {f"{path}.{word}" if path else word for path, word in words}


def generated_pages() -> dict[Path, str]:
    """Return the pages with a generated table, with the present table between its two marks."""
    tables = ((DOCS / "deploy.md", "keys", key_table()), (DOCS / "operate.md", "metrics", metric_table()))
    return {page: _with_table(page.read_text(encoding="utf-8"), name, table) for page, name, table in tables}


def schema_text() -> str:
    """Return the JSON schema of a whole deploy.yaml; Serve's own keys are left open."""
    args = DeployConfig.model_json_schema()
    definitions = args.pop("$defs")
    application = {"type": "object", "required": ["import_path", "args"], "properties": {"args": args}}
    applications = {"type": "array", "minItems": 1, "items": application}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deploy.yaml of Outrider",
        "type": "object",
        "required": ["applications"],
        "properties": {"applications": applications},
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _with_table(page: str, name: str, table: str) -> str:
    begin, end = _BEGIN.format(name), _END.format(name)
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def _sections(section: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each section and its own keys with their defaults, as Markdown."""
    inner = {name: _section(field.annotation) for name, field in section.model_fields.items()}
    own = [_key(name, field.default) for name, field in section.model_fields.items() if inner[name] is None]
    if own:
        yield path, own
    for name, each in inner.items():
        if each is not None:
            yield from _sections(each, f"{path}.{name}" if path else name)


def _name(path: str) -> str:
    return f"`{path}`" if path else ""


def _key(name: str, default: Any) -> str:
    if default is PydanticUndefined:
        return f"`{name}` (required)"
    return f"`{name}`" if default is None else f"`{name}: {_text(default)}`"


def _section(annotation: Any) -> Any:
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if hasattr(each, "model_fields")), None)


def _text(default: Any) -> str:
    """Return a default in deploy.yaml's form."""
    value = default.value if isinstance(default, Enum) else default
    value = list(value) if isinstance(value, tuple) else value
    return value if isinstance(value, str) and re.fullmatch(r"[\w.:/-]+", value) else json.dumps(value)


if __name__ == "__main__":
    for page, text in generated_pages().items():
        page.write_text(text, encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
