"""Trees: exactly the target's distribution by rejection, enumerated; the same tokens in coupled mode."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from engine.batch.draft import NO_DRAFT, WEIGHT_SUM, Draft, SparseDistribution
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.noise import Purpose
from engine.sampling.sampler import Sampler
from engine.sequence.sequence import Sequence
from engine.verifier import rejection, rejection_rule, verifier
from engine.verifier.verifier import Verifier, descend
from engine.verifier.verify_task import VerifyResult, VerifyTask, prepare_all
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.exactness_checks import big_model, check_samples, coupled_run, similar_model
from tests.engine.fixtures.tabular import (
    CONSTRAINED,
    Experiment,
    TabularModel,
    TabularPair,
    filled_up,
    joint_probs,
    new_sequence,
    no_draft,
    pair_library,
    row_of,
    total_variation,
)

SHAPES = {
    "two roots": (-1, -1),
    "three roots": (-1, -1, -1),
    "a branch below": (-1, 0, 0),
    "branches above and below": (-1, -1, 0, 0, 1),
    "a chain": (-1, 0, 1),
}

# ---- by rejection: exact enumeration ------------------------------------------------------------------------------


def drawn_trees(pair: TabularPair, sampling: SamplingParams, parents: Seq[int]) -> list[tuple[Draft, float]]:
    """Every tree of a shape that the pair can draw without replacement, with its probability.

    If a distribution has no token left, a node and its descendants are missing.
    """
    grown = [_Grown(NO_DRAFT, {-1: -1}, 1.0)]
    for node, parent in enumerate(parents):
        grown = [after for before in grown for after in _draw(pair, sampling, before, node, parent)]
    return [(each.tree, each.prob) for each in grown]


@dataclass(frozen=True, slots=True)
class _Grown:
    """A partial tree: the index of each node of the shape, and its probability."""

    tree: Draft
    places: dict[int, int]
    prob: float


def _draw(pair: TabularPair, sampling: SamplingParams, before: _Grown, node: int, parent: int) -> list[_Grown]:
    if parent not in before.places:
        return [before]
    tree, place = before.tree, before.places[parent]
    q = _distribution_after(pair, sampling, tree, place)
    taken = [token for token, its_parent in zip(tree.token_ids, tree.parents, strict=True) if its_parent == place]
    left = {token: weight for token, weight in zip(q.token_ids, q.weights, strict=True) if token not in taken}
    places = {**before.places, node: len(tree.token_ids)}
    return [
        _Grown(
            Draft((*tree.token_ids, token_id), (*tree.distributions, q), (*tree.parents, place)),
            places,
            before.prob * weight / sum(left.values()),
        )
        for token_id, weight in left.items()
    ] or [before]


def _distribution_after(pair: TabularPair, sampling: SamplingParams, tree: Draft, parent: int) -> SparseDistribution:
    sampler = Sampler()
    row = row_of(new_sequence(sampling), tree.path(parent))
    scores = sampler.apply_processors(pair.draft.logits([[*row.token_ids, *row.draft_ids]]), [row])
    _, (distribution,) = sampler.sample_sparse(scores, [row], pair.draft.num_tokens)
    return distribution


def emitted_probs(
    pair: TabularPair, sampling: SamplingParams, trees: Seq[tuple[Draft, float]], num_tokens: int
) -> Tensor:
    """The joint distribution of a pass's tokens, completed by plain decoding, over every tree."""
    emitted: defaultdict[tuple[int, ...], Tensor | float] = defaultdict(float)
    for tree, tree_prob in trees:
        tasks = [VerifyTask(new_sequence(sampling, VerifyMode.REJECTION), tree, 0)]
        (task,) = prepare_all(tasks, pair.target.num_tokens)
        logits = pair.target.logits([[*row.token_ids, *row.draft_ids] for row in task.rows])
        sampler = Sampler()
        probs = sampler.probs(sampler.apply_processors(logits, task.rows), task.rows)
        for accepted, final_probs, prob in _walks(probs, task.draft, -1, 1.0):
            for token_id in final_probs.nonzero()[:, 0].tolist():
                emitted[(*accepted, token_id)[:num_tokens]] += tree_prob * prob * final_probs[token_id]
    return filled_up(pair.target, sampling, num_tokens, emitted)


