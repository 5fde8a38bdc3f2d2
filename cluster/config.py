"""The schema of deploy.yaml's `args`, the only place where a deployment is configured.

Every key is checked once, at start. An unknown key is refused, with the nearest valid one; so is an unsupported value,
with the supported ones. Nothing is ignored. The rest of the code gets frozen dataclasses.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError

from cluster.schema import REMOVED, Section
from cluster.schema.models import (
    MODEL_KINDS,
    DraftSection,
    NamedDrafts,
    SpeculationSection,
    TargetSection,
    quoted,
)
from cluster.schema.replicas import (
    CacheSection,
    IngressSection,
    PairSection,
    PrefillSection,
    RouterSection,
    SchedulerSection,
    TuneSection,
)
from engine.config import EngineConfig, StepConfig
from protos.errors import ConfigError
from protos.messages import SpeculationMethod

_TUNED = (SpeculationMethod.MODEL, SpeculationMethod.EAGLE3, SpeculationMethod.MEDUSA)


class DeployConfig(Section):
    """All of deploy.yaml's `args`.

    `drafts` are additional draft models by name, computed by the settings of `draft`. The name is a method of requests.
    """

    model_id: str = Field(min_length=1)
    target: TargetSection
    draft: DraftSection = DraftSection(kind=SpeculationMethod.NONE)
    drafts: NamedDrafts = Field(default={})
    speculation: SpeculationSection = SpeculationSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    pair: PairSection = PairSection()
    prefill: PrefillSection = PrefillSection()
    router: RouterSection = RouterSection()
    ingress: IngressSection = IngressSection()
    tune: TuneSection = TuneSection()

    def to_engine(self) -> EngineConfig:
        """Return a pair's configured engine; paths are not checked yet, and unset threads stay unset."""
        return EngineConfig(
            model=replace(self.target.to_engine(), chat_template=self.ingress.chat_template_text),
            cache=self.cache.to_engine(),
            scheduler=self.scheduler.to_engine(),
            speculation=self.speculation.with_methods(self.offered_methods),
            head=self.draft.head,
            min_remote_prefill_tokens=self.prefill.min_remote_prefill_tokens,
            log=None if self.tune.folder is None else str(self.tune.folder),
        )

    @property
    def cores_per_gpu(self) -> int:
        """The cores that a pair gets for each GPU that it demands."""
        return self.target.num_threads or 4

    def conflicts(self) -> Iterator[str]:
        num_ranks, gpu = self.target.tensor_parallel_size, self.draft.gpu
        if isinstance(gpu, int) and gpu >= num_ranks:
            yield (
                f"draft.gpu is {gpu}, and the target's ranks are 0 to {num_ranks - 1} "
                f"(target.tensor_parallel_size {num_ranks}); name one of them, 'own' or 'auto'"
            )
        if self.tune.auto and self.draft.kind not in _TUNED:
            yield (
                f"tune.auto trains drafts of kind {quoted(_TUNED)}, and draft.kind is '{self.draft.kind}'; "
                "change it, or remove auto"
            )
        if self.drafts and self.draft.kind is SpeculationMethod.NONE:
            yield "drafts are additional to draft, and draft.kind is 'none'; move the first of them to draft"
        default = self.speculation.method
        if default not in (None, SpeculationMethod.AUTO, *self._possible_methods):
            yield (
                f"speculation.method '{default}' is not available with draft.kind '{self.draft.kind}'; "
                f"use one of {', '.join(self._possible_methods)}, or another draft.kind"
            )
        if self.speculation.tree is not None and not self.draft.kind.can_branch:
            yield (
                f"speculation.tree needs a draft model or head, and draft.kind is '{self.draft.kind}'; "
                f"set draft.kind to {quoted(MODEL_KINDS)}, or remove the tree"
            )
        steps = self.speculation.steps
        if steps is not None and self.draft.kind is not SpeculationMethod.MODEL:
            yield (
                f"speculation.steps needs a draft model, which can write a step alone, and draft.kind is "
                f"'{self.draft.kind}'; set draft.kind to 'model', or remove the steps"
            )
        if steps is not None and self.scheduler.max_tokens_per_step <= (most := StepConfig().max_step_tokens):
            yield (
                f"speculation.steps has steps of {most} tokens, and scheduler.max_tokens_per_step is "
                f"{self.scheduler.max_tokens_per_step}; raise it, or remove the steps"
            )
        is_ahead = self.speculation.is_ahead
        if is_ahead and isinstance(gpu, int) and num_ranks == 1:
            yield (
                f"speculation.mode 'async' drafts while the target verifies, and draft.gpu {gpu} is the target's, "
                "where they take turns in one process; set draft.gpu to 'own', or the mode to 'sync'"
            )
        if is_ahead and not self.draft_models:
            yield (
                f"speculation.mode 'async' drafts while the target verifies, and with draft.kind '{self.draft.kind}' "
                f"{_why_not_ahead(self.draft)}; set draft.kind to 'model', name a model in drafts, or set the mode to "
                "'sync'"
            )

    @property
    def offered_methods(self) -> tuple[str, ...]:
        """The methods that a request may choose, the default first; plain decoding is always among them."""
        default = self.speculation.method or self.draft.kind
        return tuple(dict.fromkeys((default, *self._possible_methods)))

    @property
    def _possible_methods(self) -> tuple[str, ...]:
        """The draft's method, the other drafts', the draft's with suffixes, and the methods that need only text."""
        kind = self.draft.kind
        hybrid = (SpeculationMethod.HYBRID,) if kind.can_branch else ()
        free = (SpeculationMethod.SUFFIX, SpeculationMethod.NGRAM, SpeculationMethod.NONE)
        return tuple(dict.fromkeys((kind, *self.drafts, *hybrid, *free)))

    @property
    def draft_models(self) -> dict[str, str]:
        """The paths, by method, of the drafts that are models, with weights and a KV pool of their own."""
        own = {str(self.draft.kind): str(self.draft.path)} if self.draft.kind is SpeculationMethod.MODEL else {}
        return own | self.drafts

    @property
    def draft_paths(self) -> tuple[str, ...]:
        """The checkpoints of all drafts, heads included."""
        own = () if self.draft.path is None else (self.draft.path,)
        return (*own, *self.drafts.values())


