"""A request arrives at the target, and its sampling at the draft, exactly as it was sent."""

from __future__ import annotations

from actors.channel.draft_messages import Open, Round
from actors.shell_messages import Add, ShellToTarget
from protos.frames import FrameCodec
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams, VerifyMode

SAMPLING = SamplingParams(
    seed=-5,
    logit_bias=((3, 1.5),),
    bad_words=((1, 2),),
    grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"const": "ü"}', "response_format"),
)


def test_a_grammar_reaches_the_target_unchanged() -> None:
    codec: FrameCodec[ShellToTarget] = FrameCodec(ShellToTarget)
    sent = Add(GenerateRequest("a", (1, 2), SAMPLING))
    assert codec.feed(codec.encode(sent)) == [sent]


def test_a_grammar_reaches_the_draft_unchanged() -> None:
    codec: FrameCodec[Round] = FrameCodec(Round)
    sent = Round(opens=(Open("a", (1, 2), 2, SAMPLING, 0, VerifyMode.COUPLED, 0, False),))
    assert codec.feed(codec.encode(sent)) == [sent]