def _walks(
    distributions: Tensor, draft: Draft, parent: int, prob: float
) -> Iterator[tuple[tuple[int, ...], Tensor, float]]:
    """Accepted tokens, the distribution of the token after them, and the probability of this outcome."""
    p = distributions[parent + 1]
    for sibling in rejection.siblings_of(draft, parent):
        accept_prob = _accepting_share(p, sibling)
        if accept_prob > 0:
            yield from _walks(distributions, draft, sibling.node, prob * accept_prob)
        prob *= 1 - accept_prob
        p = rejection.residual(p, sibling)
    if prob > 0:
        yield draft.path(parent), p, prob


def _accepting_share(target_probs: Tensor, sibling: rejection.Sibling) -> float:
    """The share of uniform numbers in [0, 1) that accept a sibling, by the real test, 6 binary digits at a time."""
    p = rejection_rule.target_probs_of(target_probs[None], [0], [sibling.token_id])
    low, high = 0.0, 1.0
    for _ in range(10):
        u = torch.linspace(low, high, 65, dtype=torch.float64)
        num_standing = int(rejection_rule.is_accepted(u, p, p.new_tensor([sibling.draft_prob])).sum())
        if num_standing in (0, len(u)):
            return low if num_standing == 0 else high
        low, high = u[num_standing - 1 : num_standing + 1].tolist()
    return low


def check_enumeration(
    name: str,
    num_tokens: int = 3,
    sampling: SamplingParams = SamplingParams(),
    planned: Callable[[Draft], Draft] = lambda tree: tree,
) -> None:
    for pair in pair_library(num_tokens):
        trees = [(planned(tree), prob) for tree, prob in drawn_trees(pair, sampling, SHAPES[name])]
        emitted = emitted_probs(pair, sampling, trees, 3)
        assert total_variation(emitted, joint_probs(pair.target, sampling, 3)) < 1e-12, pair.name


@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_with_a_drawn_tree_emits_exactly_the_target_distribution(name: str) -> None:
    check_enumeration(name)


@pytest.mark.parametrize("num_nodes", [0, 1, 2])
def test_a_plan_of_fewer_nodes_keeps_a_drawn_tree_exact(num_nodes: int) -> None:
    check_enumeration("branches above and below", planned=lambda tree: tree.head(num_nodes))


def test_a_plan_that_looks_at_a_token_it_decides_about_is_caught() -> None:
    """A mutant ends a tree before its first node with token 0."""

    def without_zero(tree: Draft) -> Draft:
        return tree.head(tree.token_ids.index(0) if 0 in tree.token_ids else len(tree.token_ids))

    with pytest.raises(AssertionError):
        check_enumeration("two roots", planned=without_zero)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.6), SamplingParams(top_p=0.8), SamplingParams(presence_penalty=2.0)],
    ids=["temperature", "top-p", "penalties"],
)
def test_sampling_parameters_keep_a_tree_exact(sampling: SamplingParams) -> None:
    check_enumeration("branches above and below", sampling=sampling)


def check_grammar(name: str) -> None:
    """Trees are drawn without the grammar, so forbidden tokens are siblings and parents of allowed ones."""
    for pair in pair_library(4)[:2]:
        emitted = emitted_probs(pair, CONSTRAINED, drawn_trees(pair, CONSTRAINED, SHAPES[name]), 3)
        assert total_variation(emitted, joint_probs(pair.target, CONSTRAINED, 3)) < 1e-12, pair.name


@pytest.mark.parametrize("name", ["two roots", "a branch below"])
def test_a_grammar_keeps_a_drawn_tree_exact(name: str) -> None:
    check_grammar(name)


def test_a_mask_of_another_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant gives every node the root's mask."""
    monkeypatch.setattr(GrammarMatcher, "mask_after", lambda self, token_ids: self.masks(())[0])
    with pytest.raises(AssertionError):
        check_grammar("a branch below")


