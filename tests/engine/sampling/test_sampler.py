"""The sampler equals a slow one written from the definitions, and keeps its promises about batches, ties and costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.batch.draft import WEIGHT_SUM
from engine.sampling import penalties
from engine.sampling.logits_row import LogitsRow, LogprobQuery, token_logprobs
from engine.sampling.noise import Purpose, gumbel
from engine.sampling.sampler import Sampler, row_keys
from engine.sampling.sparse_distribution import choose, is_consistent, quantize
from protos.messages import SamplingParams
from tests.engine.fixtures.tabular import chi_square_tail

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0)


def row_after(sampling: SamplingParams, *token_ids: int, draft_ids: tuple[int, ...] = ()) -> LogitsRow:
    """The row after a prompt of two tokens, the other committed ones, and drafts."""
    return LogitsRow(sampling, list(token_ids), 2, 0, draft_ids)


def process(logits: Tensor, *rows: LogitsRow) -> Tensor:
    return Sampler().apply_processors(logits, rows)


def probs_of(logits: list[float], sampling: SamplingParams, *token_ids: int) -> list[float]:
    """The distribution of one row after a prompt of two tokens."""
    row = row_after(sampling, *(token_ids or (0, 1)))
    sampler = Sampler()
    return sampler.probs(sampler.apply_processors(torch.tensor([logits]), [row]), [row])[0].tolist()


# ---- against the slow sampler -------------------------------------------------------------------------------------


def slow_probs(logits: list[float], row: LogitsRow) -> list[float]:
    """The distribution from the definitions, one token at a time; no ties, as random logits have none."""
    sampling = row.sampling
    prefix = [*row.token_ids, *row.draft_ids]
    generated = prefix[row.num_prompt_tokens :]
    scores = list(logits)
    for token_id in range(len(scores)):
        if token_id in prefix:
            scores[token_id] *= 1 / sampling.repetition_penalty if scores[token_id] > 0 else sampling.repetition_penalty
        scores[token_id] -= sampling.frequency_penalty * generated.count(token_id)
        scores[token_id] -= sampling.presence_penalty * (token_id in generated)
    for token_id, bias in sampling.logit_bias:
        scores[token_id] += bias
    banned = {word[-1] for word in sampling.bad_words if tuple(prefix[len(prefix) - len(word) + 1 :]) == word[:-1]}
    if len(generated) < sampling.min_tokens:
        banned |= set(sampling.stop_token_ids)
    scores = [-math.inf if token_id in banned else score for token_id, score in enumerate(scores)]
    if sampling.temperature == 0:
        return [float(token_id == scores.index(max(scores))) for token_id in range(len(scores))]
    probs = slow_softmax([score / sampling.temperature for score in scores])
    order = sorted(range(len(probs)), key=lambda token_id: -probs[token_id])
    if sampling.top_k:
        probs = slow_keep(probs, order[: sampling.top_k])
    kept: list[int] = []
    for token_id in order:
        if sum(probs[i] for i in kept) < sampling.top_p:
            kept.append(token_id)
    probs = slow_keep(probs, kept)
    return slow_keep(probs, [i for i in order if probs[i] >= sampling.min_p * max(probs)])


def slow_softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def slow_keep(probs: list[float], kept: list[int]) -> list[float]:
    total = sum(probs[i] for i in kept)
    return [prob / total if i in kept else 0.0 for i, prob in enumerate(probs)]


def random_row(dice: random.Random) -> LogitsRow:
    def maybe(value: float, neutral: float) -> float:
        return value if dice.random() < 0.5 else neutral

    sampling = SamplingParams(
        seed=dice.randrange(-(2**63), 2**63),
        temperature=dice.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=dice.choice([0, 0, 1, 4, 100]),
        top_p=maybe(dice.uniform(0.2, 0.99), 1.0),
        min_p=maybe(dice.uniform(0.0, 0.3), 0.0),
        repetition_penalty=maybe(dice.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(dice.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(dice.uniform(-2, 2), 0.0),
        logit_bias=tuple((dice.randrange(NUM_TOKENS), dice.uniform(-3, 3)) for _ in range(dice.choice([0, 0, 3]))),
        bad_words=tuple(tuple(dice.choices(range(4), k=dice.randint(1, 3))) for _ in range(dice.choice([0, 2]))),
        stop_token_ids=(1, 5),
        min_tokens=dice.choice([0, 0, 6]),
    )
    committed = dice.choices(range(4), k=dice.randint(2, 8))
    return LogitsRow(sampling, committed, 2, dice.randrange(3), tuple(dice.choices(range(4), k=dice.randint(0, 3))))


@pytest.mark.parametrize("seed", range(30))
def test_a_random_batch_has_the_distributions_of_the_definitions(seed: int) -> None:
    dice = random.Random(seed)
    rows = [random_row(dice) for _ in range(16)]
    logits = torch.randn(16, NUM_TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    sampler = Sampler()
    probs = sampler.probs(sampler.apply_processors(logits, rows), rows)
    expected = torch.tensor([slow_probs(values, row) for values, row in zip(logits.tolist(), rows, strict=True)])
    torch.testing.assert_close(probs, expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_row_has_the_same_scores_and_token_alone_and_in_any_batch(seed: int) -> None:
    dice = random.Random(seed)
    rows = [random_row(dice) for _ in range(16)]
    logits = torch.randn(16, NUM_TOKENS, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler()
    scores = sampler.apply_processors(logits, rows)
    tokens = sampler.sample(scores, rows)
    for index, row in enumerate(rows):
        alone = sampler.apply_processors(logits[index : index + 1], [row])
        assert torch.equal(alone[0], scores[index])
        assert sampler.sample(alone, [row])[0] == tokens[index]


# ---- the parameters one by one ------------------------------------------------------------------------------------


def test_neutral_rows_get_the_logits_themselves() -> None:
    logits = torch.randn(3, NUM_TOKENS)
    rows = [row_after(SamplingParams(seed=seed), 0, 1) for seed in range(2)]
    assert process(logits, *rows, row_after(GREEDY, 0, 1)) is logits


def test_the_logits_are_never_written() -> None:
    logits = torch.randn(2, NUM_TOKENS)
    before = logits.clone()
    busy = SamplingParams(0, 0.5, 3, 0.9, 0.1, 1.2, 1.0, 1.0, ((1, 2.0),), ((3,),), (4,), 9)
    process(logits, row_after(busy, 0, 1, 2), row_after(GREEDY, 0, 1))
    process(logits, row_after(busy, 0, 1, 2), row_after(busy, 0, 1))
    assert torch.equal(logits, before)


def test_presence_and_frequency_count_generated_tokens_and_drafts_but_not_the_prompt() -> None:
    sampling = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)
    row = row_after(sampling, 0, 1, 2, 2, draft_ids=(2, 3))
    assert process(torch.zeros(1, 5), row)[0].tolist() == [0.0, 0.0, -1.75, -1.25, 0.0]


def test_repetition_counts_the_prompt_too_and_shrinks_either_sign() -> None:
    row = row_after(SamplingParams(repetition_penalty=2.0), 0, 1, 2)
    assert process(torch.tensor([[4.0, -4.0, 4.0, 4.0]]), row)[0].tolist() == [2.0, -8.0, 2.0, 4.0]


def test_rows_of_several_sequences_count_their_own_tokens() -> None:
    sampling = SamplingParams(frequency_penalty=1.0)
    first, second = [0, 1, 2], [0, 1, 3, 3]
    rows = [
        LogitsRow(sampling, first, 2),
        LogitsRow(sampling, second, 2),
        LogitsRow(sampling, first, 2, 0, (4,)),
        LogitsRow(sampling, second, 2, 0, (3,)),
    ]
    assert process(torch.zeros(4, 5), *rows).tolist() == [
        [0, 0, -1, 0, 0],
        [0, 0, 0, -2, 0],
        [0, 0, -1, 0, -1],
        [0, 0, 0, -3, 0],
    ]


def test_counts_kept_from_step_to_step_are_those_of_the_texts_as_they_are_now() -> None:
    sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25)
    dice, sampler = random.Random(4), Sampler()
    texts = [dice.choices(range(NUM_TOKENS + 1), k=3 + index) for index in range(5)]
    for _ in range(40):
        chosen = dice.sample(texts, dice.randint(1, 5))
        rows = [LogitsRow(sampling, text, 2, 0, (1,) * count) for text in chosen for count in range(dice.randint(1, 3))]
        logits = torch.randn(len(rows), NUM_TOKENS)
        assert torch.equal(sampler.apply_processors(logits, rows), process(logits, *rows))
        for text in chosen:
            text += dice.choices(range(NUM_TOKENS + 1), k=dice.randint(0, 3))
        texts[dice.randrange(5)] = dice.choices(range(NUM_TOKENS + 1), k=4)  # one ends, another begins


def test_a_long_text_under_penalties_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    real = penalties.index_tensor
    monkeypatch.setattr(
        penalties, "index_tensor", lambda values, device: sent.append(len(values)) or real(values, device)
    )
    sampler, text = Sampler(), [1] * 1000
    for _ in range(3):
        sampler.apply_processors(torch.zeros(1, 4), [LogitsRow(SamplingParams(presence_penalty=1.0), text, 900)])
        text.append(2)
    assert sum(sent) < 1000 + 10


def test_many_biases_and_bad_words_forbid_and_favour_what_each_alone_does() -> None:
    dice = random.Random(0)
    bias = tuple((dice.randrange(NUM_TOKENS + 2), dice.uniform(-3, 3)) for _ in range(300))
    words = tuple(tuple(dice.choices(range(4), k=dice.randint(1, 5))) for _ in range(40))
    text = dice.choices(range(4), k=20)
    samplings = SamplingParams(logit_bias=bias), SamplingParams(bad_words=words, logit_bias=bias[:5])
    rows = [LogitsRow(samplings[count % 2], text[: 3 + count], 2, 0, tuple(text[:count])) for count in range(6)]
    logits = torch.randn(6, NUM_TOKENS, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, values in zip(rows, expected, strict=True):
        prefix = (*row.token_ids, *row.draft_ids)
        for token_id, value in row.sampling.logit_bias:
            if token_id < NUM_TOKENS:
                values[token_id] += value
        for word in row.sampling.bad_words:
            if prefix[len(prefix) - len(word) + 1 :] == word[:-1]:
                values[word[-1]] = -math.inf
    assert torch.equal(Sampler().apply_processors(logits, rows), expected)


def test_bad_words_of_several_tokens_wait_for_their_beginning_drafts_included() -> None:
    sampling = SamplingParams(bad_words=((3,), (1, 2, 0)))
    rows = [row_after(sampling, 0, 1), row_after(sampling, 0, 1, 2), row_after(sampling, 0, 1, draft_ids=(2,))]
    masked = process(torch.zeros(3, 4), *rows).isneginf()
    assert masked.nonzero().tolist() == [[0, 3], [1, 0], [1, 3], [2, 0], [2, 3]]


def test_stop_tokens_are_masked_up_to_the_row_that_reaches_the_minimum() -> None:
    sampling = SamplingParams(stop_token_ids=(0, 3), min_tokens=2)
    rows = [row_after(sampling, 0, 1, draft_ids=(2,) * num_drafts) for num_drafts in range(3)]
    assert process(torch.zeros(3, 4), *rows).isneginf().nonzero().tolist() == [[0, 0], [0, 3], [1, 0], [1, 3]]


def test_ids_outside_the_vocabulary_do_nothing() -> None:
    for sampling in (
        SamplingParams(logit_bias=((99, 5.0),)),
        SamplingParams(bad_words=((99,),), stop_token_ids=(99,), min_tokens=9),
        SamplingParams(presence_penalty=1.0, frequency_penalty=2.0),
    ):
        assert process(torch.zeros(1, 4), row_after(sampling, 0, 1, 99))[0].tolist() == [0.0] * 4


def test_top_p_keeps_the_token_that_crosses_and_at_least_one() -> None:
    logits = [math.log(prob) for prob in (0.5, 0.25, 0.15, 0.1)]
    assert probs_of(logits, SamplingParams(top_p=0.6)) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probs_of(logits, SamplingParams(top_p=0.0)) == pytest.approx([1, 0, 0, 0])


def test_top_p_of_a_distribution_wider_than_the_first_look_is_that_of_a_full_sort() -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(1)) * 0.1
    narrow = torch.cat([logits[:1], logits[1:] * 100])
    sampling = SamplingParams(top_p=0.9)
    kept = process(narrow, row_after(sampling, 0, 1), row_after(sampling, 0, 1)).isfinite()
    probs, order = narrow.double().softmax(1).sort(descending=True)
    expected = (probs.cumsum(1) - probs < 0.9).sum(1)
    assert (kept.sum(1) - expected).abs().max() <= 1
    assert kept[1:].equal(process(narrow[1:], row_after(sampling, 0, 1)).isfinite())
    assert bool(kept.gather(1, order)[:, :512].any())


def test_equal_scores_at_a_cut_are_kept_together() -> None:
    logits = [1.0, 2.0, 1.0, 0.0]
    for sampling in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(min_p=0.3)):
        kept = [prob > 0 for prob in probs_of(logits, sampling)]
        assert kept == [True, True, True, False]


def test_cuts_apply_in_order_each_to_what_is_left() -> None:
    logits = [math.log(prob) for prob in (0.4, 0.3, 0.2, 0.1)]
    assert probs_of(logits, SamplingParams(top_k=2, top_p=0.57)) == pytest.approx([1, 0, 0, 0])


def test_a_temperature_near_zero_is_greedy_and_divides_by_nothing() -> None:
    for temperature in (0.0, 1e-9, 1e-320):
        assert probs_of([0.0, 3.0, 3.0], SamplingParams(temperature=temperature)) == [0.0, 1.0, 0.0]
    assert probs_of([0.0, 3.0, 2.9], SamplingParams(temperature=1e-5)) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("logits", [[-math.inf, 0.0, -math.inf], [-math.inf, 1.0, 2.0], [-math.inf] * 3])
def test_impossible_tokens_never_become_nan(logits: list[float]) -> None:
    busy = SamplingParams(3, 0.5, 2, 0.9, 0.1, 1.2, 1.0, 1.0, ((1, 2.0),), ((2, 2),), (2,), 1)
    for sampling in (busy, replace(busy, temperature=0.0), replace(busy, repetition_penalty=1.0)):
        row, sampler = row_after(sampling, 0, 1), Sampler()
        scores = sampler.apply_processors(torch.tensor([logits]), [row])
        assert not bool(scores.isnan().any())
        assert not bool(sampler.probs(scores, [row]).isnan().any())
        (token_id,), (distribution,) = sampler.sample_sparse(scores, [row], 3)
        assert is_consistent(distribution, token_id)
        if max(logits) > -math.inf:
            assert logits[int(sampler.sample(scores, [row]))] > -math.inf
            assert logits[token_id] > -math.inf


# ---- drawing ------------------------------------------------------------------------------------------------------


def test_greedy_ties_go_to_the_lowest_id_in_any_batch() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, [17, 18, 4999]] = 1.0
    rows = [row_after(GREEDY, 0, 1)] * 2
    assert Sampler().sample(logits, rows).tolist() == [17, 17]
    assert Sampler().sample(logits, [rows[0], row_after(SamplingParams(), 0, 1)]).tolist()[0] == 17


def test_a_draw_is_the_argmax_of_scores_and_noise_of_its_position() -> None:
    logits = torch.randn(4, 300)
    rows = [row_after(SamplingParams(seed=-3), *range(2 + index)) for index in range(4)]
    noise = gumbel(row_keys(rows, Purpose.TARGET_GUMBEL, logits.device), 300)
    assert torch.equal(Sampler().sample(logits, rows), (logits + noise).argmax(1))


def test_drafts_in_the_prefix_and_committed_tokens_are_the_same_position() -> None:
    logits = torch.randn(2, 300)
    rows = [row_after(SamplingParams(), 0, 1, 2, 3), row_after(SamplingParams(), 0, 1, draft_ids=(2, 3))]
    tokens = Sampler().sample(logits[:1].expand(2, -1), rows)
    assert tokens[0] == tokens[1]


def test_draws_follow_the_distribution() -> None:
    """40,000 draws of 8 tokens: total variation .023 is seen with power 0.999 at alpha 1e-6."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -3.0, -math.inf])
    rows = [row_after(SamplingParams(seed=seed), 0, 1) for seed in range(40_000)]
    tokens = Sampler().sample(logits.expand(len(rows), -1), rows)
    assert chi_square_tail(tokens[:, None], logits.softmax(0)) > 1e-6


