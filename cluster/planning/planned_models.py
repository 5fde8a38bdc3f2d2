"""The models of a plan and the limits of its drafts, from options or from a deploy.yaml."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.checkpoints import resolve_model_path
from cluster.deploy_file import read_deploy_file
from cluster.planning.planned_draft import PLANNED_KINDS, PlannedDraft
from cluster.planning.roofline import ModelShape
from engine.config import ModelDtype, Quantization
from protos.errors import ConfigError
from protos.messages import SpeculationMethod

_MAX_POSITIONS = 32


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
        return min(8 if self.max_draft_tokens is None else self.max_draft_tokens, _MAX_POSITIONS)

    @property
    def description(self) -> str:
        trees = f", trees of up to {self.tree_nodes} nodes" if self.tree_nodes else ""
        return f"{self._kind}{trees}"
