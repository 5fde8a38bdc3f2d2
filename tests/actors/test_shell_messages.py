"""What one process sends arrives at the other whole: requests, their sampling at the draft, answers and reports."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest

from actors.draft.channel_proposer import SyncedSequence
from actors.draft.draft_link import DraftMessage, Open, Round
from actors.draft.draft_server import _sequence
from actors.shell_messages import Add, ShellToTarget, TargetToShell
from engine.sequence.sequence import DraftRule, RequestTokens
from protos.frames import FrameCodec
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams, VerifyMode
from tests.protos.filled import at_default, filled

SAMPLING = SamplingParams(
    seed=-5,
    logit_bias=((3, 1.5),),
    bad_words=((1, 2),),
    grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"const": "ü"}', "response_format"),
)


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        (protocol, kind)
        for protocol in (ShellToTarget, TargetToShell, Round, DraftMessage)
        for kind in typing.get_args(protocol) or (protocol,)
    ],
)
def test_every_field_of_every_message_arrives(protocol: typing.Any, kind: type) -> None:
    sent = filled(kind)
    assert not at_default(sent)
    codec: FrameCodec[object] = FrameCodec(protocol)
    received = codec.feed(codec.encode(sent))
    assert received == [sent]
    assert repr(received) == repr([sent]), "fields that are not compared too"


def test_a_grammar_reaches_the_target_unchanged() -> None:
    codec: FrameCodec[ShellToTarget] = FrameCodec(ShellToTarget)
    sent = Add(GenerateRequest("a", (1, 2), SAMPLING))
    assert codec.feed(codec.encode(sent)) == [sent]


def test_a_grammar_reaches_the_draft_unchanged() -> None:
    codec: FrameCodec[Round] = FrameCodec(Round)
    sent = Round(opens=(Open(GenerateRequest("a", (1, 2), SAMPLING), VerifyMode.COUPLED, 0, False),))
    assert codec.feed(codec.encode(sent)) == [sent]


def test_a_draft_knows_of_a_request_all_that_its_drafts_hang_on() -> None:
    request = filled(GenerateRequest)
    sequence = RequestTokens(request, DraftRule(5, VerifyMode.BLOCK, num_tree_nodes=7))
    sequence.num_computed_tokens = 1
    sequence.drafts_ahead = False
    opening = SyncedSequence(sequence).opening()
    assert not at_default(opening)
    known = _sequence(opening)
    assert known.request == replace(request, prediction_token_ids=())  # which needs no draft process
    assert (known.verify, known.num_wanted_drafts) == (VerifyMode.BLOCK, sequence.num_wanted_drafts)
