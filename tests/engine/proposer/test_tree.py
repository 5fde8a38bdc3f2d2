"""Trees of a draft model: their shapes, their distributions, and their results in the real verifier."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from engine.batch.draft import Draft, depths
from engine.proposer import tree as tree_module
from engine.proposer.tree import ROOT, Tree, TreeSampler, best_parents, tree_of
from engine.sequence.sequence import Sequence
from engine.verifier import rejection
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.exactness_checks import big_model, check_samples, coupled_run, similar_model
from tests.engine.fixtures.tabular import (
    Experiment,
    TabularModel,
    new_sequence,
    no_draft,
    one_pass,
    pair_library,
    row_of,
)

PARENTS = (-1, -1, 0, 0, 1)
PEAKED, FLAT = pair_library(4)[:2]


def grow(
    parents: Seq[int] | None, num_nodes: int, model: TabularModel, sequences: Seq[Sequence], max_depth: int
) -> list[Draft]:
    """Grows trees with a tabular draft model."""
    trees = [Tree(sequence, sequence, parents, num_nodes, max_depth, sequence.matcher) for sequence in sequences]
    sampler, growing = TreeSampler(), trees
    while growing:
        rows = [row for tree in growing for row in tree.rows]
        sampler.branch(growing, model.logits([[*row.token_ids, *row.draft_ids] for row in rows]).float())
        growing = [tree for tree in growing if tree.level]
    return [tree.draft() for tree in trees]


draw = partial(grow, PARENTS, len(PARENTS))
branch = partial(grow, None, 6)


def test_samples_of_drawn_trees_follow_the_target() -> None:
    """Worst case detected with power 0.999 at alpha 1e-6: total variation .154 at 1,500 sequences and 64 cells."""
    check_samples(Experiment(PEAKED, num_drafts=2, num_tokens=3, num_sequences=1_500), draw)


def check_siblings() -> None:
    """The first token alone, with three siblings: few cells, and siblings decide most of the mass."""
    drafting = partial(grow, (-1, -1, -1), 3)
    for pair in (FLAT, PEAKED):
        check_samples(Experiment(pair, num_drafts=1, num_tokens=1, num_sequences=1_500), drafting)


def test_samples_of_siblings_follow_the_target() -> None:
    check_siblings()


def test_each_sibling_has_a_coin_of_its_own() -> None:
    uniforms = rejection._uniforms(row_of(new_sequence(SamplingParams())), 3, torch.device("cpu"))
    assert len(set(uniforms.tolist())) == 3


def siblings_share_a_draw(patch: pytest.MonkeyPatch) -> None:
    """Each sibling is drawn by the same number, so the second reveals the first."""
    patch.setattr(tree_module, "_LANES_PER_RANK", 0)


def test_siblings_that_share_a_draw_fail_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings_share_a_draw(monkeypatch)
    with pytest.raises(AssertionError):
        check_siblings()


def test_a_dynamic_tree_changes_no_coupled_token() -> None:
    plain = coupled_run(big_model(), no_draft, big_model(), 0)
    assert coupled_run(big_model(), branch, similar_model(), 4) == plain


def test_siblings_differ_and_come_from_one_distribution() -> None:
    sequences = [new_sequence(SamplingParams(seed=seed), VerifyMode.REJECTION) for seed in range(50)]
    for draft in draw(PEAKED.draft, sequences, 2):
        for parent in set(draft.parents):
            siblings = [node for node, its_parent in enumerate(draft.parents) if its_parent == parent]
            assert len({draft.token_ids[node] for node in siblings}) == len(siblings)
            assert len({draft.distributions[node] for node in siblings}) == 1


def test_a_distribution_with_too_few_tokens_leaves_the_shape_incomplete() -> None:
    sequence = new_sequence(SamplingParams(top_k=1), VerifyMode.REJECTION)
    (draft,) = draw(PEAKED.draft, [sequence], 2)
    assert draft.parents == (-1, 0)


def test_greedy_trees_are_the_likeliest_in_every_mode_and_have_no_distributions() -> None:
    sequences = [new_sequence(SamplingParams(temperature=0.0), verify) for verify in VerifyMode]
    drafts = branch(PEAKED.draft, sequences, 3)
    assert drafts[0].distributions == ()
    assert drafts == [drafts[0]] * len(drafts)


def test_a_dynamic_greedy_tree_has_the_likeliest_paths() -> None:
    model, sequence = PEAKED.draft, new_sequence(SamplingParams(temperature=0.0))
    (draft,) = branch(model, [sequence], 3)

    def log_prob(path: Seq[int]) -> float:
        prefixes = [[*sequence.token_ids, *path[:i]] for i in range(len(path))]
        logs = model.logits(prefixes).float().log_softmax(dim=1)
        return float(sum(logs[i, token] for i, token in enumerate(path)))

    paths = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    best = sorted(paths, key=log_prob, reverse=True)[:6]
    assert {draft.path(node) for node in range(6)} == set(best)


def test_nodes_come_after_their_parents_and_no_deeper_than_allowed() -> None:
    sequences = [new_sequence(SamplingParams(seed=seed)) for seed in range(20)]
    for draft in branch(big_model(), sequences, 3):
        assert len(draft.token_ids) == 6
        assert all(parent < node for node, parent in enumerate(draft.parents))
        assert max(depths(draft.parents)) <= 3


def test_width_raises_the_tokens_of_a_pass() -> None:
    accepted = []
    for drafting in (partial(grow, (-1, 0), 2), draw):
        sequences = [new_sequence(SamplingParams(seed=seed), VerifyMode.REJECTION) for seed in range(300)]
        one_pass(PEAKED.target, sequences, drafting(PEAKED.draft, sequences, 2))
        accepted.append(sum(sequence.num_accepted for sequence in sequences))
    assert accepted[1] > 1.1 * accepted[0]


def test_the_best_shape_is_the_best_of_all_shapes() -> None:
    chances = (0.6, 0.25, 0.1)

    def value(parents: Seq[int]) -> float:
        worth: list[float] = []
        for node, parent in enumerate(parents):
            rank = list(parents[:node]).count(parent)
            above = worth[parent] if parent >= 0 else 1.0
            worth.append(above * chances[rank] if rank < len(chances) else 0.0)
        return sum(worth)

    for max_depth in (1, 2, 3):
        shapes = [
            shape for shape in product(*(range(-1, node) for node in range(5))) if max(depths(shape)) <= max_depth
        ]
        wanted = min(5, 3 if max_depth == 1 else 5)
        best = best_parents(5, max_depth, chances)
        assert len(best) == wanted
        assert value(best) == pytest.approx(max(map(value, shapes)))


def test_only_drafts_that_are_matched_choose_their_shape_by_their_tokens() -> None:
    def children_of(params: SamplingParams, verify: VerifyMode) -> list[int]:
        sequence = new_sequence(params, verify)
        return tree_of(sequence, sequence, 6, 3, None).num_wanted

    sampled = SamplingParams()
    greedy = replace(sampled, temperature=0.0)
    assert children_of(sampled, VerifyMode.REJECTION) == [best_parents(6, 3).count(ROOT)]
    assert children_of(sampled, VerifyMode.COUPLED) == children_of(greedy, VerifyMode.REJECTION) == [6]


def test_levels_lie_one_behind_the_other_and_name_their_parents() -> None:
    sequence = new_sequence(SamplingParams(temperature=0.0))
    tree = Tree(sequence, sequence, PARENTS, len(PARENTS), 2, sequence.matcher)
    TreeSampler().branch([tree], torch.tensor([[0.0, 3.0, 2.0, 1.0]]))
    span = tree.span()
    assert (list(span.token_ids), span.start, span.num_logits, list(span.parents)) == ([1, 2], 2, 2, [-1, -1])
    assert tree.num_slots == 4
    assert list(span.positions) == [2, 2]
