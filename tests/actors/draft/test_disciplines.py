"""Engine, channel and draft model over a real socket: both disciplines give the target's own tokens.

The draft serves from a thread. The target is as slow as a large one: it gives the draft the time to look ahead. Nothing
but the hit rate hangs on it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.draft.channel_proposer import ChannelProposer, OfferTable
from actors.draft.draft_server import DraftServer
from actors.process.frames import FrameListener
from engine.accounting.draft_planning import AheadChoice
from engine.accounting.length_policy import LengthPolicy
from engine.accounting.record import PassRecord
from engine.accounting.step_times import StepTimes
from engine.batch.draft import NO_DRAFT, Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import Proposer
from engine.proposer.draft_model.ahead_drafter import AheadDrafter
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.method_dispatcher import proposer_of
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams, VerifyMode
from tests.engine.fixtures.byte_tokenizer import write_byte_pair
from tests.engine.fixtures.checkpoints import Folders, write_pair
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid_pair

K = 3
FAN_OUT = 3
PATIENCE_S = 30.0  # of these tests, on a busy machine; nothing lasts as long
MAX_TOKENS = 32
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5),
    SamplingParams(temperature=1.2, top_k=8, logit_bias=((5, 2.0),)),
)
CACHE = CacheConfig(num_blocks=256, memory_bytes=None)

Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A pair of llamas, or of a family with recurrent layers."""
    root, family = tmp_path_factory.mktemp("pair"), getattr(request, "param", None)
    if family is not None:
        return write_hybrid_pair(root, HYBRIDS[family](), noise=0.005)
    return write_pair(root, noise=0.02)


def new_engine(
    folders: Folders,
    proposer: Proposer | None,
    verify: VerifyMode = VerifyMode.COUPLED,
    tree_nodes: int = 0,
    steps: StepConfig | None = None,
) -> EngineCore:
    model = ModelConfig(str(folders.target), dtype="float32", num_threads=1)
    limits = SchedulerConfig(max_model_len=128)
    speculation = SpeculationConfig(K, verify, tree_nodes=tree_nodes, steps=steps)
    return load_engine(EngineConfig(model, CACHE, limits, speculation), proposer)


def slow_down(
    engine: EngineCore, channel: ChannelProposer, servers: list[DraftServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of the target takes as long as the last of `servers` looks ahead, on however busy a machine this runs."""
    forward = engine.runner.forward

    def slow(spans):
        deadline_s = time.monotonic() + PATIENCE_S
        while channel.stats.is_connected and not is_idle(channel, servers[-1]) and time.monotonic() < deadline_s:
            time.sleep(0.002)
        return forward(spans)

    monkeypatch.setattr(engine.runner, "forward", slow)


def charge_little_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report to the draft policy that drafts take a hundredth of a pass, even on a busy machine."""
    on_pass = LengthPolicy.on_pass

    def on_pass_quiet(policy: LengthPolicy, record: PassRecord) -> None:
        on_pass(policy, replace(record, times=StepTimes(draft_s=0.01, forward_s=1.0, num_steps=1)))

    monkeypatch.setattr(LengthPolicy, "on_pass", on_pass_quiet)


def is_idle(channel: ChannelProposer, server: DraftServer) -> bool:
    """The draft has looked beyond all that it was sent."""
    ahead_drafter = server._ahead and server._ahead._drafter
    sequences = [each.sequence for each in channel._sequences.values() if not each.has_news]
    wanting = [each for each in sequences if each.num_wanted_drafts > 0 and each.drafts_ahead]
    if not isinstance(ahead_drafter, WatchedAheadDrafter):
        return True
    return all(ahead_drafter.seen.get(sequence.request_id) == len(sequence.token_ids) for sequence in wanting)


class WatchedAheadDrafter:
    """Remembers how far into each sequence everything was prepared."""

    def __init__(self, ahead_drafter: AheadDrafter) -> None:
        self._drafter = ahead_drafter
        self.seen: dict[str, int] = {}

    def run(self, pending, emit, is_stopped) -> bool:
        lengths = {each.sequence.request_id: len(each.sequence.token_ids) for each in pending}
        is_done = self._drafter.run(pending, emit, is_stopped)
        if is_done:
            self.seen |= lengths
        return is_done


@contextmanager
def serving(folders: Folders, path: Path, fan_out: int | None) -> Iterator[DraftServer]:
    """A draft process, as a thread."""
    model = ModelConfig(str(folders.draft), dtype="float32")
    proposer = ModelProposer.from_config(model, CACHE, SchedulerConfig())
    ahead_drafter = None if fan_out is None else WatchedAheadDrafter(proposer.ahead_drafter(fan_out))
    listener = FrameListener(path)
    server = DraftServer(listener, proposer, proposer.model_version, ahead_drafter)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive()
        proposer.sequences.check_integrity()


def connected(path: Path) -> ChannelProposer:
    channel = ChannelProposer(path)
    await_connection(channel)
    return channel


def await_connection(channel: ChannelProposer) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not channel.stats.is_connected:
        assert time.monotonic() < deadline_s
        channel.flush()
        time.sleep(0.01)


def requests(num_tokens: int = MAX_TOKENS) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            str(index), tuple(range(3 + index, 12 + 3 * index)), replace(sampling, seed=index, max_tokens=num_tokens)
        )
        for index, sampling in enumerate(SAMPLINGS)
    ]


