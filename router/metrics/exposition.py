"""Several processes' metrics as one Prometheus text.

Families that several replicas report appear once, their samples told apart by a `replica` label. Every sample bears
exactly the name of the contract, which has no `_total`: counters are therefore typed `gauge`, since
Prometheus' clients rename the samples of a `counter` family to end in `_total`. They fall only when a process
restarts, so `rate()` works on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TYPES = {"counter": "gauge", "unknown": "untyped"}
_REPLICA = "replica"


@dataclass(slots=True)
class _Family:
    kind: str
    documentation: str
    lines: list[str] = field(default_factory=list)


def merge_metrics(own_text: str, replica_texts: Iterable[str]) -> str:
    """Return one text of our own families and the replicas'; a replica without a name is named by its rank."""
    families: dict[str, _Family] = {}
    _collect(families, own_text, {})
    for rank, text in enumerate(replica_texts):
        _collect(families, text, {_REPLICA: str(rank)})
    return "".join(_written(name, family) for name, family in families.items())


def _collect(families: dict[str, _Family], text: str, default_labels: Mapping[str, str]) -> None:
    for parsed in text_string_to_metric_families(text):
        if parsed.name.endswith("_created"):  # the start time of a counter: noise beside the contract's names
            continue
        kind = _TYPES.get(parsed.type, parsed.type)
        family = families.setdefault(parsed.name, _Family(kind, parsed.documentation))
        for sample in parsed.samples:
            name = parsed.name if parsed.type == "counter" else sample.name
            family.lines.append(_sample_line(name, {**default_labels, **sample.labels}, sample.value))


def _written(name: str, family: _Family) -> str:
    documentation = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {documentation}\n# TYPE {name} {family.kind}\n" + "".join(family.lines)


def _sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in sorted(labels.items()))
    return f"{name}{{{inner}}} {_number(value)}\n" if inner else f"{name} {_number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return repr(float(value))