@pytest.mark.parametrize("verify", [VerifyMode.COUPLED, VerifyMode.REJECTION])
def test_certain_trees_under_a_grammar_leave_its_distribution_alone(verify: VerifyMode) -> None:
    experiment = Experiment(pair_library(4)[1], 6, 4, num_sequences=500, sampling=CONSTRAINED, verify=verify)
    check_samples(experiment, draft_tree_by_malice)
    if verify is VerifyMode.COUPLED:
        assert experiment.run(draft_tree_by_malice).equal(experiment.run(no_draft))


@pytest.mark.parametrize("token_ids", [(0, 1, 2, 2, 1), (1, 1, 0, 0, 2), (0, 2, 3), (3, 0, 1), (0, -1)])
def test_a_tree_without_distributions_is_certain_and_exact_even_with_twins_and_strangers(
    token_ids: tuple[int, ...],
) -> None:
    tree = Draft(token_ids, (), SHAPES["branches above and below"][: len(token_ids)])
    for pair in pair_library(3):
        emitted = emitted_probs(pair, SamplingParams(), [(tree, 1.0)], 3)
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 3)) < 1e-12


def test_a_drawn_sibling_outside_the_vocabulary_is_rejected_by_its_distribution() -> None:
    q = SparseDistribution((0, 3), (WEIGHT_SUM // 4, 3 * WEIGHT_SUM // 4))
    trees = [(Draft((0, 3), (q, q), (-1, -1)), 0.25), (Draft((3,), (q,), (-1,)), 0.75)]
    for pair in pair_library(3):
        emitted = emitted_probs(pair, SamplingParams(), trees, 2)
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 2)) < 1e-12


