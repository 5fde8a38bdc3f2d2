"""The checks that the verifiers pass and that every mutant of them fails; each raises AssertionError.

Each takes its size as an argument, so that a mutant can be shown to fail the very check that the real code passes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from engine.draft import NO_DRAFT, Draft
from engine.noise import random_bits, uniform
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.verifier import VerifyTask, block, block_law, rejection
from engine.verifier import rejection_law as law
from engine.verifier.placed import Placed, drafted_probs, final_laws, place
from engine.verifier.trial import prepare
from protos.messages import SamplingParams, VerifyMode
from tests.engine.tabular import (
    PROMPT,
    Drafting,
    Experiment,
    Pair,
    TabularModel,
    as_computed,
    chi_square_tail,
    draft_by_sampling,
    filled_up,
    joint_law,
    new_sequence,
    next_law,
    no_draft,
    one_pass,
    pair_library,
    row_of,
    total_variation,
)

ALPHA = 1e-6

# ---- layer A: exact enumeration -----------------------------------------------------------------------------------


def draft_paths(pair: Pair, sampling: SamplingParams, num_drafts: int) -> Iterator[tuple[Draft, float]]:
    """Every draft the pair can make, with its probability; the laws are those the real drafting reports."""
    sampler = Sampler()
    paths = [(NO_DRAFT, 1.0)]
    for _ in range(num_drafts):
        grown = []
        for draft, prob in paths:
            row = row_of(new_sequence(sampling), draft.token_ids)
            scores = sampler.process(pair.draft.logits([[*row.token_ids, *row.draft_ids]]), [row])
            (q,) = sampler.sample_sparse(scores, [row], pair.draft.num_tokens).laws
            grown += [
                (
                    Draft((*draft.token_ids, token_id), (*draft.laws, q)),
                    prob * law.draft_probs_of([q], [token_id]).item(),
                )
                for token_id in q.token_ids
            ]
        paths = grown
    yield from paths


def certain_path(draft_ids: Seq[int]) -> list[tuple[Draft, float]]:
    """A draft that is a function of the prefix, as n-grams are."""
    return [(Draft(tuple(draft_ids)), 1.0)]


def enumerated_law(
    pair: Pair,
    sampling: SamplingParams,
    num_tokens: int,
    paths: Seq[tuple[Draft, float]],
    verify: VerifyMode = VerifyMode.REJECTION,
) -> Tensor:
    """The joint law `[V] * num_tokens` of what one pass emits, filled up by plain decoding; no randomness.

    Walks every draft and every pattern of coins through the functions that the verifier itself calls.
    """
    emitted: defaultdict[tuple[int, ...], Tensor | float] = defaultdict(float)
    for draft, path_prob in paths:
        for branch in _branches(pair.target, sampling, draft, verify):
            for token_id in branch.final_law.nonzero()[:, 0].tolist():
                token_ids = (*branch.accepted, token_id)[:num_tokens]
                emitted[token_ids] += path_prob * branch.prob * branch.final_law[token_id]
    return filled_up(pair.target, sampling, num_tokens, emitted)


@dataclass(frozen=True, slots=True)
class _Branch:
    """One pattern of coins: what it accepts, the law of the token after that, and its probability."""

    accepted: tuple[int, ...]
    final_law: Tensor
    prob: float


def expected_tokens(pair: Pair, num_drafts: int, verify: VerifyMode) -> float:
    """Tokens that a pass commits on average, the recovered or bonus token included."""
    sampling = SamplingParams()
    return sum(
        path_prob * branch.prob * (len(branch.accepted) + 1)
        for draft, path_prob in draft_paths(pair, sampling, num_drafts)
        for branch in _branches(pair.target, sampling, draft, verify)
    )


def _branches(target: TabularModel, sampling: SamplingParams, draft: Draft, verify: VerifyMode) -> Iterator[_Branch]:
    sampler = Sampler()
    sequence = new_sequence(sampling, verify)
    draft = as_computed(sequence, draft, target.num_tokens).draft
    trial = prepare(VerifyTask(sequence, draft, 0), target.num_tokens)
    logits = target.logits([[*row.token_ids, *draft.token_ids[:i]] for i, row in enumerate(trial.rows)])
    p = sampler.law(sampler.process(logits, trial.rows), trial.rows)
    (placed,) = place([trial])
    rule = _block_rule(p, placed) if verify is VerifyMode.BLOCK else _rejection_rule(p, placed)
    for stands in product((False, True), repeat=len(rule.stand_probs)):
        prob = 1.0
        for is_standing, stand_prob in zip(stands, rule.stand_probs, strict=True):
            prob *= stand_prob if is_standing else 1.0 - stand_prob
        if prob > 0:
            count = rule.count(stands)
            final_law = final_laws(p, [placed], [count], rule.scales and [rule.scales[count]])[0]
            yield _Branch(trial.draft_ids[:count], final_law, prob)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one pass decides: the share of coins that let each draft stand, how they are counted, and the residuals."""

    stand_probs: list[float]
    count: Callable[[Seq[bool]], int]
    scales: Seq[float] | None = None


