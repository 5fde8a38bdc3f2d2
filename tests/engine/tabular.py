"""Tabular models, small enough that the law of what they generate can be written down in full.

Shared by the exactness tests. A model's next-token law depends on the position and on the last token, so neighbouring
rows of a verification differ strongly and a law taken from the wrong row shows.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from engine.batch import ScheduledSequence
from engine.checked_draft import CheckedDraft, check_draft
from engine.constrained_draft import constrain
from engine.draft import NO_DRAFT, Draft
from engine.grammar import GrammarMatcher
from engine.grammar_compiler import GrammarCompiler
from engine.row import Row
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.verifier import VerifyTask
from engine.verifier.verifier import Verifier
from engine.vocabulary import Vocabulary
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams, VerifyMode

PROMPT = (0, 1)
NUM_PHASES = 4


@dataclass(frozen=True, slots=True)
class TabularModel:
    """`table [NUM_PHASES, V, V]`: logits by position modulo NUM_PHASES and last token."""

    table: Tensor

    @property
    def num_tokens(self) -> int:
        return self.table.shape[2]

    def logits(self, prefixes: Seq[Seq[int]]) -> Tensor:
        """The row after each prefix, `[R, V]`; a token the model does not know counts modulo V."""
        phases = [len(prefix) % NUM_PHASES for prefix in prefixes]
        return self.table[phases, [prefix[-1] % self.num_tokens for prefix in prefixes]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft."""

    name: str
    target: TabularModel
    draft: TabularModel


def _model(probs: Tensor) -> TabularModel:
    return TabularModel(probs.log())


def _peaked(num_tokens: int, seed: int, concentration: float) -> Tensor:
    """Random laws, the more peaked the lower the concentration; `[NUM_PHASES, V, V] float64`."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch._standard_gamma(torch.full((NUM_PHASES, num_tokens, num_tokens), concentration).double(), generator)
    return weights / weights.sum(dim=-1, keepdim=True)


def _without(probs: Tensor, offset: int) -> Tensor:
    """The laws with one token per row made impossible, another one in each row."""
    phases, last, tokens = torch.meshgrid(*(torch.arange(size) for size in probs.shape), indexing="ij")
    probs = probs.masked_fill((phases + last + offset) % probs.shape[2] == tokens, 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def pair_library(num_tokens: int) -> list[Pair]:
    """Pairs that between them make every known mistake visible."""
    p, q = (_peaked(num_tokens, seed, 0.6) + 0.01 for seed in (1, 2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    impossible = torch.zeros_like(p)
    impossible.scatter_(2, _without(p, 0).argmin(dim=2, keepdim=True), 1.0)
    return [
        Pair("peaked", _model(p), _model(q)),
        Pair("flat draft", _model(p), _model(torch.full_like(p, 1 / num_tokens))),
        Pair("zeros on both sides", _model(_without(p, 0)), _model(_without(q, 1))),
        Pair("equal", _model(p), _model(p)),
        Pair("draft certain of the impossible", _model(_without(p, 0)), _model(impossible)),
    ]


# ---- a grammar over the tokens --------------------------------------------------------------------------------------

END_ID = 3
# Token 0 is "a", 1 is "b", 2 is "c". Some prefixes leave one token, some two, all three, or none but the end.
GRAMMAR = Grammar(GrammarKind.REGEX, "(a[bc]|b(a|ca)|ca)[abc]{3}", "guided_regex")
CONSTRAINED = SamplingParams(grammar=GRAMMAR, stop_token_ids=(END_ID,))


@cache
def letters() -> GrammarCompiler:
    """A compiler for the four tokens a, b, c and end."""
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "<end>": END_ID}, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        core.save(str(file))
        compiler = GrammarCompiler(file, 4, (END_ID,))
        compiler.prepare(GRAMMAR)
    return compiler


def matcher_of(sampling: SamplingParams, generated: Seq[int] = ()) -> GrammarMatcher | None:
    """What the law's grammar makes of the output so far; None without a grammar, or where there is no such output."""
    matcher = letters().matcher(GenerateRequest("", PROMPT, sampling))
    return matcher if matcher is None or matcher.read(generated) else None


def as_computed(sequence: Sequence, draft: Draft, num_tokens: int) -> CheckedDraft:
    """A draft as the engine hands it on."""
    room = len(draft.token_ids)
    checked = check_draft(draft, ScheduledSequence(sequence, 0, 1, room, room), Vocabulary(num_tokens))
    if sequence.matcher is None:
        return checked
    return constrain(checked, len(draft.token_ids) + 1, sequence.matcher)  # room for a forced token


# ---- running the real verifier ------------------------------------------------------------------------------------

Drafting = Callable[[TabularModel, Seq[Sequence], int], list[Draft]]


def new_sequence(
    sampling: SamplingParams,
    verify: VerifyMode = VerifyMode.COUPLED,
    prompt: tuple[int, ...] = PROMPT,
    sample_index: int = 0,
) -> Sequence:
    request = GenerateRequest(f"seed-{sampling.seed}", prompt, sampling, sample_index=sample_index)
    return Sequence(request, num_draft_tokens=8, verify=verify, arrival_s=0.0, matcher=matcher_of(sampling))


def row_of(sequence: Sequence, draft_ids: Seq[int] = ()) -> Row:
    return Row(
        sequence.sampling,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        sequence.request.sample_index,
        tuple(draft_ids),
    )


