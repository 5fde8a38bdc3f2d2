"""The process of a `DraftActor`, and checks of models on the node where a pair or a draft would start."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from actors.draft.code_draft import check_code
from actors.draft.draft_link import DRAFT_SOCKET
from actors.draft.draft_server import DraftServer
from actors.process.actor_thread import without_compiler
from actors.process.frames import FrameListener
from actors.settings import DraftSettings, PairSettings
from actors.shell_messages import DraftChannelStats
from engine.kv_cache.state_pool import check_draft, check_target, num_states
from engine.model.checkpoint.completeness import refuse_not_finite
from engine.model.cuda_graphs.buckets import sized
from engine.model.loader import load_config
from engine.model.runner.outline import check_outline
from engine.proposer import GuardedProposer
from engine.proposer.draft_model.ahead_drafter import AheadDrafter
from engine.proposer.draft_model.loader import TextProposer, load_drafter
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.translation import SameVocabulary, choose_vocabulary
from protos.errors import ConfigError, RequestError


@without_compiler()
def load_draft(settings: PairSettings) -> tuple[ModelProposer | TextProposer, AheadDrafter | None]:
    """Load the pair's draft model, and with `mode: async` its drafter ahead of verification.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the target.
    """
    engine, draft = settings.engine, settings.draft
    assert draft.model is not None, "the pair has a draft model"
    assert draft.cache is not None, "a draft model has a pool"
    # The draft prefills four times the target's tokens per step, and still ends sooner.
    limits = replace(engine.scheduler, max_tokens_per_step=4 * engine.scheduler.max_tokens_per_step)
    return load_drafter(
        replace(draft.model, graphs=sized(draft.model.graphs, limits, engine.speculation)),
        replace(draft.cache, num_states=num_states(engine)),
        limits,
        engine.model.path,
        has_trees=engine.speculation.tree_nodes > 0,
        is_ahead=draft.is_ahead,
    )


def serve_draft(settings: PairSettings, folder: Path, is_ready: Callable[[], None]) -> None:
    """Load the draft, call `is_ready` once the target can connect, and draft until the process is killed.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the target.
    """
    proposer, ahead = load_draft(settings)
    server = DraftServer(
        FrameListener(folder / DRAFT_SOCKET),
        proposer,
        proposer.model_version,
        ahead,
        lambda: proposer.counts,
    )
    is_ready()
    server.run()


class InProcessDraft(GuardedProposer):
    """The draft model of a pair without a `DraftActor`, with the interface of `ChannelProposer`."""

    def __init__(self, settings: PairSettings) -> None:
        """Load the draft.

        Raises:
            ConfigError: the model cannot be loaded, or does not fit the target.
        """
        self._drafter, _ = load_draft(settings)
        super().__init__(self._drafter)

    @property
    def stats(self) -> DraftChannelStats:
        """Whether it drafts; its time is part of the engine's. May be read from any thread."""
        return DraftChannelStats(is_connected=self.is_on, num_connections=1, translated=self._drafter.counts)

    def flush(self) -> None:
        """Do nothing, since no message is queued."""


def _refuse_other_vocabulary(settings: PairSettings, path: str) -> None:
    """Raise ConfigError unless the candidate's tokens map to the target's as the present draft's tokens do."""
    target, draft = settings.engine.model.path, settings.draft
    assert draft.model is not None, "the pair has a draft model"
    config = load_config(path)
    needs_ids = draft.is_ahead or settings.engine.speculation.tree_nodes > 0
    usual = choose_vocabulary(target, draft.model.path, needs_ids=needs_ids)
    found = choose_vocabulary(target, path, needs_ids=needs_ids)
    if usual.pair is None:
        draft_size, target_size = int(config.get_text_config().vocab_size), usual.target_tokens.vocab_size
        if found.pair is not None:
            raise ConfigError(
                f"its vocabulary ({draft_size} tokens) differs from the target's ({target_size}); give a draft with "
                "the target's tokenizer, or set draft.path in deploy.yaml and deploy again"
            )
    elif found.vocabulary is not usual.vocabulary:
        raise ConfigError(
            f"it needs the vocabulary translation {str(found.vocabulary)!r}, and the present draft uses "
            f"{str(usual.vocabulary)!r}; set draft.path in deploy.yaml and deploy again"
        )


def _refuse_unloadable(settings: PairSettings, path: str) -> None:
    """Load the candidate as a draft process would, with a small pool.

    A GPU has no room for two drafts, so there the candidate's start is the check.
    """
    model, cache = settings.draft.model, settings.draft.cache
    assert model is not None, "the pair has a draft model"
    assert cache is not None, "a draft model has a pool"
    if model.device.startswith("cuda"):
        return
    # Few blocks, and the states of one sequence: nothing is drafted here.
    pool = replace(cache, num_blocks=8, memory_bytes=None, gpu_memory_utilization=None)
    chosen = settings.with_draft_at(path)
    limits = replace(chosen.engine.scheduler, max_num_sequences=1)
    load_draft(
        replace(chosen, engine=replace(chosen.engine, scheduler=limits), draft=replace(chosen.draft, cache=pool))
    )


@contextmanager
def checked(path: str) -> Iterator[Path]:
    """Yield the folder of a candidate. A ConfigError of the check becomes a RequestError with its reason."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise RequestError(
            f"The draft {path!r} has no config.json on node {socket.gethostname()}; give the absolute path of a "
            "checkpoint folder that exists on every node with a pair.",
            param="path",
        )
    try:
        yield folder
    except ConfigError as error:
        raise RequestError(f"The draft {path!r} is refused: {error.message}.", param="path") from None


def check_candidate(settings: PairSettings, path: str) -> None:
    """Check that the checkpoint at `path` can be the draft of a pair with these settings.

    The check covers files, weight values, vocabulary and memory. On a CPU the draft is loaded whole.

    Raises:
        RequestError: it cannot; the message has the reason.
    """
    with checked(path) as folder:
        refuse_not_finite(folder)
        _refuse_other_vocabulary(settings, path)
        _refuse_unloadable(settings, path)


def check_start(settings: PairSettings, *, is_on_gpu: bool) -> list[str]:
    """Check that a pair can start, as far as the headers of its files show; return notes about the target.

    Raises:
        ConfigError: the target, its head, a draft or its code cannot be served here, or they do not fit each other.
    """
    engine = settings.engine
    max_model_len = engine.scheduler.max_model_len
    notes, keeps_states = check_outline(engine.model, engine.cache, max_model_len, engine.head, is_on_gpu=is_on_gpu)
    if keeps_states:
        check_target(engine)
    if settings.draft.code:
        check_code(settings.draft.code)
    for each in settings.of_drafts.values():
        _check_draft(settings, each.draft, is_on_gpu=is_on_gpu)
    return notes


def _check_draft(settings: PairSettings, draft: DraftSettings, *, is_on_gpu: bool) -> None:
    assert draft.model is not None, "the draft is a model"
    assert draft.cache is not None, "a draft model has a pool"
    _, keeps_states = check_outline(draft.model, draft.cache, is_on_gpu=is_on_gpu)
    if keeps_states:
        check_draft(draft.model.path, has_trees=settings.engine.speculation.tree_nodes > 0)
    choice = choose_vocabulary(settings.engine.model.path, draft.model.path)
    if choice.pair is None:
        draft_size = int(load_config(draft.model.path).get_text_config().vocab_size)
        SameVocabulary(draft_size, choice.target_tokens.vocab_size)