def generate(engine: EngineCore, batch: list[GenerateRequest], channel: ChannelProposer | None = None) -> Texts:
    texts: Texts = {request.request_id: () for request in batch}
    for request in batch:
        engine.add(request)
    while engine.has_work:
        if channel is not None:
            channel.flush()  # as the engine's loop does before every step
        for chunk in engine.step():
            texts[chunk.request_id] += chunk.token_ids
    return texts


@pytest.fixture(scope="module")
def reference(folders: Folders) -> Texts:
    return generate(new_engine(folders, None), requests())


@pytest.mark.parametrize("folders", [None, "bamba"], indirect=True)
@pytest.mark.parametrize("fan_out", [None, 1, FAN_OUT])
def test_a_batch_of_all_distributions_says_what_the_target_alone_says(
    fan_out: int | None, folders: Folders, folder: Path, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folders, folder / "draft.sock", fan_out) as server:
        channel = connected(folder / "draft.sock")
        engine = new_engine(folders, channel)
        slow_down(engine, channel, [server], monkeypatch)
        assert generate(engine, requests(), channel) == reference
        assert engine.stats().drafts.acceptance_length > 2.0
        channel._link._disconnect()
    num_ahead = engine.stats().drafts.num_passes_by_shape.get("ahead", 0)
    assert num_ahead == channel.stats.num_hits == 0 if fan_out is None else 0 < num_ahead <= channel.stats.num_hits


