"""Drafts from the target's hidden states: they change no token, and equal the head's own in any batching."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.batch.draft import Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.draft_heads.loader import HeadTarget
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import TensorParallelRunner
from engine.sequence.batch import ScheduledSequence
from protos.errors import ConfigError
from protos.messages import (
    GenerateRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    SpeculationMethod,
    SpeculationParams,
    VerifyMode,
)
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_letters
from tests.engine.fixtures.heads.block_heads import (
    BlockShape,
    PlainDFlash,
    PlainParallelEagle,
    block_tensors,
    peagle_tensors,
    write_block_head,
    write_peagle,
)
from tests.engine.fixtures.heads.eagle3_fixtures import PlainEagle3, head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import (
    HIDDEN_SIZE,
    fit_medusa,
    random,
    transformers_mtp,
    write_deepseek,
    write_glm,
    write_llama_with_mtp,
)
from tests.engine.fixtures.in_process_transport import InProcessTransport
from tests.engine.fixtures.pairs.forked_ranks import fork_ranks

P = 8
MAX_TOKENS = 20
NUM_PROMPTS = 8
EAGLE3_TAPS = (1, 2)  # of a target with two layers
BLOCKS = {
    str(HeadKind.DFLASH): BlockShape(windows=(None, 9), are_causal=(False, True)),
    str(HeadKind.DSPARK): BlockShape(is_anchor_drafting=True, is_cut=True, markov_type="gated"),
    "dflash2": BlockShape(is_refined=True),
    "xpress": BlockShape(has_refiner=True),
}
HEADS = (*map(str, HeadKind), "dflash2", "xpress")  # the last two are of kind dflash
ONE_PASS = (HeadKind.MEDUSA, HeadKind.PEAGLE, *BLOCKS)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, presence_penalty=1.0, top_p=0.9),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, num_logprobs=2),
)
TREE = 7
GRAMMAR = Grammar(GrammarKind.REGEX, "([a-f][g-m]|n[a-z]{2})*", "guided_regex")


@dataclass(frozen=True, slots=True)
class HeadModels:
    """A target with three MTP layers among its weights, and the other `HEADS`, in folders with their names.

    Its first layer drafts for it as SELF.
    """

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "target"

    def head(self, name: str) -> HeadConfig:
        kind = HeadKind(name) if name in tuple(HeadKind) else HeadKind.DFLASH
        if kind is HeadKind.SELF:
            return HeadConfig(kind, num_layers=1)
        return HeadConfig(kind, None if kind is HeadKind.MTP else str(self.root / name))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HeadModels:
    root = tmp_path_factory.mktemp("heads")
    write_llama_with_mtp(root / "target", num_mtp_layers=3)
    write_letters(root / "target")
    fit_medusa(root / "medusa", root / "target")
    write_original(root / "eagle3", head_tensors(root / "target", len(EAGLE3_TAPS)), EAGLE3_TAPS)
    write_peagle(root / "peagle", peagle_tensors(root / "target", len(EAGLE3_TAPS)), EAGLE3_TAPS)
    for name, shape in BLOCKS.items():
        write_block_head(root / name, block_tensors(root / "target", 2, shape), EAGLE3_TAPS, shape)
    return HeadModels(root)


@dataclass(frozen=True, slots=True)
class HeadSetup:
    """One way to compute the same text."""

    num_drafts: int = 3
    max_tokens_per_step: int = 512
    num_blocks: int = 256
    num_repeats: int = 1
    tree_nodes: int = 0
    adaptive: bool = False
    verify: VerifyMode = VerifyMode.COUPLED
    graphs: GraphKind = GraphKind.AUTO
    num_ranks: int = 1
    methods: tuple[SpeculationMethod, ...] = ()  # of the requests in turn; () leaves all to the head


SETUPS = {
    "batch": HeadSetup(num_drafts=5),
    "chunked, then prefix hits": HeadSetup(max_tokens_per_step=13, num_repeats=2),
    "preempted": HeadSetup(num_blocks=16),
    "trees": HeadSetup(tree_nodes=TREE, num_drafts=4, num_repeats=2),
    "trees, preempted": HeadSetup(tree_nodes=TREE, num_blocks=16),
    "adaptive": HeadSetup(adaptive=True),
    "adaptive trees": HeadSetup(tree_nodes=TREE, adaptive=True),
    "padded": HeadSetup(graphs=GraphKind.EAGER),
    "methods": HeadSetup(methods=(SpeculationMethod.HYBRID, SpeculationMethod.NONE, SpeculationMethod.SUFFIX)),
}


# Others compute other blocks than DFlash and EAGLE-3, and keep them in the same places.
_PARALLEL = {"chunked, then prefix hits", "preempted", "trees"}
CASES = [
    (name, head)
    for name in SETUPS
    for head in HEADS
    if head not in (HeadKind.PEAGLE, HeadKind.DSPARK, "dflash2", "xpress") or name in _PARALLEL
]


def build(
    world: HeadModels,
    head: str | HeadConfig | None,
    setup: HeadSetup,
    transport: InProcessTransport | None = None,
) -> EngineCore:
    if isinstance(head, str):
        head = world.head(head)
    method = SpeculationMethod.NONE if head is None else SpeculationMethod(head.kind)
    methods = (method, *setup.methods)
    config = EngineConfig(
        ModelConfig(
            str(world.target),
            dtype="float32",
            graphs=GraphConfig(setup.graphs, batches=(2, 8)),
            tensor_parallel_size=setup.num_ranks,
        ),
        CacheConfig(P, setup.num_blocks, memory_bytes=None),
        SchedulerConfig(max_tokens_per_step=setup.max_tokens_per_step, max_model_len=120),
        SpeculationConfig(setup.num_drafts, setup.verify, 8, methods, setup.tree_nodes, setup.adaptive),
        head,
        min_remote_prefill_tokens=8,
    )
    return load_engine(config, transport=transport)


def requests(setup: HeadSetup) -> list[GenerateRequest]:
    """Half of them share a prefix; every second is greedy."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(1, VOCAB_SIZE, (20,), generator=generator).tolist()
    found = []
    for index in range(NUM_PROMPTS):
        own = torch.randint(1, VOCAB_SIZE, (3 + 2 * index,), generator=generator).tolist()
        sampling = replace(SAMPLINGS[index % len(SAMPLINGS)], seed=index, max_tokens=MAX_TOKENS)
        wish = SpeculationParams(method=setup.methods[index % len(setup.methods)] if setup.methods else None)
        prompt = (*(shared if index % 2 else ()), *own)
        found.append(GenerateRequest(str(index), prompt, sampling, wish if index > 1 else SpeculationParams()))
    return found