def _why_not_ahead(draft: DraftSection) -> str:
    """Return why a draft without a model of its own cannot be made before the verdict."""
    if draft.kind is SpeculationMethod.NONE:
        return "there are no drafts"
    if draft.kind is SpeculationMethod.SELF:
        return "the target's own weights would draft, which are verifying"
    if draft.head is not None:
        return "a head would draft from the hidden states that this pass computes"
    if draft.kind is SpeculationMethod.PYTHON:
        return "your class drafts after each verdict"
    return "drafts come from the committed text, in no time worth hiding"


def parse_config(args: dict[str, Any], source: str = "deploy.yaml") -> DeployConfig:
    """Check the `args` of `source` whole and report every mistake at once.

    Raises:
        ConfigError: one line per mistake: the key's path, the mistake, and the remedy.
    """
    try:
        return DeployConfig.model_validate(args)
    except ValidationError as error:
        mistakes = [_explain(each["type"], each["loc"], each["msg"], each["input"]) for each in error.errors()]
        raise ConfigError(f"{source} is wrong:\n" + "\n".join(f"  {mistake}" for mistake in mistakes)) from None


def _explain(kind: str, path: tuple[int | str, ...], message: str, value: Any) -> str:
    where = ".".join(("args", *map(str, path)))
    if kind == "extra_forbidden":
        name = ".".join(each for each in map(str, path) if not each.isdigit())
        if instead := REMOVED.get(name):
            return f"{where}: removed in 0.3.0: {instead}; delete the line"
        return unknown_key(where, str(path[-1]), _keys_at(path[:-1]))
    if kind == "missing":
        return f"{where}: missing; it has no default"
    if kind == "value_error":
        return f"{where}: {message.removeprefix('Value error, ')}"
    return f"{where}: {message[0].lower()}{message[1:]}, and it is {value!r:.200}"


def unknown_key(where: str, key: str, valid: Sequence[str]) -> str:
    """Return the message for an unknown key at the path `where`, with the nearest of the `valid` ones."""
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]!r}?" if close else f"valid keys here are {', '.join(valid)}"
    return f"{where}: unknown key; {remedy}"


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = DeployConfig
    for key in (each for each in path if isinstance(each, str)):  # a number is a place in a list
        annotation = section.model_fields[key].annotation
        candidates = (annotation, *get_args(annotation))
        section = next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))
    return list(section.model_fields)