def test_a_request_is_told_of_its_passes_with_drafts_ahead(
    folders: Folders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (asked, *_) = requests()
    asked = replace(asked, speculation=SpeculationParams(explain=True))
    with serving(folders, folder / "draft.sock", FAN_OUT) as server:
        channel = connected(folder / "draft.sock")
        engine = new_engine(folders, channel)
        slow_down(engine, channel, [server], monkeypatch)
        engine.add(asked)
        while engine.has_work:
            channel.flush()
            chunks = engine.step()
        channel._link._disconnect()
    explained = chunks[-1].explanation
    assert explained is not None
    passes = engine.stats().drafts.num_passes_by_shape
    assert explained.drafted == {"model:ahead": passes["ahead"], "model": passes["chain"]}


def test_reasoning_steps_are_written_beside_drafts_ahead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact requests keep their texts. A step waits for no verdict, so nothing is prepared for one."""
    pair, batch = write_byte_pair(tmp_path), requests()
    exact = generate(new_engine(pair, None), batch)
    batch[0] = replace(batch[0], speculation=SpeculationParams(is_approximate=True))
    steps = StepConfig(threshold=0.0, judge=ScorerKind.LIKELIHOOD, max_step_tokens=8)
    with serving(pair, folder / "draft.sock", FAN_OUT) as server:
        channel = connected(folder / "draft.sock")
        engine = new_engine(pair, channel, steps=steps)
        slow_down(engine, channel, [server], monkeypatch)
        texts = generate(engine, batch, channel)
        channel._link._disconnect()
    assert {name: texts[name] for name in ("1", "2", "3")} == {name: exact[name] for name in ("1", "2", "3")}
    assert engine.stats().reasoning.num_accepted > 0
    assert channel.stats.num_hits > 0
    assert server._ahead is not None
    assert isinstance(drafter := server._ahead._drafter, WatchedAheadDrafter)
    assert {*drafter.seen} == {*texts}


def test_methods_are_chosen_by_measurement_beside_drafts_that_work_ahead_and_one_that_dies(
    folders: Folders, folder: Path, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`method: auto` with `target_itl_ms` under `mode: async`: each method is tried, and no choice changes a token.

    The second draft dies half-way: the first goes on.
    """
    methods = (SpeculationMethod.AUTO, SpeculationMethod.MODEL, "prose", SpeculationMethod.SUFFIX)
    speculation = SpeculationConfig(K, methods=methods, adaptive=True, target_itl_s=PATIENCE_S, can_draft_ahead=True)
    model = ModelConfig(str(folders.target), dtype="float32", num_threads=1)
    config = EngineConfig(model, CACHE, SchedulerConfig(max_model_len=128), speculation)
    batches = [[replace(each, request_id=f"{each.request_id}, {number}") for each in requests()] for number in range(4)]
    with ExitStack() as others, serving(folders, folder / "draft.sock", FAN_OUT) as server:
        others.enter_context(serving(folders, folder / "prose.sock", FAN_OUT))
        channel, prose = connected(folder / "draft.sock"), connected(folder / "prose.sock")
        engine = load_engine(config, proposer_of(methods, channel, others={"prose": prose}))
        slow_down(engine, channel, [server], monkeypatch)
        charge_little_for_drafts(monkeypatch)
        for number, batch in enumerate(batches):
            texts = generate(engine, batch, channel)
            assert all(text == reference[name.partition(",")[0]] for name, text in texts.items())
            if number == 2:
                others.close()
        prose.flush()
        assert [each.stats.is_connected for each in (channel, prose)] == [True, False]
        channel._link._disconnect()
    assert {each.method for each in engine.stats().classes} >= {"model", "prose", "suffix"}
    assert channel.stats.num_hits > 0


@pytest.mark.parametrize("tree_nodes", [0, 6], ids=["chains", "trees"])
def test_drafts_made_ahead_of_some_verdicts_and_after_others_change_no_token(
    tree_nodes: int, folders: Folders, folder: Path, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner may choose for every pass, with lengths and trees of its own."""
    dice = random.Random(0)
    monkeypatch.setattr(AheadChoice, "is_ahead", property(lambda choice: dice.random() < 0.5))
    charge_little_for_drafts(monkeypatch)
    methods = (SpeculationMethod.MODEL,)
    speculation = SpeculationConfig(K, methods=methods, tree_nodes=tree_nodes, adaptive=True, can_draft_ahead=True)
    model = ModelConfig(str(folders.target), dtype="float32", num_threads=1)
    config = EngineConfig(model, CACHE, SchedulerConfig(max_model_len=128), speculation)
    with serving(folders, folder / "draft.sock", FAN_OUT) as server:
        channel = connected(folder / "draft.sock")
        engine = load_engine(config, proposer_of(methods, channel))
        slow_down(engine, channel, [server], monkeypatch)
        assert generate(engine, requests(), channel) == reference
        assert engine.stats().drafts.acceptance_length > 1.5
        channel._link._disconnect()
    assert 0 < channel.stats.num_hits < channel.stats.num_lookups


@pytest.mark.parametrize("verify", [VerifyMode.COUPLED, VerifyMode.REJECTION])
def test_trees_cross_the_channel_with_any_number_of_sequences(
    verify: VerifyMode, folders: Folders, folder: Path, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = requests()
    taken: list[tuple[int, Draft]] = []  # by the number of sequences in the pass
    with serving(folders, folder / "draft.sock", None):
        channel = connected(folder / "draft.sock")
        propose = channel.propose
        monkeypatch.setattr(
            channel, "propose", lambda batch: [taken.append((len(batch), d)) or d for d in propose(batch)]
        )
        engine = new_engine(folders, channel, verify, tree_nodes=6)
        texts = generate(engine, batch[:2], channel) | generate(engine, batch[2:3], channel)
        texts |= generate(engine, [replace(each, request_id=f"{each.request_id}, in four") for each in batch], channel)
        drafts = engine.stats().drafts
        channel._link._disconnect()
    if verify is VerifyMode.COUPLED:
        assert all(texts[each] == reference[each.partition(",")[0]] for each in texts)
    for batch_size in (1, 4):
        assert any(draft.depth < len(draft.token_ids) for number, draft in taken if number == batch_size)
    assert drafts.num_invalid_tokens == 0
    assert drafts.acceptance_length > 2.0


def all_sampled(sampling: SamplingParams) -> list[GenerateRequest]:
    return [replace(each, sampling=replace(sampling, seed=index)) for index, each in enumerate(requests())]


def hits_of(
    folders: Folders, path: Path, sampling: SamplingParams, verify: VerifyMode, patch: pytest.MonkeyPatch
) -> float:
    with serving(folders, path, FAN_OUT) as server:
        channel = connected(path)
        engine = new_engine(folders, channel, verify)
        slow_down(engine, channel, [server], patch)
        batch = all_sampled(sampling)
        generate(engine, batch, channel)
        stats = channel.stats
        channel._link._disconnect()
    assert stats.num_lookups > 30
    return stats.num_hits / stats.num_lookups


GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
WARM = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize(("sampling", "least"), [(GREEDY, 0.9), (WARM, 0.9)])
def test_most_rounds_of_a_good_draft_find_their_drafts_prepared(
    sampling: SamplingParams, least: float, folders: Folders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hits_of(folders, folder / "draft.sock", sampling, VerifyMode.COUPLED, monkeypatch) >= least


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_other_modes_of_verification_hit_too(
    verify: VerifyMode, folders: Folders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hits_of(folders, folder / "draft.sock", WARM, verify, monkeypatch) >= 0.6


def test_the_draft_of_a_wrong_outcome_changes_no_token_but_is_hardly_ever_right(
    folders: Folders, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft_of_another(table: OfferTable) -> Draft | None:
        true = tuple(table._token_ids[table._base_len :])
        if not true:
            return NO_DRAFT  # an answer, which only the true outcome has: it is dropped, and not waited for any longer
        return next((draft for after, draft in table._drafts.items() if after != true), None)

    warm = all_sampled(WARM)
    expected = generate(new_engine(folders, None), warm)

    with serving(folders, folder / "draft.sock", FAN_OUT) as server:
        channel = connected(folder / "draft.sock")
        engine = new_engine(folders, channel)
        slow_down(engine, channel, [server], monkeypatch)
        monkeypatch.setattr(OfferTable, "draft", property(draft_of_another))
        assert generate(engine, warm, channel) == expected
        drafts = engine.stats().drafts
        assert drafts.num_drafts > 30
        assert drafts.acceptance_length < 1.3
        channel._link._disconnect()


def test_a_draft_that_dies_and_comes_back_costs_no_token(
    folders: Folders, folder: Path, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "draft.sock"
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(folders, path, FAN_OUT))]
        channel = connected(path)
        engine = new_engine(folders, channel)
        slow_down(engine, channel, servers, monkeypatch)
        batch = requests()
        texts: Texts = {request.request_id: () for request in batch}
        for request in batch:
            engine.add(request)
        for step in range(10_000):
            if not engine.has_work:
                break
            if step == 4:
                stack.close()
            if step == 7:
                servers.append(stack.enter_context(serving(folders, path, FAN_OUT)))
                await_connection(channel)
            channel.flush()
            for chunk in engine.step():
                texts[chunk.request_id] += chunk.token_ids
        assert texts == reference
        assert channel.stats.num_connections == 2
        channel._link._disconnect()


def test_requests_come_and_go_while_others_run(
    folders: Folders, folder: Path, reference: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folders, folder / "draft.sock", FAN_OUT) as server:
        channel = connected(folder / "draft.sock")
        engine = new_engine(folders, channel)
        slow_down(engine, channel, [server], monkeypatch)
        texts: Texts = {}
        pending = requests()
        abandoned = replace(pending[0], request_id="abandoned")
        engine.add(abandoned)
        while pending or engine.has_work:
            if pending:
                texts[pending[0].request_id] = ()
                engine.add(pending.pop(0))
            channel.flush()
            for chunk in engine.step():
                if chunk.request_id in texts:
                    texts[chunk.request_id] += chunk.token_ids
            if len(pending) == 1:
                engine.abort("abandoned")
        assert texts == reference
        channel._link._disconnect()
