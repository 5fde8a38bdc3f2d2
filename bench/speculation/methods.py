"""The ways to speculate that the suite compares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from actors.channel.channel_proposer import ChannelProposer
from actors.settings import DraftSettings, PairSettings
from bench.contenders.draft_child import CORES, own_cores, start_draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    HeadConfig,
    HeadKind,
    ModelConfig,
    ModelDtype,
    SchedulerConfig,
    SpeculationConfig,
    TreeConfig,
)
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.guarded_proposer import NoProposer
from engine.proposer.hidden_state.factory import LiveHead
from engine.proposer.method_dispatcher import proposer_of
from engine.sampling.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.verifier.verifier import Verifier
from protos.messages import SpeculationMethod, VerifyMode

PLAIN = "plain"
_CHAIN = 4  # K of models and heads
_REPEAT = 8  # K of n-grams, at most K of suffixes
_NODES = 8  # of a tree
_DRAFT_CACHE = CacheConfig(memory_bytes=1 << 29)


class SharedTarget:
    """Weights, KV pool and prefix cache, shared by engines so that prompts are prefilled once.

    Each run has an engine of its own, which knows nothing of earlier texts but their KV.
    """

    def __init__(self, model: ModelConfig, cache: CacheConfig, head: HeadConfig | None = None) -> None:
        self._runner = ModelRunner(model, cache, head=head)
        self._blocks = BlockManager(self._runner.num_blocks, self._runner.block_size, self._runner.model_version)

    def engine(self, speculation: SpeculationConfig, make_proposer: Callable[[], Proposer | None]) -> EngineCore:
        """Return an engine whose drafts come from the target's head, or else from the made proposer."""
        scheduler = Scheduler(SchedulerConfig(), self._blocks, self._runner.max_model_len)
        head = None if self._runner.head is None else LiveHead(self._runner, speculation.tree)
        proposer = head or make_proposer() or NoProposer()
        return EngineCore(self._runner, scheduler, Speculation(proposer, Verifier(Sampler()), speculation, head))


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table; the target has `num_threads`, and `before_step` is called before each of its passes."""

    name: str
    target: SharedTarget
    speculation: SpeculationConfig
    make_proposer: Callable[[], Proposer | None] = lambda: None
    num_threads: int = len(CORES)
    before_step: Callable[[], None] = field(default=lambda: None)

    def engine(self) -> EngineCore:
        """Return a new engine, with this thread bound to the engine's cores."""
        torch.set_num_threads(self.num_threads)
        own_cores(CORES[: self.num_threads])
        return self.target.engine(self.speculation, self.make_proposer)


