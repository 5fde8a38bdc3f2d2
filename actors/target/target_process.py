"""The process of a `TargetActor`: the target model, its engine, its draft or the draft's socket, and the shell's."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from actors.draft.channel_proposer import ChannelProposer
from actors.draft.code_draft import CodeDraft
from actors.draft.draft_link import DRAFT_SOCKET
from actors.draft.draft_process import InProcessDraft
from actors.kv_transport import PrefillTransport, choose_carrier
from actors.process.actor_thread import without_compiler
from actors.process.frames import POLL_S, SEND_TIMEOUT_S, FrameConnection, FrameListener
from actors.settings import PairSettings, read_choice
from actors.shell_messages import (
    TARGET_SOCKET,
    DraftChannelStats,
    HeadAnswer,
    HeadFailure,
    OrderHead,
    Ping,
    Pong,
    Refused,
    ShellToTarget,
    Snapshot,
    Status,
    StepOutput,
    TargetReady,
)
from actors.target.engine_loop import EngineLoop, StatusReporter
from actors.target.head_exchange import HeadExchange
from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.kv_cache.block_manager import BlockManager
from engine.model.draft_heads.checkpoint import head_version
from engine.model.loader import model_version
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import TensorParallelRunner
from engine.native.library import native_digest, native_instructions
from engine.proposer.method_dispatcher import proposer_of
from engine.sequence.sequence import TokenBlocks
from protos.block_keys import PROBE_SALT, probe_token_ids
from protos.frames import ConnectionLostError
from protos.messages import SpeculationMethod
from protos.served_model import FingerprintPart, ModelCard, digest, write_fingerprint

if TYPE_CHECKING:  # takes a second to import, and not every process calls a deployment
    from ray.serve.handle import DeploymentHandle

    from actors.target.kv_event_publisher import KVEventPublisher

logger = logging.getLogger(__name__)


class ShellServer:
    """Serves one shell at a time. When a shell disconnects or does not read for five seconds, its requests are aborted.

    `run` needs its own thread. The engine's thread calls `emit`, which waits only for the socket. `heads` carries out
    orders about the head; the owner sets it if that can be exchanged.
    """

    def __init__(
        self, listener: FrameListener, card: ModelCard, draft_stats: Callable[[], dict[str, DraftChannelStats]]
    ) -> None:
        self._listener = listener
        self._card = card
        self._draft_stats = draft_stats
        self.heads: HeadExchange | None = None
        self._connection: FrameConnection[ShellToTarget] | None = None
        self._is_closing = threading.Event()

    def run(self, loop: EngineLoop) -> None:
        """Accept and serve shells until `close`."""
        while not self._is_closing.is_set():
            connection = self._listener.accept(ShellToTarget, POLL_S)
            if connection is not None:
                self._serve(connection, loop)
        self._listener.close()

    def emit(self, message: StepOutput | Refused | Status | Snapshot | HeadAnswer) -> None:
        """Send to the shell, or drop the message if no shell is connected."""
        connection = self._connection
        if connection is None:
            return
        try:
            connection.send(message, SEND_TIMEOUT_S)
        except ConnectionLostError:
            connection.close()  # the receiving thread notices and aborts the requests

    def close(self) -> None:
        """Make `run` return within half a second."""
        self._is_closing.set()

    def _serve(self, connection: FrameConnection[ShellToTarget], loop: EngineLoop) -> None:
        try:
            connection.send(TargetReady(self._card), SEND_TIMEOUT_S)
            self._connection = connection
            while not self._is_closing.is_set():
                for message in connection.receive(POLL_S):
                    self._handle(message, connection, loop)
        except ConnectionLostError as error:
            logger.info("shell left: %s", error)
        finally:
            self._connection = None
            connection.close()
            loop.abort_all()

    def _handle(self, message: ShellToTarget, connection: FrameConnection[ShellToTarget], loop: EngineLoop) -> None:
        if isinstance(message, Ping):
            head = None if self.heads is None else self.heads.running
            connection.send(Pong(loop.stalled_s, loop.stats, self._draft_stats(), head), SEND_TIMEOUT_S)
        elif isinstance(message, OrderHead):
            assert self.heads is not None, "the shell orders no other exchanges"
            self.heads.carry_out(message)
        else:
            loop.submit(message)


def serve_target(
    settings: PairSettings, folder: Path, prefill: DeploymentHandle[Any] | None, is_ready: Callable[[], None]
) -> None:
    """Load the target, call `is_ready` once the shell can connect, and compute until the process is killed.

    `prefill`, if given, computes long prompts when that is faster.

    Raises:
        ConfigError: the model, its head, the pool or the limits do not fit.
    """
    # Connect the sources of drafts and of KV from prefill replicas.
    drafts = _drafts(settings, folder)
    own = drafts.get(SpeculationMethod.MODEL)
    others = {method: draft for method, draft in drafts.items() if draft is not own}
    transport = None if prefill is None else PrefillTransport(prefill, choose_carrier(settings.kv_transport))
    methods = settings.engine.speculation.methods
    proposer = None if settings.engine.head else proposer_of(methods, own, others=others)

    def load(engine: EngineConfig) -> EngineCore:
        with without_compiler():
            return load_engine(engine, proposer, transport, step_writer=own, models=others)

    # Load the engine; a head that an admin chose last takes the place of the deployed one, unless it fails.
    core, engine, failure = _with_chosen_head(settings.engine, folder, load)
    deployed = settings.engine.head
    settings = replace(settings, engine=engine)
    _watch(core, drafts, settings.kv_events)
    # Serve the shell: its server and the engine loop exchange messages in both directions.
    server = ShellServer(FrameListener(folder / TARGET_SOCKET), _card(core, settings), partial(_stats, drafts))
    reporter = StatusReporter(server.emit, core.blocks)
    core.on_drafted = lambda drafts: server.emit(StepOutput(tuple(drafts)))
    loop = EngineLoop(core, server.emit, lambda: _flush(drafts), reporter)
    if engine.head is not None and deployed is not None and deployed.path is not None:
        server.heads = HeadExchange(
            core,
            engine.head,
            deployed.path,
            failure,
            folder,
            has_prefill=transport is not None,
            submit=loop.submit,
            emit=server.emit,
        )
    if transport is not None:
        transport.open(_runner(core).kv_layout, _runner(core).device, on_news=loop.wake)
    threading.Thread(target=_serve_shells, args=(server, loop), name="shell-server", daemon=True).start()
    is_ready()
    loop.run()


def _with_chosen_head(
    engine: EngineConfig, folder: Path, load: Callable[[EngineConfig], EngineCore]
) -> tuple[EngineCore, EngineConfig, HeadFailure | None]:
    """Load with the head that served last in the pair of `folder`, or with deploy.yaml's if that fails.

    Return also the head that this process should have started with, and why it did not.
    """
    choice = None if engine.head is None else read_choice(folder)
    if choice is None or engine.head is None:
        return load(engine), engine, None
    failure = None
    if choice.tried not in ("", choice.path):  # not a return to the head that served
        logger.error("the target ended while the head %s was tried; it starts with %s", choice.tried, choice.path)
        failure = HeadFailure(choice.tried, "the target ended before it had served")
    chosen = replace(engine, head=replace(engine.head, path=choice.path))
    try:
        return load(chosen), chosen, failure
    except Exception as error:  # whatever a damaged file makes the libraries raise
        logger.exception("the head %s cannot be loaded again, going back to deploy.yaml's", choice.path)
        failure = HeadFailure(choice.path, f"it could not be loaded again: {error}")
    return load(engine), engine, failure


def publish_kv_events(endpoint: str, blocks: BlockManager) -> KVEventPublisher:
    """Publish the changes of a block manager from now on. Raises ConfigError if the addresses are in use."""
    # Imported here: pyzmq is optional.
    from actors.target.kv_event_publisher import KVEventPublisher

    publisher = KVEventPublisher(endpoint)
    publisher.start()
    blocks.on_stored = publisher.stored
    blocks.add_sink(publisher.record)
    return publisher


def _serve_shells(server: ShellServer, loop: EngineLoop) -> None:
    """Serve until the server is closed. End the process after an error: no shell could reach it."""
    try:
        server.run(loop)
    except BaseException:
        logger.exception("the connection to the shell failed")
        os._exit(1)


def _end_process(reason: str) -> None:
    """End the process when a rank is gone: the engine may wait forever in an all-reduce. Ray restarts it."""
    logger.error("the target ends: %s", reason)
    os._exit(1)


def _drafts(settings: PairSettings, folder: Path) -> dict[str, ChannelProposer | InProcessDraft]:
    """Return the pair's draft models by their methods, in `DraftActor`s or this process, and the operator's class."""
    code, method = settings.draft.code, settings.draft.method
    drafts: dict[str, ChannelProposer | InProcessDraft] = {method: CodeDraft(folder / method, code)} if code else {}
    if settings.draft_share is None:
        return drafts | {method: InProcessDraft(each) for method, each in settings.of_drafts.items()}
    return drafts | {method: ChannelProposer(folder / method / DRAFT_SOCKET) for method in settings.of_drafts}


def _watch(core: EngineCore, drafts: Mapping[str, ChannelProposer | InProcessDraft], kv_events: str | None) -> None:
    """Forget a draft's figures when another process connects, publish KV events, and end with a rank of the target."""
    for draft in drafts.values():
        if isinstance(draft, ChannelProposer):
            draft.on_new_draft = core.forget_draft
    if kv_events is not None:
        publish_kv_events(kv_events, core.blocks)
    if isinstance(core.runner, TensorParallelRunner):
        core.runner.watch(_end_process)