def _rejection_rule(p: Tensor, placed: Placed) -> _Rule:
    probs = drafted_probs(p, [placed])
    accept_probs = _share_of_coins(lambda coins: law.is_accepted(coins, probs.target, probs.draft), len(placed.rows))
    return _Rule(accept_probs, law.count_accepted)


def _block_rule(p: Tensor, placed: Placed) -> _Rule:
    ratios = block.running_ratios(p, [placed])
    probs = block.success_probs(p, [placed], ratios)
    accept_probs = _share_of_coins(lambda coins: block_law.is_success(coins, probs), len(placed.rows))
    return _Rule(accept_probs, block_law.count_accepted, ratios[0])


def _share_of_coins(stands: Callable[[Tensor], Tensor], num_drafts: int) -> list[float]:
    """The share of coins in [0, 1) that let each draft stand, found by bisection of the coin through the real test."""
    low, high = torch.zeros(num_drafts).double(), torch.ones(num_drafts).double()
    for _ in range(60):
        coins = (low + high) / 2
        is_standing = stands(coins)
        low, high = torch.where(is_standing, coins, low), torch.where(is_standing, high, coins)
    return low.tolist()


def check_enumeration(
    num_tokens: int,
    num_drafts: int,
    sampling: SamplingParams = SamplingParams(),
    pairs: Seq[Pair] | None = None,
    verify: VerifyMode = VerifyMode.REJECTION,
) -> None:
    """One pass emits exactly the target's law, for every pair of the library."""
    for pair in pairs or pair_library(num_tokens):
        paths = list(draft_paths(pair, sampling, num_drafts))
        emitted = enumerated_law(pair, sampling, num_drafts + 1, paths, verify)
        expected = joint_law(pair.target, sampling, num_drafts + 1)
        assert total_variation(emitted, expected) < 1e-12, pair.name


# ---- layer B: samples of the real verifier ------------------------------------------------------------------------


def check_samples(experiment: Experiment, drafting: Drafting = draft_by_sampling) -> None:
    """N generated sequences are no evidence against the target's joint law."""
    expected = joint_law(experiment.pair.target, experiment.sampling, experiment.num_tokens)
    assert chi_square_tail(experiment.run(drafting), expected) > ALPHA


def check_zero_coins(pair: Pair, verify: VerifyMode = VerifyMode.REJECTION) -> None:
    """The smallest coin that can be drawn is 0, and even that one accepts no impossible token."""
    verifier = block if verify is VerifyMode.BLOCK else rejection
    with mock.patch.object(verifier, "uniform", lambda keys, lanes=0: torch.zeros(len(keys), dtype=torch.float64)):
        generated = Experiment(pair, 1, 1, num_sequences=64, verify=verify).run(draft_by_sampling)
    p = next_law(pair.target, SamplingParams(), ())
    assert bool((p[generated[:, 0]] > 0).all())