# ---- sparse distributions -------------------------------------------------------------------------------------------


def test_weights_sum_exactly_and_no_live_token_weighs_nothing() -> None:
    probs = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).mul_(6).softmax(1)
    probs = probs.sort(dim=1, descending=True).values
    probs[:, 60:] = 0.0
    weights = quantize(probs)
    assert weights.sum(1).tolist() == [WEIGHT_SUM] * 200
    assert int(weights[:, :60].min()) >= 1
    assert int(weights[:, 60:].max()) == 0
    assert float((weights / WEIGHT_SUM - probs).abs().max()) < 64 * 2 / WEIGHT_SUM


def test_the_draw_has_exactly_the_distribution_of_the_weights() -> None:
    """All 65,536 values of the noise, counted."""
    weights = quantize(torch.tensor([[0.61, 0.3, 0.08999, 0.00001, 0.0]]))
    columns = choose(weights.expand(WEIGHT_SUM, -1), torch.arange(WEIGHT_SUM))
    assert torch.bincount(columns, minlength=5).tolist() == weights[0].tolist()


def test_a_sparse_sample_is_cut_to_k_and_consistent() -> None:
    logits = torch.randn(50, 300)
    rows = [row_after(SamplingParams(seed=seed), 0, 1) for seed in range(50)]
    sample = Sampler().sample_sparse(logits, rows, 8)
    for token_id, distribution, row in zip(*sample, logits, strict=True):
        assert is_consistent(distribution, token_id)
        assert set(distribution.token_ids) == set(row.topk(8).indices.tolist())