def _stats(drafts: Mapping[str, ChannelProposer | InProcessDraft]) -> dict[str, DraftChannelStats]:
    return {method: draft.stats for method, draft in drafts.items()}


def _flush(drafts: Mapping[str, ChannelProposer | InProcessDraft]) -> None:
    for draft in drafts.values():
        draft.flush()


def _runner(core: EngineCore) -> ModelRunner:
    assert isinstance(core.runner, ModelRunner), "from_config loads one"
    return core.runner


def _card(core: EngineCore, settings: PairSettings) -> ModelCard:
    runner = _runner(core)
    speculation = settings.engine.speculation
    logger.info("requests without sampling parameters are sampled by %s", runner.sampling_defaults)
    num_slots = core.blocks.num_blocks * core.blocks.block_size
    if num_slots < runner.max_model_len:
        short = "the KV cache holds %d tokens, so the longest text has %d and not %d; raise cache.memory_gib for longer"
        logger.warning(short, num_slots, num_slots, runner.max_model_len)
    return ModelCard(
        vocab_size=runner.vocab_size,
        max_model_len=min(runner.max_model_len, num_slots),
        eos_token_ids=runner.eos_token_ids,
        model_version=runner.model_version,
        fingerprint=_fingerprint(runner, settings),
        block_size=runner.block_size,
        max_draft_tokens=speculation.max_num_tokens if speculation.can_draft else 0,
        speculation_methods=speculation.methods,
        verify=speculation.verify,
        has_approximate_steps=speculation.steps is not None,
        sampling_defaults=runner.sampling_defaults,
        probe_key=_probe_key(core),
    )


def _fingerprint(runner: ModelRunner, settings: PairSettings) -> str:
    """Return the digests of all that the tokens of a seed may depend on, except the tokenizer."""
    engine, draft = settings.engine, settings.draft
    head_path = engine.head and engine.head.path
    version = head_version(head_path) if head_path else model_version(draft.model.path) if draft.model else ""
    drafts = (str(draft.kind), version)
    more = (model_version(each.model.path) for each in settings.more_drafts if each.model is not None)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else repr(native_instructions())
    return write_fingerprint(
        {
            FingerprintPart.WEIGHTS: digest(runner.model_version),
            FingerprintPart.DRAFT: digest(*drafts, *more),
            FingerprintPart.KERNELS: digest(device, native_digest(), torch.__version__),
            FingerprintPart.SETTINGS: digest(repr(replace(engine.model, path="")), repr(engine.speculation)),
        }
    )


def _probe_key(core: EngineCore) -> bytes:
    """Return this engine's key of the last block of a fixed text. An ingress with a different key routes by load."""
    return core.blocks.prefix_keys(TokenBlocks(list(probe_token_ids(core.blocks.block_size)), PROBE_SALT))[-1]