def model_runner(engine: EngineCore) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def generate(
    engine: EngineCore, asked: Seq[GenerateRequest], before_step: Callable[[], None] = lambda: None
) -> dict[str, tuple[int, ...]]:
    texts: dict[str, tuple[int, ...]] = {}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        before_step()
        for chunk in engine.step():
            texts[chunk.request_id] = texts.get(chunk.request_id, ()) + chunk.token_ids
        engine.scheduler.check_integrity()
    return texts


@pytest.fixture(scope="module")
def reference(world: HeadModels) -> dict[str, tuple[int, ...]]:
    engine = build(world, None, HeadSetup(num_drafts=0))
    texts: dict[str, tuple[int, ...]] = {}
    for request in requests(HeadSetup()):
        texts |= generate(engine, [request])
    return texts


@pytest.mark.parametrize("tree_nodes", [0, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", HEADS)
def test_hidden_states_that_are_not_finite_end_their_own_request_and_spoil_no_draft(
    world: HeadModels, kind: str, tree_nodes: int
) -> None:
    """Heads read the states of a faulty prompt and of rejected drafts; other requests next to it, and later, do not."""
    setup = HeadSetup(num_blocks=32, tree_nodes=tree_nodes)
    asked = requests(setup)[:2]
    expected = generate(build(world, None, replace(setup, tree_nodes=0)), asked)
    used = {token for request in asked for token in (*request.prompt_token_ids, *expected[request.request_id])}
    poison = min(set(range(1, VOCAB_SIZE)) - used)
    engine = build(world, kind, setup)
    with torch.no_grad():
        engine.runner._model.decoder._embedding[poison] = float("nan")
    faulty = replace(asked[0], request_id="faulty", prompt_token_ids=(*asked[0].prompt_token_ids, poison, 3) * 4)
    assert generate(engine, [faulty, *asked]) == {**expected, "faulty": ()}
    assert generate(engine, asked) == expected
    assert engine.stats().drafts.num_accepted_tokens > 0
    assert engine.stats().num_non_finite_requests == 1
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft, the tokens before it, and the most tokens that were asked for."""

    token_ids: tuple[int, ...]
    draft: Draft
    max_depth: int


def record(engine: EngineCore) -> list[Drafted]:
    """Every draft that the engine's head makes for a greedy request from now on."""
    head, drafted = _drafter(engine), []
    propose = head.propose

    def recording(batch: Seq[ScheduledSequence]) -> list[Draft]:
        drafts = propose(batch)
        for scheduled, draft in zip(batch, drafts, strict=True):
            if scheduled.sequence.sampling.temperature == 0.0:
                limit = scheduled.max_draft_tokens if draft.parents else len(draft.token_ids)
                drafted.append(Drafted(tuple(scheduled.sequence.token_ids), draft, limit))
        return drafts

    head.propose = recording
    return drafted


def _drafter(engine: EngineCore) -> Any:
    """The engine's head, or its self-drafter inside the proposers that choose and guard."""
    if engine._speculation.head is not None:
        return engine._speculation.head
    chooser: Any = engine._speculation.proposer
    return chooser._other._methods[SpeculationMethod.SELF][0]._proposer


class FirstLayer:
    """The target's first layer with its head, run over the whole text for every draft."""

    def __init__(self, target: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, num_hidden_layers=1).eval()

    @torch.no_grad()
    def drafts(self, token_ids: Seq[int], num_drafts: int) -> tuple[int, ...]:
        ids = torch.tensor([token_ids])
        for _ in range(num_drafts):
            chosen = self._model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, chosen), dim=1)
        return tuple(ids[0, len(token_ids) :].tolist())


