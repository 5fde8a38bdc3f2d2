"""Merges several processes' metrics into one Prometheus text.

Families that several processes report appear once, with a label per process: `ingress` for the frontends, `replica` for
pairs and prefill replicas. Every series thus belongs to one process, a counter falls only when its process restarts,
and `sum(rate(...))` is right regardless of the ingress replica. Sample names follow the contract exactly, without
`_total`; Prometheus accepts any counter name, and OpenMetrics parsers add the suffix.

For tools built for vLLM, families that vLLM has too are repeated under its names.

HAProxy's own answers reach no ingress, so HAProxy sends their counts with each scrape (`cluster/proxy/answers.cfg`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric, Sample
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

ANSWERS_HEADER = "x-outrider-proxy-answers"
NAME = "outrider_proxy_answers"
_HELP = (
    f"# HELP {NAME} Answers that the scraped HAProxy gave itself: pairs are full (refused), "
    "a client's mistake or slowness (client), no ingress available or answering (server).\n"
    f"# TYPE {NAME} counter\n"
)
_KINDS = ("refused", "client", "server")
_COUNTS = re.compile(r"(\d{1,19}) (\d{1,19}) (\d{1,19})")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REPLICA = "replica"
_INGRESS = "ingress"
_PRIVATE_LABELS = frozenset({"tenant"})  # values identify clients of the server
_VLLM_NAMES = {
    f"outrider_{ours}": f"vllm:{theirs}"
    for ours, theirs in {
        "num_requests_running": "num_requests_running",
        "num_requests_waiting": "num_requests_waiting",
        "num_preemptions": "num_preemptions",
        "kv_cache_usage": "kv_cache_usage_perc",
        "prefix_cache_queries": "prefix_cache_queries",
        "prefix_cache_hits": "prefix_cache_hits",
        "spec_decode_num_drafts": "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "e2e_request_latency_seconds": "e2e_request_latency_seconds",
        "request_queue_time_seconds": "request_queue_time_seconds",
        "request_prefill_time_seconds": "request_prefill_time_seconds",
        "request_decode_time_seconds": "request_decode_time_seconds",
        "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
        "request_prompt_tokens": "request_prompt_tokens",
        "request_generation_tokens": "request_generation_tokens",
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "request_success": "request_success",
    }.items()
}


def proxy_text(header: str) -> str:
    """Return the family for the header's three counts; empty without HAProxy."""
    counts = _COUNTS.fullmatch(header)
    if counts is None:
        return ""
    return _HELP + "".join(
        f'{NAME}{{kind="{kind}"}} {count}\n' for kind, count in zip(_KINDS, counts.groups(), strict=True)
    )


def merge_metrics(
    frontend_texts: str | Mapping[str, str],
    replica_texts: Iterable[str],
    model_name: str | None = None,
    *,
    is_private: bool = False,
) -> str:
    """Return one text of the families of frontends and replicas.

    Args:
        frontend_texts: metrics texts of the ingress replicas by name; a single text has no name.
        replica_texts: metrics texts of pairs and prefill replicas; a text without a name is named by its rank.
        model_name: the served model; if given, vLLM's names are added.
        is_private: keep tenants apart; else their series are added up.
    """
    families: dict[str, Metric] = {}
    if isinstance(frontend_texts, str):
        _collect(families, frontend_texts, {})
    else:
        for name, text in sorted(frontend_texts.items()):
            _collect(families, text, {_INGRESS: name})
    for rank, text in enumerate(replica_texts):
        _collect(families, text, {_REPLICA: str(rank)})
    if not is_private:
        for family in families.values():
            _hide_tenants(family)
    ours = "".join(_text(family, name, {}) for name, family in families.items())
    return ours if model_name is None else ours + _vllm_text(families, model_name)


def _collect(families: dict[str, Metric], text: str, default_labels: Mapping[str, str]) -> None:
    for parsed in text_string_to_metric_families(text):
        if parsed.name.endswith("_created"):  # a counter's start time, which the contract does not have
            continue
        family = families.setdefault(parsed.name, Metric(parsed.name, parsed.documentation, parsed.type))
        for sample in parsed.samples:
            family.add_sample(sample.name, {**default_labels, **sample.labels}, sample.value)


def _hide_tenants(family: Metric) -> None:
    """Remove the labels that identify clients, and add up samples that no longer differ."""
    if all(_PRIVATE_LABELS.isdisjoint(sample.labels) for sample in family.samples):
        return
    sums: dict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
    for sample in family.samples:
        rest = frozenset(item for item in sample.labels.items() if item[0] not in _PRIVATE_LABELS)
        sums[sample.name, rest] += sample.value
    family.samples = [Sample(name, dict(rest), value) for (name, rest), value in sums.items()]


def _vllm_text(families: Mapping[str, Metric], model_name: str) -> str:
    labels = {"model_name": model_name}
    parts = []
    for ours, theirs in _VLLM_NAMES.items():
        if (family := families.get(ours)) is not None:
            name = f"{theirs}_total" if family.type == "counter" else theirs
            parts.append(_text(family, name, labels))
    return "".join(parts)


def _text(family: Metric, name: str, labels: Mapping[str, str]) -> str:
    """Return a family under `name`, with more labels. The samples of a counter have its name."""
    documentation = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    kind = "untyped" if family.type == "unknown" else family.type
    lines = [f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"]
    for sample in family.samples:
        suffix = "" if kind == "counter" else sample.name.removeprefix(family.name)
        lines.append(_sample_line(name + suffix, {**labels, **sample.labels}, sample.value))
    return "".join(lines)


def _sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in sorted(labels.items()))
    number = floatToGoString(value)  # type: ignore[no-untyped-call]
    return f"{name}{{{inner}}} {number}\n" if inner else f"{name} {number}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
