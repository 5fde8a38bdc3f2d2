"""The replicas of a deployment: their number, KV pools and limits, the frontends, routing, and the log for training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from actors.settings import KVTransportKind
from cluster.schema import Section, one_of
from engine.config import GIB, CacheConfig, KVDtype, SchedulerConfig
from router.config import IngressSettings
from router.generation.tool_formats import FORMATS, PROMPTED
from router.requests.reasoning_format import MARKS
from router.routing.policy import Policy

SERVES_OWN_POLICY = "power_of_two"
_PACE = {"look_back_period_s": 30.0, "upscale_delay_s": 30.0, "downscale_delay_s": 600.0}  # longer than a start
_WORK_POLICY = "cluster.work_policy:WorkPolicy"
_COUNTED = {"CPU", "GPU", "memory", "object_store_memory"}  # by Ray itself
_MOST_REPLICAS = 10_000
_ADDRESS = r"^tcp://[^:/]+:[1-9][0-9]{0,4}$"


class CacheSection(Section):
    """The KV pool of the target: a budget, or a number of blocks.

    If neither is set, it is 1 GiB on processors. On a GPU it is `gpu_memory_utilization` (0.9) of its memory, less
    weights, passes and recordings; a draft model on the target's GPU gets a part of it.

    `dtype` int8 (processors) or fp8 (GPUs of compute capability 8.9 or later) holds about twice the tokens of bfloat16
    in the same memory, and changes the target's distribution a little (docs/benchmarks.md).
    """

    block_size: int = Field(default=16, ge=1, le=1024)
    memory_gib: float | None = Field(default=None, gt=0, le=1 << 20, strict=False)
    num_blocks: int | None = Field(default=None, ge=2)
    dtype: Annotated[KVDtype, one_of(*KVDtype)] = KVDtype.AUTO
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, strict=False)

    def conflicts(self) -> Iterator[str]:
        if self.memory_gib is not None and self.num_blocks is not None:
            yield "memory_gib and num_blocks both set the size; keep one of them"
        if "gpu_memory_utilization" in self.model_fields_set and not self.is_measured:
            yield "gpu_memory_utilization sizes the pool by the GPU's memory, and its size is set; keep one of them"

    @property
    def is_measured(self) -> bool:
        """True if the pool takes the free memory of a GPU."""
        return self.memory_gib is None and self.num_blocks is None

    def to_engine(self) -> CacheConfig:
        """Return the target's pool: the configured size, or 1 GiB."""
        if self.num_blocks is not None:
            return CacheConfig(self.block_size, self.num_blocks, memory_bytes=None, dtype=self.dtype)
        memory_bytes = GIB if self.memory_gib is None else int(self.memory_gib * GIB)
        share = self.gpu_memory_utilization if self.is_measured else None
        return CacheConfig(self.block_size, memory_bytes=memory_bytes, dtype=self.dtype, gpu_memory_utilization=share)


class SchedulerSection(Section):
    """Limits of one step and of one sequence."""

    max_num_sequences: int = Field(default=64, ge=1)
    max_tokens_per_step: int = Field(default=2048, ge=1)
    max_stall_passes: float | None = Field(default=1.5, gt=0.0)
    max_model_len: int | None = Field(default=None, ge=2)

    def to_engine(self) -> SchedulerConfig:
        """Return the scheduler's limits."""
        return SchedulerConfig(**self.model_dump())


class PrefillAutoscalingSection(Section):
    """The bounds of Serve's number of prefill replicas, and its goal; with none the pairs read long prompts themselves.

    With `ttft_s` the goal is work: one replica computes its queued prompts within it. Without it the goal is 16
    requests per replica, whatever they cost. The number follows the reports of the last 30 seconds; it rises after 30
    seconds, and falls after ten minutes.
    """

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1, le=_MOST_REPLICAS)
    ttft_s: float | None = Field(default=None, gt=0, strict=False)

    def conflicts(self) -> Iterator[str]:
        if self.min_replicas > self.max_replicas:
            yield f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"

    @property
    def _limits(self) -> dict[str, float | None]:
        return {"ttft_s": self.ttft_s}

    def to_serve(self) -> dict[str, Any]:
        """Return Serve's `autoscaling_config`."""
        bounds = {"min_replicas": self.min_replicas, "max_replicas": self.max_replicas, **_PACE}
        limits = self._limits
        if not any(limits.values()):
            return {**bounds, "target_ongoing_requests": 16.0}
        return {**bounds, "policy": {"policy_function": _WORK_POLICY, "policy_kwargs": limits}}


