"""The sections of deploy.yaml's `args`, and their base: strict, frozen, and closed to keys it does not know.

`cluster.config` joins the sections and checks them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from protos.errors import ConfigError

_NICENESS = "a pair has niceness 0, a prefill replica 10 on nodes without GPUs"
_SCALING = {
    "target_ongoing_requests": "without ttft_s and itl_ms it is 16 requests per replica; set ttft_s or itl_ms for less",
    "look_back_period_s": "it is always 30",
    "upscale_delay_s": "it is always 30",
    "downscale_delay_s": "it is always 600",
}

_TREE = "a tree is dynamic; num_nodes limits its size"

# By the path of a removed key: what holds now, or what to set instead.
REMOVED = {
    **{f"{section}.autoscaling.{key}": now for section in ("pair", "prefill") for key, now in _SCALING.items()},
    "target.cuda_graph_batches": "passes are recorded for any number of sequences",
    "target.overlapped_passes": "passes overlap where they can",
    "draft.attention": "a draft has the target's attention",
    "draft.process": "it is the target's if both share the only GPU, and otherwise its own; draft.gpu chooses",
    "draft.vocabulary": "it follows from the two tokenizers (docs/speculation.md)",
    "speculation.num_guess_tokens": "it is always max_num_tokens",
    "speculation.methods": "requests may choose every method that the deployment can run",
    "speculation.fan_out": "it is always 3",
    **{f"speculation.tree.{key}": _TREE for key in ("kind", "parents", "max_batch")},
    "speculation.steps.threshold": "it is 7, or a request's own",
    "speculation.steps.think": "steps are drafted between the marks of ingress.reasoning_format, anywhere without them",
    "speculation.steps.rating_prompt": "the question is fixed (docs/speculation.md)",
    "speculation.steps.step_end": "a step ends at a blank line",
    "speculation.steps.max_step_tokens": "it is always 64",
    "speculation.steps.max_steps": "it is always 256",
    "pair.niceness": _NICENESS,
    "pair.kv_events.replay_endpoint": "it is the endpoint with a port 100 above",
    "pair.kv_events.topic": "it is always empty",
    "pair.kv_events.format": "it is always map, the form of vLLM 0.33",
    "pair.kv_events.buffer_steps": "it is always 10000",
    "prefill.autoscaling.itl_ms": "prefill replicas write no tokens",
    "prefill.niceness": _NICENESS,
    "pair.alarm_webhook": "alert on outrider_spec_decode_drift_alarm (docs/watch)",
    "pair.gpus.cpus_per_gpu": "it is target.num_threads, or 4",
    "prefill.memory_gib": "the pool is as large as a pair's",
    "prefill.chunk_tokens": "it is always 512",
    "prefill.num_threads": "a replica takes its part of the node's cores, or of a GPU's",
    "router.others_weight": "it is always 1.5",
    "ingress.prompt_tools": "set tool_format to 'prompted'",
    "ingress.vllm_grpc": "the service runs if grpc_options.grpc_servicer_functions lists it",
    "ingress.limits.max_choices": "it is always 128",
    "ingress.limits.strict_max_tokens": "set strict_fields",
    "ingress.limits.max_body_bytes_in_flight": "it is always 16 times max_body_bytes",
    "ingress.limits.first_token_timeout_s": "it is always 600; a request's own timeout may be shorter",
    "ingress.limits.inter_token_timeout_s": "it is always 30",
    "ingress.limits.migration_deadline_s": "it is always 60",
    "ingress.limits.max_migrations": "it is always 64",
    "tune.max_gib": "it is always 1",
    "tune.share": "requests with store true are logged, and a tenth of those without store",
    "tune.minutes": "it is always 10",
}


class Section(BaseModel):
    """A mapping of deploy.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def to_engine(self) -> Any:
        """Return the engine's dataclass, which checks its own constraints; by default None."""

    def conflicts(self) -> Iterable[str]:
        """Yield contradictions in this section, each with its remedy; the first is reported."""
        return ()

    @model_validator(mode="after")
    def _is_accepted(self) -> Self:
        try:
            self.to_engine()
        except ConfigError as error:
            raise ValueError(str(error)) from None  # pydantic collects these, with the path of the section
        for conflict in self.conflicts():
            raise ValueError(conflict)
        return self


def one_of(*choices: str) -> BeforeValidator:
    """Make a field accept these values, and name them in the error for another value.

    If `choices` are members of an enum, text becomes the member. YAML reads `on` and `off` without quotes as true and
    false; they count as the text.
    """
    by_text = {str(choice): choice for choice in choices}

    def check(value: Any) -> str:
        if isinstance(value, bool) and "off" in by_text:
            value = "on" if value else "off"
        if not isinstance(value, str) or value not in by_text:
            raise ValueError(f"{value!r} is not available; this version offers {', '.join(by_text)}")
        return by_text[value]

    return BeforeValidator(check)
