"""Several draft models in one engine: each drafts for requests that name it, shows its name, and fails alone."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.config import SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.proposer import GuardedProposer, Proposer
from engine.proposer.method_dispatcher import proposer_of
from engine.scheduler.scheduler import Scheduler
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams
from tests.engine.engine_core.test_engine_core import V, greedy, half_right, make_core, outputs, right, run, wrong
from tests.engine.fixtures.fakes import FakeRunner, ScriptedProposer

ARMS = ("model", "prose", "code", "hybrid", "suffix", "ngram", "none")


def core_of(model: Proposer, prose: Proposer, code: Proposer, methods: tuple[str, ...] = ARMS) -> EngineCore:
    blocks = BlockManager(256, 4, "m")
    proposer = proposer_of(methods, model, others={"prose": prose, "code": code})
    assert proposer is not None
    return EngineCore(
        FakeRunner(256, 4, V),
        Scheduler(SchedulerConfig(64, 512), blocks, max_model_len=100),
        Speculation(proposer, Verifier(), SpeculationConfig(4, methods=methods, adaptive=True)),
    )


def request(name: str, method: str | None, temperature: float = 0.0, length: int = 30) -> GenerateRequest:
    sampling = SamplingParams(seed=3, temperature=temperature, max_tokens=length)
    speculation = SpeculationParams(method=method)
    return GenerateRequest(name, (1, 2, 3), sampling, speculation, cache_salt=name, returns_sources=True)


def accepted_by(core: EngineCore) -> Counter[str]:
    return Counter(source for chunk in run(core) for source in chunk.sources if source.startswith("accepted:"))


def test_a_request_is_drafted_for_by_the_model_that_it_names_and_its_tokens_say_so() -> None:
    model, prose, code = (ScriptedProposer(right) for _ in range(3))
    core = core_of(model, prose, code)
    for name in ("model", "prose", "code"):
        core.add(request(f"for {name}", name))
    sources = accepted_by(core)
    assert set(sources) == {"accepted:model", "accepted:prose", "accepted:code"}
    assert [each.opened for each in (model, prose, code)] == [["for model"], ["for prose"], ["for code"]]
    assert {each.method for each in core.stats().classes} == {"model", "prose", "code"}
    assert {each.name for each in core.stats().drift} == {f"{each}-greedy-free" for each in ("model", "prose", "code")}
    assert {"model-greedy", "prose-greedy", "code-greedy"} <= set(core.stats().speedups)


def test_drafts_beside_suffixes_are_the_deployments_own() -> None:
    core = core_of(ScriptedProposer(right), ScriptedProposer(right), ScriptedProposer(right), ("prose", *ARMS))
    core.add(request("a", "hybrid"))
    core.add(request("b", None))
    assert set(accepted_by(core)) == {"accepted:model", "accepted:prose"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_arm_changes_a_token(temperature: float) -> None:
    plain = make_core(num_blocks=256)
    arms = core_of(ScriptedProposer(right), ScriptedProposer(half_right), ScriptedProposer(wrong), ("auto", *ARMS))
    for core in (plain, arms):
        for method in (*ARMS, *[None] * 8):
            core.add(request(f"{method} {core.scheduler.num_waiting}", method, temperature))
    texts = outputs(run(arms))
    assert texts == outputs(run(plain))
    assert len(set(map(tuple, texts.values()))) == 1, "one seed has one text"


def test_a_draft_that_fails_is_off_alone() -> None:
    def fail(sequence: Sequence, max_tokens: int) -> list[int]:
        raise RuntimeError("out of memory")

    prose = GuardedProposer(ScriptedProposer(fail))
    core = core_of(ScriptedProposer(right), prose, ScriptedProposer(right))
    for name in ("model", "prose", "code"):
        core.add(request(name, name))
    texts: dict[str, list[int]] = {}
    sources: Counter[str] = Counter()
    for chunk in run(core):
        texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        sources.update(chunk.sources)
    assert not prose.is_on
    assert all(text == greedy((1, 2, 3), 30) for text in texts.values())
    assert sources["accepted:model"] > 0 < sources["accepted:code"]
    assert "accepted:prose" not in sources