class AutoscalingSection(PrefillAutoscalingSection):
    """The bounds of Serve's number of pairs, and its goal, as for prefill replicas; but at least one pair runs.

    With `itl_ms` a pair's running streams take at most that per token.
    """

    min_replicas: int = Field(default=1, ge=1)
    itl_ms: float | None = Field(default=None, gt=0, strict=False)

    @property
    def _limits(self) -> dict[str, float | None]:
        return {"ttft_s": self.ttft_s, "itl_s": None if self.itl_ms is None else self.itl_ms / 1000}


class GpusSection(Section):
    """The GPUs that each pair demands. A pair waits for a node with them, and never computes on a processor instead.

    `count` is one per rank of the target, and one more for a draft model with a GPU of its own. `kind` is Ray's name of
    an accelerator type (H100, A100-80G, L4). A pair also gets 4 cores per GPU, or
    `target.num_threads`. Prefill replicas demand the same kind, one GPU per rank.
    """

    count: int = Field(ge=1, le=65)
    kind: str | None = Field(default=None, min_length=1)


class Scaled(Section):
    """A deployment with a fixed number of replicas, or with autoscaling.

    `resources` are Ray resources that each replica takes, so that it runs only on nodes that have them.
    """

    usual_replicas: ClassVar[int] = 1

    num_replicas: int | None
    autoscaling: PrefillAutoscalingSection | None = None
    resources: dict[str, Annotated[float, Field(gt=0, strict=False)]] = Field(default={})

    @property
    def min_replicas(self) -> int:
        """The number of replicas, or the least number with autoscaling."""
        return self.autoscaling.min_replicas if self.autoscaling else self.num_replicas or self.usual_replicas

    @property
    def max_replicas(self) -> int:
        """Replicas that must be placeable."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas or self.usual_replicas

    def conflicts(self) -> Iterator[str]:
        if self.num_replicas is not None and self.autoscaling is not None:
            yield "num_replicas and autoscaling contradict each other; keep one of them"
        for name in sorted(_COUNTED & self.resources.keys()):
            yield f"resources are custom ones of nodes, and {name} is Ray's own; remove it (pair.gpus demands GPUs)"


class KVEventsSection(Section):
    """ZeroMQ addresses where each pair publishes its cache's changes in vLLM's format, for external routers.

    Missed batches are sent again at a port 100 above. Pairs of one node take consecutive ports. Needs pyzmq. The events
    hold the tokens of prompts (docs/security.md).
    """

    endpoint: str = Field(default="tcp://127.0.0.1:5557", pattern=_ADDRESS)

    def conflicts(self) -> Iterator[str]:
        if find_spec("zmq") is None:
            yield "kv_events needs pyzmq, which is not installed; pip install 'outrider[kv-events]', or remove it"


class PairSection(Scaled):
    """The number of draft-target pairs, and of requests that may wait in each before it answers 503."""

    num_replicas: int | None = Field(default=None, ge=1, le=_MOST_REPLICAS)
    autoscaling: AutoscalingSection | None = None
    max_queued_requests: int = Field(default=256, ge=0)
    gpus: GpusSection | None = None
    kv_events: KVEventsSection | None = None


class PrefillSection(Scaled):
    """Replicas that read long prompts for the pairs. While no such replica runs, each pair reads its own prompts.

    Prompts with fewer than `min_remote_prefill_tokens` uncached tokens stay with the pair. KV blocks come back every
    512 tokens by `kv_transport`: through Ray's object store, or by NIXL; auto is NIXL on GPUs if it is installed. Each
    replica has a KV pool as large as a pair's.
    """

    usual_replicas: ClassVar[int] = 0

    num_replicas: int | None = Field(default=None, ge=0, le=_MOST_REPLICAS)
    autoscaling: PrefillAutoscalingSection | None = None
    min_remote_prefill_tokens: int = Field(default=512, ge=1)
    kv_transport: Annotated[KVTransportKind, one_of(*KVTransportKind)] = KVTransportKind.AUTO


class TuneSection(Section):
    """The log of verified positions that `outrider tune` trains on: token ids and the target's likeliest tokens.

    Setting `log`, a folder on every node with pairs, is the deployment's consent. Requests with `store: false`, and
    tenants with `tune_log=false` after their key (docs/security.md), are never logged. Of the other requests those with
    `store: true` are logged, and a tenth of those without `store`. Beyond 1 GiB the oldest files are deleted.

    With `auto`, a drift alarm starts ten minutes of training on the pair's node with its log, next to the running pair.
    A trial then keeps the new draft if it is faster. New drafts are written to the folder `LOG.drafts`.
    """

    log: str | None = Field(default=None, min_length=1)
    auto: bool = False

    @property
    def folder(self) -> Path | None:
        """The log's absolute path."""
        return None if self.log is None else Path(os.path.expanduser(self.log)).absolute()

    def conflicts(self) -> Iterator[str]:
        if self.log is None and (given := self.model_fields_set - {"log"}):
            yield f"{', '.join(sorted(given))} needs a log, and no log is set; set log to a folder, or remove it"
        if self.log is not None and os.path.expanduser(self.log).startswith("~"):
            yield f"log {self.log!r} is the folder of a user that this machine does not know; give a whole path"
        if self.folder is not None and os.path.exists(self.folder) and not os.path.isdir(self.folder):
            yield f"log {self.log!r} is a file; give a folder, which is created if it is missing"
        if self.folder is not None and os.path.isdir(self.folder) and not os.access(self.folder, os.W_OK | os.X_OK):
            yield f"log {self.log!r} is a folder that this user cannot write to; change its owner, or give another"