def test_a_greedy_sparse_sample_is_certain_of_the_argmax() -> None:
    token_ids, (distribution,) = Sampler().sample_sparse(torch.tensor([[0.0, 2.0, 2.0]]), [row_after(GREEDY, 0, 1)], 2)
    assert token_ids == (1,)
    assert (distribution.token_ids, distribution.weights) == ((1,), (WEIGHT_SUM,))


def test_a_cut_distribution_lists_only_what_is_possible_and_k_may_exceed_the_vocabulary() -> None:
    row = row_after(SamplingParams(top_k=2), 0, 1)
    scores = process(torch.tensor([[0.0, 2.0, 1.0]]), row)
    _, (distribution,) = Sampler().sample_sparse(scores, [row], 64)
    assert distribution.token_ids == (1, 2)


# ---- logprobs -----------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits_with_ties_by_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0], [0.0] * 5])
    raw = logits.log_softmax(1)
    queries = [LogprobQuery(0, 4, 3), LogprobQuery(1, 2, 2), LogprobQuery(0, 0, 0), LogprobQuery(1, 1, 99)]
    first, second, third, fourth = token_logprobs(logits, queries)
    assert (first.token_id, first.logprob) == (4, pytest.approx(float(raw[0, 4])))
    assert [token_id for token_id, _ in first.top] == [1, 0, 2]
    assert [value for _, value in first.top] == pytest.approx([float(raw[0, i]) for i in (1, 0, 2)])
    assert [token_id for token_id, _ in second.top] == [0, 1]
    assert third.top == ()
    assert [token_id for token_id, _ in fourth.top] == [0, 1, 2, 3, 4]
    assert token_logprobs(logits, []) == []
