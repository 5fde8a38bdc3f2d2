"""`outrider plan`: speed-up, memory, replicas and cost of a deployment before anything is bought or loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from cluster.checkpoints import resolve_model_path
from cluster.cli import console, numbers_in, report
from cluster.deploy_file import read_deploy_file
from cluster.planning.replica_plan import (
    Capacity,
    Memory,
    PlannedDraft,
    ReplicaPlan,
    SpeedUp,
    acceptance_per_position,
    best_speed_up,
    capacity_of,
    memory_of,
)
from cluster.planning.roofline import DeviceSpec, ModelShape, PassCost
from cluster.schema.models import DRAFT_KINDS
from engine.config import GIB, ModelDtype, Quantization
from protos.errors import ConfigError
from protos.messages import SpeculationMethod

_Target = Annotated[str, Argument(help="a folder, a config.json, a public model such as llama-3-70b, or a deploy.yaml")]
_Draft = Annotated[str | None, Option(help="like the target, or a head's folder; default: free drafts from the text")]
_DraftKind = Annotated[
    str | None, Option(help="draft.kind; a head without --draft has the usual size; default: model, or suffix")
]
_TreeNodes = Annotated[int | None, Option(min=0, max=64, help="the most nodes of a tree; 0 has chains alone")]
_Gpus = Annotated[int | None, Option(min=1, help="devices of one replica; the target is sharded over them; default: 1")]
_Dtype = Annotated[
    str | None, Option(help="dtype of the target's weights: float32, bf16, fp8, int8 or int4; default: bf16")
]
_DraftDtype = Annotated[str | None, Option(help="dtype of the draft's weights; default: the target's, int4 for self")]
_Acceptance = Annotated[str, Option(help="acceptance probability: one number, or one per position: 0.8,0.7,0.6")]
_Streams = Annotated[
    int | None, Option(min=1, max=512, help="concurrent streams per replica; default: the best number")
]
_Tflops = Annotated[float | None, Option(min=0.001, help="TFLOP/s that a pass reaches, instead of the table's")]


@dataclass(frozen=True, slots=True)
class PlannedModels:
    """The models of a plan: options, before the keys of a deploy.yaml, before these defaults."""

    target: str
    draft_kind: SpeculationMethod
    draft: str | None = None
    tree_nodes: int = 0
    gpus: int = 1
    dtype: str = "bf16"
    draft_dtype: str | None = None
    max_draft_tokens: int = 8
    num_layers: int | None = None  # of the target's own weights that draft
    is_ahead: bool = False  # drafts are made while the target verifies

    @classmethod
    def of(cls, target: str, **options: str | int | None) -> PlannedModels:
        """Return the models of a target, which may be a deploy.yaml; options that are None are not given.

        Raises:
            ConfigError: the file is wrong, or there is no such kind of draft.
        """
        found: dict[str, Any] = _deployed(target) if Path(target).suffix in (".yaml", ".yml") else {"target": target}
        found |= {name: value for name, value in options.items() if value is not None}
        kind = found.setdefault("draft_kind", "model" if "draft" in found else "suffix")
        if kind not in DRAFT_KINDS:
            raise ConfigError(f"--draft-kind {kind!r} is unknown; use one of {', '.join(DRAFT_KINDS)}")
        return cls(**{**found, "draft_kind": SpeculationMethod(kind)})

    @property
    def target_shape(self) -> ModelShape:
        return ModelShape.of(self.target, self.dtype)

    @property
    def planned_draft(self) -> PlannedDraft | None:
        is_rounded = self.draft_kind is SpeculationMethod.SELF and self.num_layers is None
        dtype = self.draft_dtype or ("int4" if is_rounded else self.dtype)
        return PlannedDraft.of(self.draft_kind, self.draft, self.target_shape, dtype, self.num_layers)

    @property
    def num_positions(self) -> int:
        """The most positions of a draft; without drafts 0."""
        return 0 if self.draft_kind is SpeculationMethod.NONE else min(self.max_draft_tokens, 32)

    @property
    def description(self) -> str:
        trees = f", trees of up to {self.tree_nodes} nodes" if self.tree_nodes else ""
        ahead = " (mode async, planned as sync)" if self.is_ahead else ""
        return f"{self.draft_kind}{trees}{ahead}"


def _deployed(file: str) -> dict[str, Any]:
    """Return the fields of `PlannedModels` that a deploy.yaml sets."""
    config = read_deploy_file(Path(file)).config
    target, draft, speculation = config.target, config.draft, config.speculation
    is_narrow = target.quantization is not Quantization.NONE
    own = draft.head.quantization if draft.head is not None else draft.quantization
    found = {
        "target": resolve_model_path(target.path),
        "draft_kind": draft.kind,
        "tree_nodes": 0 if speculation.tree is None else speculation.tree.num_nodes,
        "gpus": target.tensor_parallel_size,
        "dtype": str(target.quantization) if is_narrow else "float32" if target.dtype is ModelDtype.FLOAT32 else "bf16",
        "draft_dtype": None if own is Quantization.NONE else str(own),
        "max_draft_tokens": speculation.max_num_tokens if speculation.adaptive else speculation.num_tokens,
        "num_layers": draft.num_layers,
        "is_ahead": speculation.is_ahead,
    }
    return found if draft.path is None else {**found, "draft": resolve_model_path(draft.path)}


def plan(
    target: _Target,
    draft: _Draft = None,
    draft_kind: _DraftKind = None,
    tree_nodes: _TreeNodes = None,
    hardware: Annotated[str, Option(help="a device of the table, such as l4, h100, h200, zen5-2core")] = "h100",
    gpus: _Gpus = None,
    dtype: _Dtype = None,
    draft_dtype: _DraftDtype = None,
    acceptance: _Acceptance = "0.7",
    max_draft_tokens: Annotated[int | None, Option(min=0, max=32, help="the largest K to consider; default: 8")] = None,
    prompt_tokens: Annotated[int, Option(min=1, help="prompt length of a request")] = 1000,
    output_tokens: Annotated[int, Option(min=1, help="output length of a request")] = 250,
    rate: Annotated[float | None, Option(min=1e-3, max=1e9, help="requests per second of all replicas")] = None,
    streams: _Streams = None,
    max_itl_ms: Annotated[float | None, Option(min=0.01, help="longest mean time between tokens of a stream")] = None,
    bandwidth: Annotated[float | None, Option(min=0.1, help="GB/s that a pass reaches, instead of the table's")] = None,
    tflops: _Tflops = None,
    price: Annotated[float | None, Option(min=0.0, help="USD per device and hour, instead of the table's")] = None,
) -> None:
    """Plan a deployment from sizes alone: expected speed-up, K, memory, replicas, cost, and their roofline.

    A deploy.yaml gives the models, their dtype, the kind of the drafts and the limits of their shape; options go first.
    """
    device = measured_device(DeviceSpec.of(hardware), bandwidth, tflops, price)
    given = PlannedModels.of(
        target,
        draft=draft,
        draft_kind=draft_kind,
        tree_nodes=tree_nodes,
        gpus=gpus,
        dtype=dtype,
        draft_dtype=draft_dtype,
        max_draft_tokens=max_draft_tokens,
    )
    chances = numbers_in(acceptance, "--acceptance", float, "give 0.7, or one per position: 0.8,0.7")
    deployment = ReplicaPlan(
        target=given.target_shape,
        draft=given.planned_draft,
        device=device,
        num_devices=given.gpus,
        acceptance=acceptance_per_position(chances, given.num_positions),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        num_tree_nodes=given.tree_nodes,
    )
    drafts = f"drafts: {given.description}"
    report(
        f"{given.target} in {given.dtype} on {given.gpus} x {device.name} ({device.source}, {device.date}), {drafts}"
    )
    _report_plan(deployment, streams, rate, max_itl_ms)


def _report_plan(deployment: ReplicaPlan, streams: int | None, rate: float | None, max_itl_ms: float | None) -> None:
    """Print the tables of a plan. Raises ConfigError if the replica has no room, or cannot meet the limits."""
    memory = memory_of(deployment)
    drafted = capacity_of(deployment, streams, rate, max_itl_ms)
    console.print(_memory_table(deployment, memory))
    numbers = sorted({n for n in (1, 8, 32, 128, drafted.speed_up.num_streams) if n <= memory.num_streams})
    speed_ups = [best_speed_up(deployment, number) for number in numbers]
    console.print(_speed_table(speed_ups))
    console.print(_roofline_table(deployment, speed_ups))
    console.print(_capacity_table(drafted, _plain_capacity(deployment, streams, rate, max_itl_ms)))
    report("An estimate: the acceptance is yours to measure (/metrics), and the prices are the table's unless given.")


def measured_device(
    device: DeviceSpec, bandwidth: float | None, tflops: float | None, price: float | None
) -> DeviceSpec:
    """Return a device with measured or quoted figures; a pass is assumed to reach them in full."""
    if bandwidth is not None:
        device = replace(device, bandwidth_gb_s=bandwidth, bandwidth_use=1.0)
    if tflops is not None:
        device = replace(device, peak_tflops={"bf16": tflops}, flops_use=1.0)
    if price is not None:
        device = replace(device, price_usd_per_hour=price)
    return device


def _plain_capacity(
    deployment: ReplicaPlan, streams: int | None, rate: float | None, max_itl_ms: float | None
) -> Capacity | None:
    """Return plain decoding without a draft in memory, or None if it cannot meet the latency limit."""
    try:
        return capacity_of(replace(deployment, draft=None), streams, rate, max_itl_ms, has_drafts=False)
    except ConfigError:
        return None


def _memory_table(deployment: ReplicaPlan, memory: Memory) -> Table:
    table = Table("memory of a replica", "GiB", "")
    share = memory.draft_bytes / memory.target_bytes
    table.add_row(
        "target's weights", f"{memory.target_bytes / GIB:.2f}", f"{deployment.target.num_weights / 1e9:.2f} B"
    )
    if deployment.draft is not None:
        note = f"{deployment.draft.whole.num_weights / 1e9:.2f} B: {share:.0%} of the target's"
        table.add_row("draft's weights", f"{memory.draft_bytes / GIB:.2f}", note)
        kv_share = deployment.draft.kv_bytes / deployment.target.kv_bytes
        table.add_row("draft's KV", "", f"{kv_share:.0%} of the target's, per token")
    table.add_row("left for KV", f"{memory.pool_bytes / GIB:.2f}", f"{memory.num_streams} streams of full length")
    return table


def _speed_table(speed_ups: list[SpeedUp]) -> Table:
    table = Table("streams", "shape", "K", "tokens per pass", "speed-up", "tokens/s", "plain")
    for speed_up in speed_ups:
        table.add_row(
            str(speed_up.num_streams),
            speed_up.shape if speed_up.num_drafts else "",
            f"{speed_up.num_drafts:.1f}",
            f"{speed_up.tokens_per_pass:.2f}",
            f"{speed_up.factor:.2f}" if speed_up.num_drafts else "no draft pays",
            f"{speed_up.tokens_per_s:.0f}",
            f"{speed_up.plain_tokens_per_s:.0f}",
        )
    return table


def _roofline_table(deployment: ReplicaPlan, speed_ups: list[SpeedUp]) -> Table:
    table = Table("a pass (* decides)", "ms", "reads GB", "ms", "TFLOP", "ms", "sums, host ms")
    for speed_up in speed_ups:
        number = speed_up.num_streams
        num_drafts = round(speed_up.num_drafts * number)
        _add_pass(table, f"{number} plain", deployment.target_pass(number))
        if num_drafts:
            _add_pass(table, f"{number} verifying {num_drafts}", deployment.target_pass(number, num_drafts))
        if deployment.draft is not None:
            _add_pass(table, f"{number} of the draft", deployment.draft_pass(number))
    return table


def _add_pass(table: Table, name: str, cost: PassCost) -> None:
    reads, computes = ("*", "") if cost.is_memory_bound else ("", "*")
    table.add_row(
        name,
        f"{1000 * cost.seconds:.2f}",
        f"{(cost.weight_bytes + cost.kv_bytes) / 1e9:.2f}",
        f"{1000 * cost.bytes_s:.2f}{reads}",
        f"{cost.flops / 1e12:.3f}",
        f"{1000 * cost.flops_s:.2f}{computes}",
        f"{1000 * cost.extra_s:.2f}",
    )


def _capacity_table(drafted: Capacity, plain: Capacity | None) -> Table:
    table = Table("a replica", "with drafts", "plain")

    def row(name: str, drafted_value: str, plain_value: str) -> None:
        table.add_row(name, drafted_value, plain_value if plain else "misses the bound")

    other = plain or drafted
    row("streams", str(drafted.speed_up.num_streams), str(other.speed_up.num_streams))
    row("output tokens/s, prompts read too", f"{drafted.output_tokens_per_s:.0f}", f"{other.output_tokens_per_s:.0f}")
    row("requests/s", f"{drafted.requests_per_s:.2f}", f"{other.requests_per_s:.2f}")
    row("reading a prompt (ms)", f"{1000 * drafted.prefill_s:.0f}", f"{1000 * other.prefill_s:.0f}")
    if drafted.num_replicas is not None:
        row("replicas, each 80% busy", str(drafted.num_replicas), str(other.num_replicas))
    row("USD per million output tokens", f"{drafted.usd_per_million_tokens:.2f}", f"{other.usd_per_million_tokens:.2f}")
    return table