class RouterSection(Section):
    """The choice of a pair.

    `policy` prefix takes the pair with the least predicted seconds to the first token, given its cached prefixes. load
    does the same as if every cache were empty. round_robin takes pairs in turn. random takes any. power_of_two is Ray
    Serve's own router: of two random pairs it takes the one with fewer requests.

    If the index does not answer within `index_timeout_ms`, the request goes to the pair with the fewest requests.
    """

    policy: Annotated[str, one_of(*Policy, SERVES_OWN_POLICY)] = Policy.PREFIX
    index_timeout_ms: float = Field(default=50.0, gt=0, le=10_000, strict=False)


class IngressSection(IngressSettings, Section):
    """The HTTP and gRPC frontends.

    `model_aliases` are more names of the model, for clients with fixed model names (docs/requests.md).

    `api_keys_file` has one key or its hash per line (docs/security.md). Without it every client is served.
    `open_admin`, for loopback without keys, lets every client kill the draft and see the router's reasons.

    `receipt_key_file` (PEM, Ed25519) signs receipts of answers (docs/requests.md).

    `tool_format` is how the model writes tool calls, and `reasoning_format` how it marks its reasoning; auto follows
    its chat template. prompted describes tools in the system message, for a model whose template has no tools.
    `chat_template` replaces that template: a file's path, or the template itself.

    `strict_fields` refuses a request with an unknown field, and one whose `max_tokens` does not fit the context.
    Otherwise the field is ignored and named in the answer's header X-Ignored-Fields, and the output gets what fits.

    `cors_origins` are the web pages that may call, as scheme://host:port with * for anything. The default is this
    machine's pages. A server on loopback accepts its own host names and `allowed_hosts` (* matches any part). Another
    server accepts any host name, or only `allowed_hosts` if set.

    `tls_certificate_file` (PEM: certificate chain and key) turns TLS on for both frontends. With `tls_client_ca_file` a
    client must have a certificate that this authority has signed.
    """

    num_replicas: int = Field(default=1, ge=1, le=1000)
    tool_format: Annotated[str, one_of("auto", PROMPTED, *FORMATS)] = "auto"
    reasoning_format: Annotated[str, one_of("auto", "none", *MARKS)] = "auto"
    tls_certificate_file: str | None = None
    tls_client_ca_file: str | None = None

    def conflicts(self) -> Iterable[str]:
        if self.open_admin and self.api_keys_file is not None:
            yield "open_admin is for a server without keys; remove it, and write admin=true after a key of the file"
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            yield "tls_client_ca_file is set without tls_certificate_file; set both, or neither"
        if strange := next((host for host in self.allowed_hosts if "/" in host), None):
            yield f"allowed_hosts has {strange!r}, and no client sends such a Host; give a name or an address alone"
        for name in ("tls_certificate_file", "tls_client_ca_file"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(os.path.expanduser(path)):
                yield f"{name} {path!r} is no file; give the path of a PEM file"
        yield from self._template_conflicts()

    @property
    def chat_template_text(self) -> str | None:
        """The template that replaces the model's; None without one, or if its file is missing."""
        if self.chat_template is None or "{{" in self.chat_template or "{%" in self.chat_template:
            return self.chat_template
        file = os.path.expanduser(self.chat_template)  # os.path.isfile accepts a long name; Path does not
        return Path(file).read_text(encoding="utf-8") if os.path.isfile(file) else None

    def _template_conflicts(self) -> Iterable[str]:
        try:
            is_missing = self.chat_template is not None and self.chat_template_text is None
        except (OSError, UnicodeDecodeError) as error:
            yield f"chat_template {self.chat_template!r} cannot be read: {error}"
            return
        if is_missing:
            yield f"chat_template {self.chat_template!r} is no file; give the path of a template, or its text"
