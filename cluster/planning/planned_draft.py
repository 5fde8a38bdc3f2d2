"""The models of a plan, from options or a deploy.yaml: the target, and a draft as published or of the usual size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.checkpoints import resolve_model_path
from cluster.deploy_file import read_deploy_file
from cluster.planning.roofline import ModelShape
from cluster.schema.models import DraftMode
from engine.accounting.acceptance import RANK_ACCEPTANCE
from engine.config import MASK_KEYS, ModelDtype, Quantization
from engine.model.checkpoint.weight_files import read_config, read_mapping
from protos.errors import ConfigError
from protos.messages import SpeculationMethod

PLANNED_KINDS = tuple(
    method for method in SpeculationMethod if method not in (SpeculationMethod.HYBRID, SpeculationMethod.AUTO)
)
_ONE_PASS = (SpeculationMethod.PEAGLE, SpeculationMethod.DFLASH, SpeculationMethod.DSPARK)
_USUAL_LAYERS = {SpeculationMethod.DFLASH: 5, SpeculationMethod.DSPARK: 5}  # of published heads; others have 1


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft whose passes read `shape`.

    Attributes:
        is_one_pass: all drafts of a sequence come from one pass over a row for each.
        keeps_kv: it reads the prompts, and has keys and values of its own.
        max_drafts: the most drafts in a pass; None without a limit.
        own: its weights and layers in addition to the target; None for all of `shape`.
    """

    shape: ModelShape
    is_one_pass: bool = False
    keeps_kv: bool = True
    max_drafts: int | None = None
    own: ModelShape | None = None

    @classmethod
    def of(
        cls, kind: SpeculationMethod, path: str | None, target: ModelShape, dtype: str, num_layers: int | None = None
    ) -> PlannedDraft | None:
        """Return a draft of `kind` for `target`; None if it comes from the text and costs nothing.

        A head without a `path` has the usual size of its kind. `num_layers` are of the target's own weights.

        Raises:
            ConfigError: a file is unreadable or lacks sizes, or a draft model has no path.
        """
        if kind is SpeculationMethod.SELF:
            shape = replace(target, dtype=dtype, num_layers=num_layers or target.num_layers)
            own = _without_tables(target, 0) if dtype == target.dtype else None  # none of its own
            return cls(shape, keeps_kv=False, own=own)
        if kind is SpeculationMethod.MEDUSA:
            return _medusa(_config_of(path), target)
        if kind is SpeculationMethod.MTP:
            # A pass reads one of the layers, and a prompt is read by all.
            count = 1 if path else num_layers or target.num_mtp_layers
            return cls(replace(target, num_layers=1), own=_without_tables(target, count))
        if kind is SpeculationMethod.MODEL:
            if path is None:
                raise ConfigError("a plan with a draft model needs --draft, its folder or a public model")
            is_parallel = not _config_of(path).keys().isdisjoint(MASK_KEYS)
            return cls(ModelShape.of(path, dtype), is_one_pass=is_parallel)
        return _head(kind, path, replace(target, dtype=dtype)) if kind.can_branch else None

    @property
    def whole(self) -> ModelShape:
        """The weights that it adds to memory, and the layers that read prompts."""
        return self.own or self.shape

    @property
    def kv_bytes(self) -> float:
        """Bytes of its own keys and values per token."""
        return self.whole.kv_bytes if self.keeps_kv else 0.0


def _without_tables(target: ModelShape, num_layers: int) -> ModelShape:
    """Return layers like the target's, under its embedding and head."""
    return replace(target, num_layers=num_layers, vocab_size=0)


def _config_of(path: str | None) -> Mapping[str, Any]:
    """Return a draft's config.json; empty for a draft that is not here."""
    if path is None or not Path(path).expanduser().exists():
        return {}
    file = Path(path).expanduser()
    return read_config(file) if file.is_dir() else read_mapping(file)


def _head(kind: SpeculationMethod, path: str | None, target: ModelShape) -> PlannedDraft:
    config = _config_of(path)
    layer = config.get("transformer_layer_config") or config
    if layer:
        layer = {**layer, "vocab_size": config.get("draft_vocab_size") or layer.get("vocab_size")}
        shape = ModelShape.from_config(path or kind, layer, target.dtype)
    else:
        dense = replace(target, num_experts=1, num_experts_per_token=1)
        shape = replace(dense, num_layers=_USUAL_LAYERS.get(kind, 1))
    section = {**config, **(config.get("dflash_config") or {})}
    num_rows = section.get("block_size")
    is_usual = kind is SpeculationMethod.DSPARK and not section.get("dspark_bonus_anchor")
    is_anchor_drafting = bool(section.get("sample_from_anchor", is_usual))  # the first row drafts too
    max_drafts = num_rows - (not is_anchor_drafting) if isinstance(num_rows, int) and num_rows > 1 else None
    return PlannedDraft(replace(shape, has_tied_head=True), kind in _ONE_PASS, max_drafts=max_drafts)


