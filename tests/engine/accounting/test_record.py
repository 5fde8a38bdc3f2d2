"""A pass's record has every figure of the pass, once."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.step_times import StepTimes
from engine.batch.draft import Draft
from engine.sequence.batch import Batch, CheckedDraft, ScheduledSequence
from engine.sequence.sequence import Sequence
from engine.verifier.verify_task import VerifyResult
from protos.messages import SamplingParams
from tests.engine.engine_core.test_engine_core import make_core, request
from tests.engine.fixtures.builders import make_sequence
from tests.engine.fixtures.fakes import ScriptedProposer

COMMIT_S = 0.02


def test_prompts_and_decoding_sequences_are_counted_apart() -> None:
    sampling = SamplingParams(max_tokens=9)
    decoding, prompt = (make_sequence(name, (1, 2, 3), sampling, num_drafts=2) for name in ("a", "b"))
    sampled = ScheduledSequence(decoding, 2, 1, 2)
    batch = Batch((sampled, ScheduledSequence(prompt, 0, 2, 0)), (sampled,))
    passes = [SequencePass(sampled, CheckedDraft(Draft((7, 9)), 2), VerifyResult((7, 8), 1))]
    decoding.append((7, 8))
    record = PassRecord.of(batch, passes, StepTimes(), is_ahead=False, is_followed=False)
    assert (record.num_prefill_tokens, record.num_prompt_rows, record.num_drafts) == (2, 2, 2)
    assert (record.num_decode_sequences, record.num_decode_context_tokens, record.num_committed_tokens) == (1, 3, 2)


class SlowCommit(ScriptedProposer):
    """A proposer whose commit takes a while."""

    def commit(self, sequences: Seq[Sequence]) -> None:
        time.sleep(COMMIT_S)


def test_the_commit_of_a_proposer_counts_for_the_pass_that_its_drafts_are_for() -> None:
    core = make_core(SlowCommit(lambda sequence, max_tokens: [1] * max_tokens))
    core.add(request("a"))
    core.step()
    assert core.last_times.draft_s < COMMIT_S
    core.step()
    assert core.last_times.draft_s >= COMMIT_S
    assert core.stats().times.num_steps == 2


def test_the_time_between_two_steps_counts_for_the_later_one_while_there_is_work() -> None:
    core = make_core()
    core.add(request("a"))
    core.step()
    time.sleep(0.2)  # as long as sending the tokens takes
    core.step()
    assert core.stats().times.commit_s >= 0.2
    while core.has_work:
        core.step()
    working_s = core.stats().times.total_s
    time.sleep(0.2)
    core.add(request("b"))
    core.step()
    assert core.stats().times.total_s < working_s + 0.2
