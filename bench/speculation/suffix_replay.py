"""The reach of suffixes into recorded agent sessions: `python -m bench.speculation.suffix_replay agent_text.jsonl.gz`.

No model: each recorded answer is walked as a verifier would walk it, match by match, over whole sessions, with what
finished calls have left in the tenant's index. `bench.speculation` has the time; `--every` walks its sample of calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from bench.padded_pair import DEMO
from bench.speculation.suite.workload import Turn, agent_sessions
from engine.proposer.text_match.suffix import SuffixProposer
from engine.sequence.request_tokens import DraftRule
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, VerifyMode


@dataclass(slots=True)
class Count:
    """The cost of a replay: target passes, the rows they verified, and the tokens they committed."""

    num_tokens: int = 0
    num_passes: int = 0
    num_rows: int = 0


def main() -> None:
    """Walk the recorded answers and print the figures of each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="jsonl of agent calls: input, output, session_id, timestamp")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4, 8, 16], help="K")
    parser.add_argument("--min-chance", type=float, nargs="+", default=[0.1], help="of a draft to stand so far")
    parser.add_argument("--every", type=int, default=1, help="one in so many calls is walked, the others are history")
    parser.add_argument("--max-call-tokens", type=int, default=1 << 20, help="of a call that is walked")
    args = parser.parse_args()
    sessions = agent_sessions(DEMO / "target", args.trace, args.every, args.max_call_tokens)
    turns = [turn for session in sessions.streams for turn in session]
    print(f"{'K':>3}{'chance':>8}{'tokens/pass':>13}{'rows/pass':>11}   {sum(turn.is_run for turn in turns)} calls")
    for num_drafts in args.num_draft_tokens:
        for min_chance in args.min_chance:
            count = replay(turns, num_drafts, SuffixProposer(min_chance))
            per_pass = count.num_tokens / count.num_passes, count.num_rows / count.num_passes
            print(f"{num_drafts:3d}{min_chance:8.2f}{per_pass[0]:13.2f}{per_pass[1]:11.1f}", flush=True)


def replay(turns: Seq[Turn], num_drafts: int, proposer: SuffixProposer) -> Count:
    """Walk the answers of all turns that are run, one after the other, as one tenant's."""
    count = Count()
    for index, turn in enumerate(turns):
        request = GenerateRequest(str(index), turn.prompt, SamplingParams(temperature=0.0))
        sequence = Sequence(request, DraftRule(num_drafts, VerifyMode.COUPLED), arrival_s=0.0)
        proposer.open(sequence)
        if turn.is_run:
            _walk(sequence, turn.answer or (), num_drafts, proposer, count)
        else:
            sequence.append(turn.answer or ())
        proposer.close(request.request_id)
    return count


def _walk(sequence: Sequence, answer: Seq[int], num_drafts: int, proposer: SuffixProposer, count: Count) -> None:
    place = 0
    while place < len(answer):
        room = min(num_drafts, len(answer) - place - 1) if place > 0 else 0  # what reads the prompt drafts nothing
        match = proposer.match(sequence, room)
        drafts = () if match is None else match.token_ids
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == answer[place + num_accepted]:
            num_accepted += 1
        sequence.append(answer[place : place + num_accepted + 1])
        place += num_accepted + 1
        proposer.commit([sequence])
        count.num_passes += 1
        count.num_rows += 1 + len(drafts)
    count.num_tokens += len(answer)


if __name__ == "__main__":
    main()