class Suite:
    """Builds methods by name; `stack` ends the processes that they start."""

    def __init__(self, target: Path, demo: Path, dtype: str, cache: CacheConfig, stack: ExitStack) -> None:
        """Use the draft and heads in `demo` for a `target` with the logits of the demo target."""
        self._target = ModelConfig(str(target), dtype=ModelDtype(dtype))
        self._demo, self._cache, self._stack = demo, cache, stack

    def methods(self, names: Seq[str]) -> list[Method]:
        """Return plain decoding, then the other methods of these names."""
        return [MAKERS[name](self) for name in (PLAIN, *(name for name in names if name != PLAIN))]

    @cached_property
    def headless(self) -> SharedTarget:
        """The target of all methods without a head."""
        return SharedTarget(self._target, self._cache)

    @cached_property
    def model(self) -> ModelProposer:
        """The draft model, in this process and with its threads."""
        return self._model(None)

    def plain(self) -> Method:
        return Method(PLAIN, self.headless, SpeculationConfig(num_tokens=0, max_num_tokens=0))

    def repetition(self, method: SpeculationMethod, is_adaptive: bool = False) -> Method:
        speculation = SpeculationConfig(_REPEAT, methods=(method,), adaptive=is_adaptive)
        return Method(_name(method, is_adaptive), self.headless, speculation, lambda: proposer_of((method,)))

    def chain(self, name: str, verify: VerifyMode) -> Method:
        return Method(name, self.headless, SpeculationConfig(_CHAIN, verify), lambda: self.model)

    def tree(self, is_adaptive: bool = False) -> Method:
        tree = TreeConfig(num_nodes=_NODES)
        model = self._model(tree)
        speculation = SpeculationConfig(_NODES, tree=tree, adaptive=is_adaptive)
        return Method(_name("draft, tree", is_adaptive), self.headless, speculation, lambda: model)

    def adaptive(self) -> Method:
        speculation = SpeculationConfig(_CHAIN, adaptive=True)
        return Method(_name("draft", True), self.headless, speculation, lambda: self.model)

    def hybrid(self, is_adaptive: bool = False) -> Method:
        methods = (SpeculationMethod.HYBRID,)
        speculation = SpeculationConfig(_CHAIN, methods=methods, adaptive=is_adaptive)
        return Method(
            _name("hybrid", is_adaptive), self.headless, speculation, lambda: proposer_of(methods, self.model)
        )

    def ahead(self) -> Method:
        """Return a draft with a process and a core of its own; the target has one core less."""
        channel = self._channel(is_ahead=True)
        num_threads = max(1, len(CORES) - 1)
        speculation = SpeculationConfig(_CHAIN)
        return Method("draft, async", self.headless, speculation, lambda: channel, num_threads, channel.flush)

    def head(self, kind: HeadKind) -> Method:
        target = SharedTarget(self._target, self._cache, HeadConfig(kind, str(self._head_folder(kind))))
        return Method(kind, target, SpeculationConfig(_CHAIN, methods=(SpeculationMethod(kind),)))

    def _head_folder(self, kind: HeadKind) -> Path:
        """Return the demo's head, with the numbers that its layers have in a padded target."""
        folder = self._demo / kind
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        places = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        scale = self._num_layers(Path(self._target.path)) // self._num_layers(self._demo / "target")
        if places is None or scale == 1:
            return folder
        padded = Path(self._target.path) / kind
        shutil.copytree(folder, padded, dirs_exist_ok=True)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [scale * place for place in places]
        (padded / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return padded

    def _num_layers(self, folder: Path) -> int:
        return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])

    def _channel(self, *, is_ahead: bool) -> ChannelProposer:
        model = ModelConfig(str(self._demo / "draft"), dtype=ModelDtype.FLOAT32, num_threads=1)
        engine = EngineConfig(self._target, speculation=SpeculationConfig(_CHAIN))
        draft = DraftSettings(SpeculationMethod.MODEL, model, _DRAFT_CACHE, is_ahead)
        return start_draft(PairSettings(engine, draft), self._stack)

    def _model(self, tree: TreeConfig | None) -> ModelProposer:
        model = ModelConfig(str(self._demo / "draft"), dtype=ModelDtype.FLOAT32)
        return ModelProposer.from_config(model, _DRAFT_CACHE, SchedulerConfig(), tree=tree)


def _name(name: str, is_adaptive: bool) -> str:
    return f"{name}, adaptive" if is_adaptive else name


MAKERS: dict[str, Callable[[Suite], Method]] = {
    PLAIN: Suite.plain,
    "ngram": partial(Suite.repetition, method=SpeculationMethod.NGRAM),
    "suffix": partial(Suite.repetition, method=SpeculationMethod.SUFFIX),
    "suffix, adaptive": partial(Suite.repetition, method=SpeculationMethod.SUFFIX, is_adaptive=True),
    "draft": partial(Suite.chain, name="draft", verify=VerifyMode.COUPLED),
    "draft, rejection": partial(Suite.chain, name="draft, rejection", verify=VerifyMode.REJECTION),
    "draft, block": partial(Suite.chain, name="draft, block", verify=VerifyMode.BLOCK),
    "draft, tree": Suite.tree,
    "draft, tree, adaptive": partial(Suite.tree, is_adaptive=True),
    "draft, async": Suite.ahead,
    "draft, adaptive": Suite.adaptive,
    "hybrid": Suite.hybrid,
    "hybrid, adaptive": partial(Suite.hybrid, is_adaptive=True),
    "medusa": partial(Suite.head, kind=HeadKind.MEDUSA),
    "eagle3": partial(Suite.head, kind=HeadKind.EAGLE3),
}