def draft_by_sampling(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    """Draft as a model proposer does for verification by rejection, all of the vocabulary kept."""
    sampler = Sampler()
    drafts = [NO_DRAFT] * len(sequences)
    for _ in range(num_drafts):
        rows = [row_of(sequence, draft.token_ids) for sequence, draft in zip(sequences, drafts, strict=True)]
        logits = model.logits([[*row.token_ids, *row.draft_ids] for row in rows])
        sample = sampler.sample_sparse(sampler.process(logits, rows), rows, model.num_tokens)
        drafts = [
            Draft((*draft.token_ids, token_id), (*draft.laws, law))
            for draft, token_id, law in zip(drafts, sample.token_ids, sample.laws, strict=True)
        ]
    return drafts


def no_draft(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    return [NO_DRAFT] * len(sequences)


def one_pass(target: TabularModel, sequences: Seq[Sequence], drafts: Seq[Draft]) -> None:
    """Verify one draft per sequence and append what is committed."""
    tasks, prefixes = [], []
    for sequence, draft in zip(sequences, drafts, strict=True):
        checked = as_computed(sequence, draft, target.num_tokens)
        tasks.append(VerifyTask(sequence, checked.draft, len(prefixes)))
        prefixes += [[*sequence.token_ids, *checked.draft.path(node)] for node in range(-1, checked.num_valid)]
    verified = Verifier(Sampler()).verify(target.logits(prefixes).float(), tasks)
    for task, outcome in zip(tasks, verified, strict=True):
        task.sequence.append(outcome.token_ids)
        task.sequence.record_pass(len(task.draft.token_ids), outcome.num_accepted)


@dataclass(frozen=True, slots=True)
class Experiment:
    """N sequences with seeds 0 to N - 1, generated to `num_tokens` tokens by passes of K drafts."""

    pair: Pair
    num_drafts: int
    num_tokens: int
    num_sequences: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    verify: VerifyMode = VerifyMode.REJECTION

    def run(self, drafting: Drafting) -> Tensor:
        """The generated tokens, `[N, num_tokens] int64`."""
        sequences = [new_sequence(replace(self.sampling, seed=seed), self.verify) for seed in range(self.num_sequences)]
        while active := [sequence for sequence in sequences if sequence.num_output_tokens < self.num_tokens]:
            one_pass(self.pair.target, active, drafting(self.pair.draft, active, self.num_drafts))
        end = len(PROMPT) + self.num_tokens
        return torch.tensor([sequence.token_ids[len(PROMPT) : end] for sequence in sequences])


# ---- exact laws and distances -------------------------------------------------------------------------------------


def next_law(model: TabularModel, sampling: SamplingParams, generated: Seq[int]) -> Tensor:
    """The law of the token after PROMPT and `generated`, `[V] float64`, as plain decoding has it."""
    matcher = matcher_of(sampling, generated)
    row = Row(sampling, [*PROMPT, *generated], len(PROMPT), mask=matcher.masks(())[0] if matcher else None)
    sampler = Sampler()
    return sampler.law(sampler.process(model.logits([row.token_ids]), [row]), [row])[0]


def joint_law(
    model: TabularModel, sampling: SamplingParams, num_tokens: int, generated: tuple[int, ...] = ()
) -> Tensor:
    """The joint law of the next `num_tokens` tokens, `[V] * num_tokens` (one number when there are none)."""
    if num_tokens == 0:
        return torch.tensor(1.0, dtype=torch.float64)
    law = next_law(model, sampling, generated)
    rest = [joint_law(model, sampling, num_tokens - 1, (*generated, token_id)) for token_id in range(len(law))]
    return torch.stack([prob * tail for prob, tail in zip(law, rest, strict=True)])


def filled_up(
    model: TabularModel, sampling: SamplingParams, num_tokens: int, emitted: Mapping[tuple[int, ...], Tensor | float]
) -> Tensor:
    """The joint law `[V] * num_tokens` when a pass emits these tokens, so likely each, and plain decoding follows.

    What follows depends on the tokens alone, so its law is computed once for each of them.
    """
    joint = torch.zeros([model.num_tokens] * num_tokens, dtype=torch.float64)
    for token_ids, prob in emitted.items():
        joint[token_ids] += prob * joint_law(model, sampling, num_tokens - len(token_ids), token_ids)
    return joint


def total_variation(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum() / 2)


def chi_square_tail(observed_ids: Tensor, law: Tensor) -> float:
    """Probability of a chi-square as large as the observed one if the tokens `[N, n]` come from `law [V] * n`.

    Cells with an expectation below 5 are pooled; a token that the law excludes makes the answer 0.
    """
    strides = torch.tensor([law.shape[0] ** power for power in reversed(range(law.dim()))])
    counts = torch.bincount((observed_ids * strides).sum(dim=1), minlength=law.numel()).double()
    expected = law.flatten().double() * len(observed_ids)
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    is_small = expected < 5
    counts = torch.cat([counts[~is_small], counts[is_small].sum()[None]])
    expected = torch.cat([expected[~is_small], expected[is_small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def detectable_variation(num_sequences: int, num_cells: int) -> float:
    """The total variation that `num_sequences` samples detect with power 0.999 at alpha 1e-6, in the worst case.

    chi-square divergence >= 4 TV**2, and the power needs N * divergence >= noncentrality.
    """
    noncentrality = {8: 82, 27: 110, 64: 142, 125: 178, 243: 227}[num_cells]
    return math.sqrt(noncentrality / num_sequences / 4)
