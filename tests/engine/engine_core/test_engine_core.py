"""The engine around a fake model whose KV is its tokens, and the documented example around a real one."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.engine_core
from engine.batch.draft import Draft
from engine.batch.span import Span
from engine.config import SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.proposer import NoProposer, Proposer
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import ScheduledSequence
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import IMPOSSIBLE_ID
from protos.errors import EngineError, RequestError
from protos.messages import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SpeculationMethod,
    SpeculationParams,
    TokenChunk,
    VerifyMode,
)
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.fakes import FakeRunner, ScriptedProposer, logits_after

V = 16
PROMPTS = [(1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8), (4,), (9,) * 11]


def make_core(
    proposer: Proposer | None = None,
    *,
    runner: FakeRunner | None = None,
    num_blocks: int = 64,
    num_drafts: int = 4,
    max_tokens_per_step: int = 256,
    adaptive: bool = False,
    tree_nodes: int = 0,
) -> EngineCore:
    blocks = BlockManager(num_blocks, 4, "m")
    return EngineCore(
        runner or FakeRunner(num_blocks, 4, V),
        Scheduler(SchedulerConfig(8, max_tokens_per_step), blocks, max_model_len=100),
        Speculation(
            proposer or NoProposer(),
            Verifier(),
            SpeculationConfig(num_drafts, methods=(SpeculationMethod.MODEL,), adaptive=adaptive, tree_nodes=tree_nodes),
        ),
    )


def request(
    name: str, prompt: Iterable[int] = (1, 2, 3), *, k: int | None = None, salt: str = "", **sampling: object
) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(name, tuple(prompt), params, SpeculationParams(num_tokens=k), cache_salt=salt)


def run(core: EngineCore) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    for _ in range(1000):
        if not core.has_work:
            return chunks
        chunks += core.step()
        core.scheduler.check_integrity()
    raise AssertionError("the engine makes no progress")


def outputs(chunks: Iterable[TokenChunk]) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for chunk in chunks:
        texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return texts


def greedy(prompt: Seq[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_after(tokens, V).argmax()))
    return tokens[len(prompt) :]


def right(sequence: Sequence, max_tokens: int) -> list[int]:
    return greedy(sequence.token_ids, max_tokens)


def wrong(sequence: Sequence, max_tokens: int) -> list[int]:
    return [(token + 1) % V for token in right(sequence, max_tokens)]


def half_right(sequence: Sequence, max_tokens: int) -> list[int]:
    return [*right(sequence, 2), 0, 0, 0, 0][:max_tokens]


def senseless(sequence: Sequence, max_tokens: int) -> list[int]:
    return [*right(sequence, 1), V, -1, 3, 10**9, 5, 5, 5]


DRAFTERS = [right, wrong, half_right, senseless]


def test_greedy_output_is_the_argmax_chain() -> None:
    core = make_core()
    for index, prompt in enumerate(PROMPTS):
        core.add(request(str(index), prompt))
    assert outputs(run(core)) == {str(i): greedy(prompt, 8) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_of", DRAFTERS)
@pytest.mark.parametrize(
    ("num_blocks", "budget", "is_shared"), [(64, 256, True), (8, 256, True), (64, 5, False), (9, 7, True)]
)
def test_drafts_pool_budget_and_cache_change_no_token(
    draft_of: Callable[[Sequence, int], list[int]], temperature: float, num_blocks: int, budget: int, is_shared: bool
) -> None:
    plain = make_core()
    other = make_core(ScriptedProposer(draft_of), num_blocks=num_blocks, max_tokens_per_step=budget)
    for core, is_sharing in ((plain, False), (other, is_shared)):
        for index, prompt in enumerate(PROMPTS):
            salt = "" if is_sharing else str(index)  # texts of different salts share no block
            core.add(request(str(index), prompt, salt=salt, temperature=temperature, max_tokens=12, seed=index))
    assert outputs(run(other)) == outputs(run(plain))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_of", DRAFTERS)
def test_adaptive_lengths_change_no_token(draft_of: Callable[[Sequence, int], list[int]], temperature: float) -> None:
    plain, other = make_core(), make_core(ScriptedProposer(draft_of), adaptive=True)
    for core in (plain, other):
        for index, prompt in enumerate(PROMPTS):
            core.add(request(str(index), prompt, temperature=temperature, max_tokens=40, seed=index))
    assert outputs(run(other)) == outputs(run(plain))
    assert set(other.stats().speedups) == {"model-greedy" if temperature == 0 else "model-sampled"}


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_a_clients_seed_has_its_text_where_others_lengths_are_planned(verify: VerifyMode) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40)
    seeded = [
        GenerateRequest(str(seed), (1, 2), replace(params, seed=seed), SpeculationParams(verify=verify), is_seeded=True)
        for seed in range(3)
    ]
    fixed = make_core(ScriptedProposer(half_right))
    adaptive = make_core(ScriptedProposer(half_right), adaptive=True)
    for each in seeded:
        fixed.add(each)
        adaptive.add(each)
    adaptive.add(replace(seeded[0], request_id="other", is_seeded=False))
    other = adaptive.scheduler._waiting[-1]
    chunks, lengths = [], set()
    while adaptive.has_work:
        chunks += adaptive.step()
        lengths.add(other.draft_allowance)
    texts = outputs(chunks)
    assert outputs(run(fixed)) == {each.request_id: texts[each.request_id] for each in seeded}
    assert len(lengths) > 1


@pytest.mark.parametrize(("is_resting", "num_drafts"), [(False, 16), (True, 0)])
def test_a_request_wants_no_drafts_while_plans_rest(is_resting: bool, num_drafts: int) -> None:
    core = make_core(ScriptedProposer(right), adaptive=True)
    policy = core._accounting.planning.policy
    assert policy is not None
    policy.is_resting = is_resting
    core.add(request("a", max_tokens=30))
    assert core.scheduler._waiting[-1].num_wanted_drafts == num_drafts


def test_a_plan_is_made_after_the_proposer_has_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    proposer = ScriptedProposer(right)
    proposer.commit = lambda sequences: events.append("commit")  # type: ignore[method-assign]
    core = make_core(proposer, adaptive=True)
    policy = core._accounting.planning.policy
    assert policy is not None
    monkeypatch.setattr(policy, "plan_ahead", lambda sequences: events.append("plan"))
    core.add(request("a", max_tokens=30))
    core.step()
    assert events == ["commit", "plan"]


def test_a_pass_without_drafts_asks_nothing_of_the_proposer_and_the_next_tells_all() -> None:
    told: list[int] = []
    proposer = ScriptedProposer(right)
    proposer.commit = lambda sequences: told.extend(len(each.token_ids) for each in sequences)  # type: ignore[method-assign]
    core = make_core(proposer)
    core.add(request("a", max_tokens=30))
    core.step()
    (sequence,) = core.scheduler._running
    sequence.draft_allowance = 0
    assert [len(chunk.token_ids) for _ in range(3) for chunk in core.step()] == [1, 1, 1]
    assert told in ([4, 5], [4])
    sequence.draft_allowance = 4
    core.step()
    assert told[-1] == len(sequence.token_ids)


def test_right_drafts_save_passes() -> None:
    core = make_core(ScriptedProposer(right))
    core.add(request("a", max_tokens=11))
    run(core)
    stats = core.stats()
    assert stats.times.num_steps == 3, "one prefill, then twice four drafts and a bonus"
    assert (stats.drafts.num_drafts, stats.drafts.num_draft_tokens, stats.drafts.num_accepted_tokens) == (2, 8, 8)
    assert stats.drafts.num_accepted_tokens_per_pos == (2, 2, 2, 2)
    assert stats.drafts.acceptance_length == 5.0


def test_ids_outside_the_vocabulary_never_reach_the_model() -> None:
    runner = FakeRunner(64, 4, V)
    core = make_core(ScriptedProposer(senseless), runner=runner)
    core.add(request("a", max_tokens=6))
    while core.has_work:
        core.step()
        assert all(0 <= token < V for span in runner.spans for token in span.token_ids)
    drafts = core.stats().drafts
    assert (drafts.num_invalid_tokens, drafts.num_draft_tokens) == (drafts.num_drafts, drafts.num_drafts)


def test_drafts_are_shown_at_their_place_to_who_wants_them() -> None:
    shown: list[TokenChunk] = []
    core = make_core(ScriptedProposer(lambda sequence, k: right(sequence, k) if len(sequence.token_ids) % 2 else []))
    core.on_drafted = shown.extend
    core.add(replace(request("a", (1, 2), max_tokens=12), returns_drafts=True))
    core.add(request("b", max_tokens=12))
    tokens = outputs(run(core))["a"]
    assert {chunk.request_id for chunk in shown} == {"a"}
    assert all(chunk.draft_ids and not chunk.token_ids for chunk in shown)
    assert {chunk.offset for chunk in shown} > {1}
    for chunk in shown:
        assert list(chunk.draft_ids) == tokens[chunk.offset : chunk.offset + len(chunk.draft_ids)]


class ImpossibleTrees(ScriptedProposer):
    """Proposes trees of an impossible token, as a draft without finite logits does."""

    def propose(self, batch: Seq[ScheduledSequence]) -> list[Draft]:
        return [Draft((IMPOSSIBLE_ID,), (), (-1,)) for _ in batch]


def test_a_draft_without_a_possible_token_stops_nothing() -> None:
    core = make_core(ImpossibleTrees(right), adaptive=True, tree_nodes=8)
    core.add(request("a", max_tokens=90))
    assert outputs(run(core))["a"] == greedy((1, 2, 3), 90)
    assert core.stats().drafts.num_invalid_tokens > 0


def test_a_draft_is_cut_to_what_was_planned() -> None:
    runner = FakeRunner(64, 4, V)
    core = make_core(ScriptedProposer(lambda sequence, max_tokens: [1] * 50), runner=runner, num_drafts=3)
    core.add(request("a", max_tokens=20))
    core.step()
    core.step()
    assert [len(span.token_ids) for span in runner.spans] == [4]


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (SpeculationParams(), 4),
        (SpeculationParams(num_tokens=2), 2),
        (SpeculationParams(num_tokens=9), 9),
        (SpeculationParams(num_tokens=99), 16),
        (SpeculationParams(method=SpeculationMethod.SUFFIX), 16),
        (SpeculationParams(num_tokens=2, method=SpeculationMethod.SUFFIX), 2),
        (SpeculationParams(num_tokens=0), 0),
        (SpeculationParams(enabled=False), 0),
        (SpeculationParams(method=SpeculationMethod.NONE), 0),
    ],
)
def test_a_request_chooses_its_drafts_within_the_deployments_limit(
    speculation: SpeculationParams, expected: int
) -> None:
    asked: list[int] = []
    proposer = ScriptedProposer(lambda sequence, max_tokens: asked.append(max_tokens) or ())
    core = make_core(proposer)
    core.add(GenerateRequest("a", (1, 2), SamplingParams(max_tokens=30), speculation))
    core.step()
    core.step()
    assert asked == ([expected] if expected else [])
    assert proposer.opened == (["a"] if expected else [])


def test_a_proposer_hears_of_every_life_from_open_to_close() -> None:
    proposer = ScriptedProposer(right)
    core = make_core(proposer)
    core.add(request("short", max_tokens=3))
    core.add(request("long", max_tokens=30))
    core.step()
    assert proposer.committed == ["short", "long"]
    core.step()
    assert (proposer.closed, proposer.committed) == (["short"], ["short", "long", "long"])
    core.abort("long")
    assert (proposer.opened, proposer.closed) == (["short", "long"], ["short", "long"])


def test_logprobs_follow_the_tokens() -> None:
    core = make_core(ScriptedProposer(half_right))
    core.add(request("a", max_tokens=7, num_logprobs=2))
    chunks = run(core)
    assert all([entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids) for chunk in chunks)
    tokens = [1, 2, 3]
    for entry in (entry for chunk in chunks for entry in chunk.logprobs):
        assert entry.logprob == pytest.approx(float(logits_after(tokens, V).log_softmax(0)[entry.token_id]), abs=1e-5)
        tokens.append(entry.token_id)


def test_unknown_token_ids_are_refused() -> None:
    core = make_core()
    for bad, param in [
        (request("a", (1, V)), "prompt"),
        (request("b", (-1,)), "prompt"),
        (request("c", logit_bias=((V + 3, 1.0),)), "logit_bias"),
        (request("d", bad_words=((1, 99),)), "bad_words"),
        (request("e", stop_token_ids=(V,)), "stop_token_ids"),
    ]:
        with pytest.raises(RequestError, match="the model's are 0 to 15") as caught:
            core.add(bad)
        assert caught.value.param == param
    assert not core.has_work


class BrokenRunner(FakeRunner):
    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        raise RuntimeError("out of memory")


def test_a_failed_step_is_logged_once_and_stops_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(runner=BrokenRunner(64, 4, V))
    core.add(request("a"))
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="out of memory"):
        core.step()
    assert len(caplog.records) == 1
    with pytest.raises(EngineError, match="failed in an earlier step"):
        core.step()
    with pytest.raises(EngineError):
        core.add(request("b"))


def test_stats_show_queue_pool_and_cache() -> None:
    core = make_core(max_tokens_per_step=12)
    core.add(request("a", range(10)))
    core.add(request("b", range(10)))
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_queued_prefill_tokens) == (2, 0, 0)
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (20, 8)
    assert stats.kv_usage == stats.num_used_blocks / 64 == 4 / 64
    run(core)
    assert core.stats().kv_usage == 0.0


def test_times_add_up_over_steps() -> None:
    core = make_core()
    core.add(request("a"))
    core.step()
    first = core.stats().times
    assert first == core.last_times
    run(core)
    total = core.stats().times
    assert (total - first).num_steps == total.num_steps - 1
    assert total.total_s > first.total_s > first.forward_s > 0.0


def test_goodput_is_what_passes_without_prompts_commit() -> None:
    """The first token of each is committed by the pass over its prompt."""
    core = make_core(ScriptedProposer(half_right))
    core.add(request("a", (1, 2, 3), max_tokens=9))
    core.add(request("b", (1, 2, 3, 4), max_tokens=9))
    run(core)
    sums = core.stats().goodput
    assert sum(each.num_tokens for each in sums) == 2 * 9 - 2
    assert {each.num_sequences for each in sums} <= {1, 2}
    assert all(each.seconds > 0 for each in sums)


def test_close_frees_every_block_and_can_be_called_twice() -> None:
    core = make_core()
    core.add(request("a", range(10)))
    core.step()
    core.close()
    core.close()
    assert not core.has_work
    assert core.stats().num_used_blocks == 0


def test_abort_returns_the_last_chunk() -> None:
    core = make_core(ScriptedProposer(right))
    core.add(request("a", max_tokens=50))
    for _ in range(2):
        core.step()
    chunk = core.abort("a")
    assert chunk is not None
    assert chunk.finish_reason is FinishReason.ABORT
    assert chunk.speculation is not None
    assert chunk.speculation.num_accepted_tokens == 4
    assert core.abort("a") is None


def test_the_documented_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    write_checkpoint(tmp_path / "model", seed=0)
    documentation = engine.engine_core.__doc__
    assert documentation is not None
    example = textwrap.dedent(documentation.split("\n\n", 2)[2]).replace("models/demo/target", str(tmp_path / "model"))
    exec(example, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[-1].startswith("first (")
    assert lines[-1].endswith("length")