def test_siblings_that_name_different_distributions_are_not_believed() -> None:
    q, other = SparseDistribution((0, 1), (WEIGHT_SUM // 2,) * 2), SparseDistribution((1, 2), (WEIGHT_SUM // 2,) * 2)
    first, second = rejection.siblings_of(Draft((0, 1), (q, other), (-1, -1)), -1)
    assert first.q == q
    assert second.q == SparseDistribution((1,), (WEIGHT_SUM,))


def test_a_wider_tree_is_accepted_more_often_only_because_siblings_are_drawn_without_replacement() -> None:
    pair = pair_library(5)[0]
    accepted = []
    for name in ("two roots", "three roots"):
        trees = drawn_trees(pair, SamplingParams(), SHAPES[name])
        accepted.append(sum(prob * _accept_prob(pair, tree) for tree, prob in trees))
    one = sum(prob * _accept_prob(pair, tree) for tree, prob in drawn_trees(pair, SamplingParams(), (-1,)))
    assert one + 0.05 < accepted[0] < accepted[1]


def _accept_prob(pair: TabularPair, tree: Draft) -> float:
    row = row_of(new_sequence(SamplingParams()))
    p = pair.target.logits([row.token_ids]).softmax(dim=1)
    distributions = p.expand(len(tree.token_ids) + 1, -1)
    return sum(prob for accepted, _, prob in _walks(distributions, tree, -1, 1.0) if accepted)


# ---- mutants ------------------------------------------------------------------------------------------------------


def siblings_face_the_original_target(patch: pytest.MonkeyPatch) -> None:
    real = rejection.residual
    patch.setattr(rejection, "residual", lambda p, sibling: p if sibling.node == 0 else real(p, sibling))


def drawn_siblings_stay_in_the_distribution(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection, "without", lambda distribution, token_id: distribution)


def the_distribution_left_is_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    real = rejection.without

    def unscaled(distribution: SparseDistribution, token_id: int) -> SparseDistribution:
        left = real(distribution, token_id)
        return SparseDistribution((*left.token_ids, 99), (*left.weights, sum(distribution.weights) - sum(left.weights)))

    patch.setattr(rejection, "without", unscaled)


def the_recovered_token_comes_from_the_target(patch: pytest.MonkeyPatch) -> None:
    real = rejection.residual
    patch.setattr(rejection, "residual", lambda p, sibling: p if sibling.node == 1 else real(p, sibling))


@pytest.mark.parametrize(
    "mutant",
    [
        siblings_face_the_original_target,
        drawn_siblings_stay_in_the_distribution,
        the_distribution_left_is_not_renormalised,
        the_recovered_token_comes_from_the_target,
    ],
)
def test_every_mutant_of_rejection_fails_enumeration(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_enumeration("two roots", num_tokens=4)


# ---- coupled ------------------------------------------------------------------------------------------------------


@cache
def plain_output() -> list[list[int]]:
    return coupled_run(big_model(), no_draft, big_model(), 0)


def draft_tree_by_coupling(
    model: TabularModel, sequences: Seq[Sequence], num_drafts: int, parents: Seq[int]
) -> list[Draft]:
    """The draft's best tokens under the target's noise, siblings in order."""
    sampler = Sampler()
    trees = [NO_DRAFT] * len(sequences)
    for node in range(len(parents)):
        rank = parents[:node].count(parents[node])
        rows = [row_of(sequence, tree.path(parents[node])) for sequence, tree in zip(sequences, trees, strict=True)]
        logits = model.logits([[*row.token_ids, *row.draft_ids] for row in rows])
        noisy = sampler.perturb(sampler.apply_processors(logits, rows), rows, Purpose.TARGET_GUMBEL)
        best = noisy.topk(rank + 1).indices[:, rank].tolist()
        trees = [
            Draft((*tree.token_ids, token_id), (), tuple(parents[: node + 1]))
            for tree, token_id in zip(trees, best, strict=True)
        ]
    return trees


def draft_tree_by_malice(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    """Random trees with equal siblings and some ids outside the vocabulary."""
    dice = random.Random(sum(sequence.num_output_tokens for sequence in sequences))
    sizes = [dice.randint(0, num_drafts) for _ in sequences]
    return [
        Draft(
            tuple(dice.choices([*range(model.num_tokens), -1, 2**40], k=size)),
            (),
            tuple(dice.randint(-1, node - 1) for node in range(size)),
        )
        for size in sizes
    ]


def check_coupled_equality() -> None:
    for parents in (SHAPES["branches above and below"], (-1, 0, 0, 1, 2, 1, -1, 3)):
        drafting = partial(draft_tree_by_coupling, parents=parents)
        assert coupled_run(big_model(), drafting, similar_model(), 0) == plain_output()


def test_a_tree_changes_no_token() -> None:
    check_coupled_equality()


@pytest.mark.parametrize("num_nodes", [3, 12])
def test_a_malicious_tree_changes_no_token(num_nodes: int) -> None:
    assert coupled_run(big_model(), draft_tree_by_malice, big_model(), num_nodes) == plain_output()


def descends_whatever_the_parent(sampled_ids: Seq[int], draft_ids: Seq[int], parents: Seq[int]) -> VerifyResult:
    return descend(sampled_ids, draft_ids, [-1 if parent < 0 else 0 for parent in parents])


def test_a_walk_that_ignores_parents_fails_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "descend", descends_whatever_the_parent)
    with pytest.raises(AssertionError):
        check_coupled_equality()


def test_the_walk_goes_down_as_long_as_a_child_was_sampled() -> None:
    draft_ids, parents = (4, 5, 6, 7), (-1, -1, 1, 1)
    assert descend([5, 0, 7, 0, 9], draft_ids, parents) == VerifyResult((5, 7, 9), 2, path=(1, 3))
    assert descend([3, 0, 0, 0, 0], draft_ids, parents) == VerifyResult((3,), 0)
    assert descend([4, 8, 0, 0, 0], draft_ids, parents) == VerifyResult((4, 8), 1, path=(0,))


def test_logprobs_come_from_the_rows_on_the_path() -> None:
    logits = big_model().logits([[0, 1], [0, 1, 3], [0, 1, 4], [0, 1, 4, 2]])
    sampling = SamplingParams(temperature=0.0, num_logprobs=1)
    best = logits.argmax(dim=1).tolist()
    other = (best[0] + 1) % 12
    draft = Draft((other, best[0], best[2]), (), (-1, -1, 1))
    (verified,) = Verifier().verify(logits, [VerifyTask(new_sequence(sampling), draft, 0)])
    assert verified.path == (1, 2)
    assert [each.token_id for each in verified.logprobs] == [best[0], best[2], best[3]]
    for row, answer in zip((0, 2, 3), verified.logprobs, strict=True):
        assert answer.logprob == pytest.approx(float(logits[row].log_softmax(0).max()))