def _medusa(config: Mapping[str, Any], target: ModelShape) -> PlannedDraft:
    """Heads have no attention: as many products of the target's width as their blocks and functions to logits."""
    num_heads = config.get("medusa_num_heads") or config.get("num_heads") or 5  # as most published Medusas
    num_layers = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
    width = num_heads * (target.vocab_size + num_layers * target.hidden_size)
    shape = replace(target, num_layers=0, vocab_size=width, has_tied_head=True)
    return PlannedDraft(shape, is_one_pass=True, keeps_kv=False, max_drafts=num_heads)


def tree_nodes(acceptance: tuple[float, ...], num_nodes: int) -> list[tuple[float, int]]:
    """Return the chance and the depth of each node of the best tree, likeliest first.

    `acceptance[d]` is the chance of a first child at depth d if its parent is accepted; its siblings share the rest
    in the proportions of `RANK_ACCEPTANCE`.
    """
    rest = 1.0 - RANK_ACCEPTANCE[0]
    levels = [(chance, *((1.0 - chance) * share / rest for share in RANK_ACCEPTANCE[1:])) for chance in acceptance]
    nodes: list[tuple[float, int]] = []
    candidates = [(1.0, 0)]  # parents
    for children in levels:
        grown = [(value * chance, depth + 1) for value, depth in candidates for chance in children]
        candidates = sorted(grown, reverse=True)[:num_nodes]
        nodes += candidates
    # A child is never likelier than its parent, so the best nodes are a tree; of equal ones the shallower is first.
    return sorted(nodes, key=lambda node: (-node[0], node[1]))[:num_nodes]


@dataclass(frozen=True, slots=True)
class PlannedModels:
    """Options of `outrider plan`; None for those that were not given."""

    target: str
    draft: str | None
    draft_kind: str | None
    tree_nodes: int | None
    gpus: int | None
    dtype: str | None
    draft_dtype: str | None
    max_draft_tokens: int | None
    num_layers: int | None = None  # of the target's own weights that draft
    is_ahead: bool = False  # drafts are made while the target verifies

    def completed(self) -> PlannedModels:
        """Return these options, completed by the deploy.yaml that the target may be.

        Raises:
            ConfigError: the file is wrong, or there is no such kind of draft.
        """
        found = self._deployed() if Path(self.target).suffix in (".yaml", ".yml") else self
        if found.draft_kind is None:
            kind = SpeculationMethod.MODEL if found.draft else SpeculationMethod.SUFFIX
            return replace(found, draft_kind=kind)
        if found.draft_kind not in PLANNED_KINDS:
            raise ConfigError(f"--draft-kind {found.draft_kind!r} is unknown; use one of {', '.join(PLANNED_KINDS)}")
        return found

    def _deployed(self) -> PlannedModels:
        config = read_deploy_file(Path(self.target)).config
        target, draft, speculation = config.target, config.draft, config.speculation
        is_narrow = target.quantization is not Quantization.NONE
        dtype = str(target.quantization) if is_narrow else "float32" if target.dtype is ModelDtype.FLOAT32 else "bf16"
        own = draft.head.quantization if draft.head is not None else draft.quantization
        num_tokens = speculation.max_num_tokens if speculation.adaptive else speculation.num_tokens
        nodes = 0 if speculation.tree is None else speculation.tree.num_nodes
        return PlannedModels(
            resolve_model_path(target.path),
            self.draft or (draft.path and resolve_model_path(draft.path)),
            self.draft_kind or draft.kind,
            nodes if self.tree_nodes is None else self.tree_nodes,
            self.gpus or target.tensor_parallel_size,
            self.dtype or dtype,
            self.draft_dtype or (None if own is Quantization.NONE else str(own)),
            num_tokens if self.max_draft_tokens is None else self.max_draft_tokens,
            draft.num_layers,
            speculation.mode is DraftMode.ASYNC,
        )

    @property
    def target_shape(self) -> ModelShape:
        return ModelShape.of(self.target, self.dtype or "bf16")

    @property
    def _kind(self) -> SpeculationMethod:
        assert self.draft_kind is not None, "they are completed"
        return SpeculationMethod(self.draft_kind)

    @property
    def planned_draft(self) -> PlannedDraft | None:
        usual = self.dtype or "bf16"
        if self._kind is SpeculationMethod.SELF and self.num_layers is None:
            usual = "int4"
        dtype = self.draft_dtype or usual
        return PlannedDraft.of(self._kind, self.draft, self.target_shape, dtype, self.num_layers)

    @property
    def num_positions(self) -> int:
        """The most positions of a draft; without drafts 0."""
        if self._kind is SpeculationMethod.NONE:
            return 0
        return min(8 if self.max_draft_tokens is None else self.max_draft_tokens, 32)

    @property
    def description(self) -> str:
        trees = f", trees of up to {self.tree_nodes} nodes" if self.tree_nodes else ""
        ahead = " (mode async, planned as sync)" if self.is_ahead else ""
        return f"{self._kind}{trees}{ahead}"