class HeadOracle:
    """The MTP layers as transformers has them, run over the whole text for every draft: in turn, then the last."""

    def __init__(self, target: Path) -> None:
        self._target, self._mtp = transformers_mtp(target)

    @torch.no_grad()
    def drafts(self, token_ids: Seq[int], num_drafts: int) -> tuple[int, ...]:
        ids = torch.tensor([token_ids])
        states = self._target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        last = len(self._mtp.layers) - 1
        for depth in range(num_drafts):
            layer = min(depth, last)
            positions = torch.arange(states.shape[1])[None] + layer + 1
            found = self._mtp.forward_layer(layer, states, positions, None, input_ids=ids[:, layer + 1 :])
            ids = torch.cat((ids, self._mtp._project_to_logits(found[:, -1]).argmax(-1, keepdim=True)), dim=1)
            states = found if depth < last else torch.cat((states, found[:, -1:]), dim=1)
        return tuple(ids[0, len(token_ids) :].tolist())


Oracles = dict[str, HeadOracle | PlainEagle3 | FirstLayer]


@pytest.fixture(scope="module")
def oracles(world: HeadModels) -> Oracles:
    eagle3 = PlainEagle3.read(world.target, world.root / "eagle3", EAGLE3_TAPS)
    blocks = {k: PlainDFlash(world.target, world.root / k, EAGLE3_TAPS, shape) for k, shape in BLOCKS.items()}
    return {
        **blocks,
        HeadKind.MTP: HeadOracle(world.target),
        HeadKind.EAGLE3: eagle3,
        HeadKind.PEAGLE: PlainParallelEagle.read(world.target, world.root / "peagle", EAGLE3_TAPS),
        HeadKind.SELF: FirstLayer(world.target),
    }


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_head_changes_no_token(
    name: str,
    kind: str,
    world: HeadModels,
    reference: dict[str, tuple[int, ...]],
    oracles: Oracles,
) -> None:
    setup = SETUPS[name]
    engine = build(world, kind, setup)
    drafted = record(engine)
    for _ in range(setup.num_repeats):
        assert generate(engine, requests(setup)) == reference
    stats = engine.stats()
    assert stats.drafts.num_draft_tokens > 0
    if not setup.adaptive:  # which counts the time, and may soon draft nothing
        assert stats.drafts.num_accepted_tokens > (5 if setup.methods or kind in BLOCKS else 10)
    assert (stats.num_preemptions > 0) is (setup.num_blocks < 20)
    if not setup.tree_nodes:
        assert ("block" in stats.drafts.num_passes_by_shape) is (kind in ONE_PASS)
    if setup.num_repeats > 1:
        assert stats.num_prefix_hit_tokens > 0
    if kind in oracles:
        assert drafted
        for each in drafted[:: 1 + len(drafted) // 12]:
            num_checked = 1 if each.draft.parents else len(each.draft.token_ids)
            expected = oracles[kind].drafts(each.token_ids, each.max_depth)  # a block depends on its length
            assert each.draft.token_ids[:num_checked] == expected[:num_checked]


@pytest.mark.parametrize("tree_nodes", [0, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_keeps_to_a_grammar_and_changes_no_choice(kind: str, tree_nodes: int, world: HeadModels) -> None:
    """Two choices of one prompt at T = 0.7 and 1, each with a grammar, and without."""
    asked = [
        GenerateRequest(
            f"{temperature} {sample_index} {grammar is None}",
            (5, 9, 33, 2),
            SamplingParams(temperature=temperature, seed=3, max_tokens=12, grammar=grammar, stop_token_ids=(0,)),
            sample_index=sample_index,
        )
        for temperature in (0.0, 0.7, 1.0)
        for sample_index in (0, 1)
        for grammar in (None, GRAMMAR)
    ]
    engine = build(world, kind, HeadSetup(tree_nodes=tree_nodes))
    assert generate(engine, asked) == generate(build(world, None, HeadSetup(num_drafts=0)), asked)
    assert engine.stats().drafts.num_draft_tokens > 0


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_greedy_text_is_the_same_in_every_mode(
    verify: VerifyMode, kind: str, world: HeadModels, reference: dict[str, tuple[int, ...]]
) -> None:
    setup = HeadSetup(verify=verify, tree_nodes=TREE)
    engine = build(world, kind, setup)
    texts = generate(engine, requests(setup))
    greedy = [request.request_id for request in requests(setup) if request.sampling.temperature == 0.0]
    assert [texts[key] for key in greedy] == [reference[key] for key in greedy]
    assert engine.stats().drafts.num_accepted_tokens > (10 if kind in BLOCKS else 20)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_behind_a_prompt_that_was_read_elsewhere(
    kind: str, world: HeadModels, reference: dict[str, tuple[int, ...]]
) -> None:
    """Blocks come with the head's KV in them. Only where they end the pair may know another next token."""
    remote = build(
        world, kind if world.head(kind).kind.keeps_kv else None, HeadSetup(num_drafts=0, max_tokens_per_step=16)
    )
    engine = build(world, kind, HeadSetup(), InProcessTransport(remote))
    texts: dict[str, tuple[int, ...]] = {}
    local = build(world, kind, HeadSetup())
    for request in requests(HeadSetup()):
        texts |= generate(engine, [request])
        generate(local, [request])
    assert texts == reference
    assert engine.stats().remote.num_tokens > 50
    accepted = engine.stats().drafts.num_accepted_tokens
    assert accepted > 0.8 * local.stats().drafts.num_accepted_tokens


@pytest.mark.parametrize("kind", [head for head in HEADS if head != HeadKind.SELF])
def test_a_head_drafts_for_a_target_on_two_ranks(
    kind: str,
    world: HeadModels,
    reference: dict[str, tuple[int, ...]],
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trees move its keys and values, a small pool is preempted, and another engine reads them of exported blocks."""
    fork_ranks(monkeypatch)
    engine = build(world, kind, HeadSetup(tree_nodes=TREE, num_drafts=4, num_blocks=16, num_ranks=2))
    try:
        drafted = record(engine)
        assert generate(engine, requests(HeadSetup())) == reference
        stats = engine.stats()
        assert stats.drafts.num_accepted_tokens > (5 if kind in BLOCKS else 10)
        assert stats.num_preemptions > 0
        for each in drafted[:: 1 + len(drafted) // 12] if kind in oracles else ():
            assert each.draft.token_ids[:1] == oracles[kind].drafts(each.token_ids, each.max_depth)[:1]
        reader, alone = (build(world, kind, HeadSetup(), transport) for transport in (InProcessTransport(engine), None))
        texts: dict[str, tuple[int, ...]] = {}
        for request in requests(HeadSetup()):
            texts |= generate(reader, [request])
            generate(alone, [request])
        assert texts == reference
        assert reader.stats().remote.num_tokens > 50
        assert reader.stats().drafts.num_accepted_tokens > 0.8 * alone.stats().drafts.num_accepted_tokens
    finally:
        assert isinstance(engine.runner, TensorParallelRunner)
        engine.runner.close()


def test_more_mtp_layers_foresee_more_than_the_first_one_again(tmp_path: Path) -> None:
    """The first layer reads the target's states well and its own badly."""
    write_llama_with_mtp(tmp_path / "target", num_mtp_layers=3)
    weights = load_file(tmp_path / "target" / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 30
    weights["model.layers.2.eh_proj.weight"][:, HIDDEN_SIZE:] += random(HIDDEN_SIZE, HIDDEN_SIZE, seed=5, scale=0.2)
    save_file(weights, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    world, found = HeadModels(tmp_path), []
    for num_layers in (1, 3):
        engine = build(world, HeadConfig(HeadKind.MTP, num_layers=num_layers), HeadSetup())
        texts = generate(engine, requests(HeadSetup()))
        found.append((texts, engine.stats().drafts.num_accepted_tokens))
    (one_text, accepted_of_one), (text, accepted) = found
    assert text == one_text
    assert accepted > 1.3 * accepted_of_one


def test_mtp_layers_draft_after_a_prefix_whose_last_pairs_were_never_computed(world: HeadModels) -> None:
    """They lie in slots whose former text was not finite: the text ended before the tokens of the pairs came."""
    setup = HeadSetup(num_blocks=8)
    engine = build(world, HeadKind.MTP, setup)
    plain = requests(setup)[0]
    poison = VOCAB_SIZE - 1
    with torch.no_grad():
        engine.runner._model.decoder._embedding[poison] = float("nan")
    faulty = replace(plain, request_id="faulty", prompt_token_ids=(poison, *range(1, 8 * P - 4)))
    generate(engine, [faulty])
    prefix = tuple(range(1, 2 * P + 1))
    short = replace(plain, prompt_token_ids=prefix, sampling=SamplingParams(temperature=0.0, max_tokens=1))
    generate(engine, [short])
    drafted = record(engine)
    generate(engine, [replace(plain, prompt_token_ids=(*prefix, 40, 41))])
    assert engine.stats().num_prefix_hit_tokens == len(prefix)
    assert drafted
    assert all(0 <= token_id < VOCAB_SIZE for each in drafted for token_id in each.draft.token_ids)


FAMILIES = {
    "DeepSeek-V3": partial(write_deepseek, num_mtp_layers=1),
    "DeepSeek-V3, two layers": partial(write_deepseek, num_mtp_layers=2),
    "GLM-4.5, two layers": partial(write_glm, num_mtp_layers=2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_all_mtp_layers_of_a_published_family_draft_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Latent attention, experts, and the published names; the second draft comes from the second layer."""
    FAMILIES[name](tmp_path / "target")
    num_layers = FAMILIES[name].keywords["num_mtp_layers"]
    world = HeadModels(tmp_path)
    asked = requests(HeadSetup())[:2]
    engine = build(world, HeadKind.MTP, HeadSetup())
    assert isinstance(engine.runner, ModelRunner)
    assert len(engine.runner.kv_layout.layers) == 2 + num_layers
    drafted = record(engine)
    texts = generate(engine, asked)
    assert texts == generate(build(world, None, HeadSetup(num_drafts=0)), asked)
    oracle = HeadOracle(tmp_path / "target")
    assert drafted
    for each in drafted[::4]:
        assert each.draft.token_ids == oracle.drafts(each.token_ids, len(each.draft.token_ids))


def changed(head: HeadConfig, folder: Path, change: float) -> HeadConfig:
    """Write a head with other keys, values and states."""
    assert head.path is not None
    shutil.copytree(head.path, folder)
    for file in (folder / "model.safetensors", folder / "medusa_lm_head.pt"):
        if file.is_file():
            is_pickled = file.suffix == ".pt"
            tensors = torch.load(file) if is_pickled else load_file(file)
            tensors |= {name: change * each for name, each in tensors.items() if each.is_floating_point()}
            torch.save(tensors, file) if is_pickled else save_file(tensors, file)
    return replace(head, path=str(folder))


@pytest.mark.parametrize(
    ("kind", "tree_nodes"),
    [
        (HeadKind.EAGLE3, 0),
        (HeadKind.EAGLE3, TREE),
        (HeadKind.MEDUSA, 0),
        (HeadKind.PEAGLE, 0),
        (HeadKind.DFLASH, TREE),
        (HeadKind.DSPARK, 0),
        ("dflash2", TREE),
        ("xpress", 0),
    ],
)
def test_heads_exchanged_at_any_step_change_no_text_and_read_no_keys_of_each_other(
    world: HeadModels, reference: dict[str, tuple[int, ...]], kind: str, tree_nodes: int, tmp_path: Path
) -> None:
    """A new head drafts for new texts as after a start, though their prefixes were cached. Trees are preempted."""
    setup = HeadSetup(num_blocks=24 if tree_nodes else 256, tree_nodes=tree_nodes)
    engine, fresh = build(world, kind, setup), build(world, kind, setup)
    runner = model_runner(engine)
    first = runner.head
    assert first is not None
    second = runner.load_head(str(changed(world.head(kind), tmp_path / "second", -0.7).path))
    steps = count(1)

    def exchange() -> None:
        if next(steps) % 3 == 0:
            engine.exchange_head(second if runner.head is first else first)

    assert generate(engine, requests(setup), exchange) == reference
    engine.exchange_head(first)
    drafted = [record(each) for each in (engine, fresh)]
    assert generate(engine, requests(setup)) == generate(fresh, requests(setup)) == reference
    assert drafted[0] == drafted[1]
    assert fresh.stats().drafts.num_accepted_tokens > 0


def test_a_text_that_runs_through_an_exchange_has_no_drafts_of_a_head_with_keys(
    world: HeadModels, reference: dict[str, tuple[int, ...]]
) -> None:
    setup = HeadSetup()
    engine, asked = build(world, HeadKind.EAGLE3, setup), requests(setup)
    running, late = asked[:3], asked[3]
    for request in running:
        engine.add(request)
    texts: dict[str, tuple[int, ...]] = {}

    def step() -> None:
        for chunk in engine.step():
            texts[chunk.request_id] = texts.get(chunk.request_id, ()) + chunk.token_ids

    for _ in range(4):
        step()
    engine.exchange_head(model_runner(engine).load_head(str(world.root / "eagle3")))
    assert engine.stats().drafts.num_draft_tokens > 0
    drafted = record(engine)
    while engine.has_work:
        step()
    assert drafted
    assert not any(each.draft.token_ids for each in drafted)
    texts |= generate(engine, [late])
    assert texts == {each.request_id: reference[each.request_id] for each in (*running, late)}


def test_a_watched_head_that_computes_nan_drafts_no_more_until_it_is_exchanged(
    world: HeadModels, reference: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    setup = HeadSetup()
    engine = build(world, HeadKind.EAGLE3, setup)
    runner = model_runner(engine)
    reports: list[bool] = []
    first = runner.head
    assert first is not None
    bad = runner.load_head(str(changed(world.head(HeadKind.EAGLE3), tmp_path / "bad", 1e25).path))
    engine.exchange_head(bad, reports.append)
    assert generate(engine, requests(setup)) == reference
    assert generate(engine, requests(setup)) == reference
    assert reports == [False]
    num_drafted = engine.stats().drafts.num_draft_tokens
    engine.exchange_head(first, reports.append)
    for _ in range(8):
        assert generate(engine, requests(setup)) == reference
    assert reports == [False, True]
    assert engine.stats().drafts.num_draft_tokens > num_drafted


def test_a_watched_head_that_overflows_in_a_full_tree_drafts_no_more(
    world: HeadModels, reference: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """The first of three Medusa heads is sound, so its tokens fill the tree, and no node shows that others are not."""
    setup = HeadSetup(tree_nodes=2, num_drafts=3)
    engine = build(world, HeadKind.MEDUSA, setup)
    reports: list[bool] = []
    folder = changed(world.head(HeadKind.MEDUSA), tmp_path / "bad", 1.0).path
    assert folder is not None
    tensors = torch.load(Path(folder) / "medusa_lm_head.pt")
    for head in (1, 2):
        tensors[f"{head}.1.weight"] = torch.full_like(tensors[f"{head}.1.weight"], 3e38)
    torch.save(tensors, Path(folder) / "medusa_lm_head.pt")
    engine.exchange_head(model_runner(engine).load_head(folder), reports.append)
    assert generate(engine, requests(setup)) == reference
    assert reports == [False]


def test_a_head_that_reads_other_states_or_keeps_other_keys_is_refused(world: HeadModels, tmp_path: Path) -> None:
    runner = model_runner(build(world, HeadKind.EAGLE3, HeadSetup()))
    write_original(tmp_path / "taps", head_tensors(world.target, 1), (2,))
    with pytest.raises(ConfigError, match=r"it reads the inputs of layers 2 .* that reads the inputs of layers 1, 2"):
        runner.load_head(str(tmp_path / "taps"))
    with pytest.raises(ConfigError, match=r"is a head of kind 'peagle', and draft\.kind is 'eagle3'"):
        runner.load_head(str(world.root / "peagle"))


def test_the_embedding_on_the_heads_device_is_one_for_all_exchanged_heads(
    world: HeadModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks it is a copy of the target's."""
    made: list[HeadTarget] = []
    of = HeadTarget.of

    def noted(*parts: Any) -> HeadTarget:
        made.append(of(*parts))
        return made[-1]

    monkeypatch.setattr(HeadTarget, "of", noted)
    runner = model_runner(build(world, HeadKind.EAGLE3, HeadSetup()))
    runner.load_head(str(world.root / "eagle3"))
    assert len(made) == 1