def check_fresh_numbers(experiment: Experiment) -> None:
    """No coin and no noise of a draft is drawn twice, though positions are drafted again by the next pass."""
    coins, draft_bits = _Recorder(uniform), _Recorder(random_bits)
    with mock.patch("engine.verifier.block.uniform", coins), mock.patch("engine.sampler.random_bits", draft_bits):
        experiment.run(draft_by_sampling)
    for recorder in (coins, draft_bits):
        assert len(recorder.drawn) > experiment.num_sequences * experiment.num_tokens
        assert len(set(recorder.drawn)) == len(recorder.drawn)


class _Recorder:
    """A source of random numbers that remembers what it gave."""

    def __init__(self, draw: Callable[..., Tensor]) -> None:
        self._draw = draw
        self.drawn: list[tuple[int, int]] = []

    def __call__(self, keys: Tensor, *args: Tensor | int) -> Tensor:
        lanes = torch.zeros_like(keys) + (args[-1] if isinstance(args[-1], Tensor) else 0)
        self.drawn += zip(keys.tolist(), lanes.tolist(), strict=True)
        return self._draw(keys, *args)


# ---- layer D: equality --------------------------------------------------------------------------------------------

EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=10,
    top_p=0.97,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((3, 0.5), (7, -1.0)),
    bad_words=((5,), (2, 4), (1, 2, 3)),
    stop_token_ids=(6, 8),
    min_tokens=10,
    max_tokens=64,
)
LAWS = (EVERYTHING, SamplingParams(), SamplingParams(temperature=0.0), replace(EVERYTHING, temperature=0.0))
NUM_GENERATED = 24


def big_model(seed: int = 7) -> TabularModel:
    """Twelve tokens, enough for all sampling parameters at once."""
    generator = torch.Generator().manual_seed(seed)
    return TabularModel(torch.randn(4, 12, 12, generator=generator) * 1.5)


def similar_model() -> TabularModel:
    """A draft that is right more often than not."""
    return TabularModel(big_model().table + 0.7 * big_model(seed=8).table)


def coupled_run(target: TabularModel, drafting: Drafting, draft: TabularModel, num_drafts: int) -> list[list[int]]:
    """The first NUM_GENERATED tokens of a batch of every law, with three seeds and two sample indices each."""
    sequences = [
        new_sequence(replace(sampling, seed=seed), sample_index=index)
        for sampling in LAWS
        for seed in (-(2**63), -1, 12345)
        for index in (0, 1)
    ]
    while active := [sequence for sequence in sequences if sequence.num_output_tokens < NUM_GENERATED]:
        one_pass(target, active, drafting(draft, active, num_drafts))
    return [sequence.token_ids[: len(PROMPT) + NUM_GENERATED] for sequence in sequences]


def draft_by_coupling(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    """Draft as a model proposer does for coupled verification: the ordinary sampler, with the ordinary noise."""
    sampler = Sampler()
    drafts: list[tuple[int, ...]] = [()] * len(sequences)
    for _ in range(num_drafts):
        rows = [row_of(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
        logits = model.logits([[*row.token_ids, *row.draft_ids] for row in rows])
        picked = sampler.pick(sampler.process(logits, rows), rows).tolist()
        drafts = [(*draft, token_id) for draft, token_id in zip(drafts, picked, strict=True)]
    return [Draft(draft) for draft in drafts]


def draft_by_malice(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    """Random tokens, some of which do not exist, in random numbers."""
    dice = random.Random(sum(sequence.num_output_tokens for sequence in sequences))
    choices = [*range(model.num_tokens), -1, model.num_tokens, 2**40]
    return [Draft(tuple(dice.choices(choices, k=dice.randint(0, num_drafts)))) for _ in sequences]


def check_coupled_equality(drafting: Drafting, draft: TabularModel, num_drafts: int) -> None:
    """Whatever is drafted, the output is the one without a draft."""
    target = big_model()
    assert coupled_run(target, drafting, draft, num_drafts) == coupled_run(target, no_draft, draft, 0)
