"""Rows of a draft tree equal rows of their ancestors' chains, in every layout and family."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from engine.attention.ancestor_mask import ancestors
from engine.batch.draft import Draft, depths
from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig
from engine.kv_cache.block_pool import compaction
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.families import SERVED, VOCAB_SIZE, write_family

BLOCK_SIZE = 4
NUM_BLOCKS = 48

PARENTS = (-1, -1, 0, 0, 1, 2, 5, 3, 6)
NODE_IDS = (5, 6, 7, 8, 7, 9, 10, 11, 12)
WIDE = tuple(range(-1, 23))  # more rows than are packed
FAMILIES = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")


def prompt(length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        write_family(folder, SERVED[family]())
        model = ModelConfig(str(folder), dtype="float32", device="cpu")
        found[family] = ModelRunner(model, CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    return found


def table_of(index: int) -> list[int]:
    """A third of the pool, without runs."""
    return torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()[index::3]


def chain_logits(runner: ModelRunner, text: Seq[int], draft: Draft) -> Tensor:
    """The last token's row, then each node's, every one computed as a sequence of its own."""
    paths = [(), *(draft.path(node) for node in range(len(draft.token_ids)))]
    return torch.cat([runner.forward([Span([*text, *path], 0, table_of(2), 1)]) for path in paths])


def verification(text: Seq[int], draft: Draft, table: Seq[int]) -> Span:
    num_logits = len(draft.token_ids) + 1
    return Span([text[-1], *draft.token_ids], len(text) - 1, table, num_logits, draft.parents)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 5, 13])
def test_every_node_sees_its_ancestors_and_nothing_else(
    family: str, length: int, runners: dict[str, ModelRunner]
) -> None:
    runner, text, draft = runners[family], prompt(length), Draft(NODE_IDS, (), PARENTS)
    runner.forward([Span(text, 0, table_of(0), 0)])
    logits = runner.forward([verification(text, draft, table_of(0))])
    torch.testing.assert_close(logits, chain_logits(runner, text, draft), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_chains_and_prefills_share_a_pass(family: str, runners: dict[str, ModelRunner]) -> None:
    runner, first, second = runners[family], prompt(14), prompt(6)
    draft, chain = Draft(NODE_IDS, (), PARENTS), Draft(NODE_IDS[:3])
    expected = torch.cat([chain_logits(runner, first, draft), chain_logits(runner, second, chain)])
    for text, table in ((first, table_of(0)), (second, table_of(1))):
        runner.forward([Span(text, 0, table, 0)])
    spans = [verification(first, draft, table_of(0)), verification(second, chain, table_of(1))]
    logits = runner.forward([*spans, Span(prompt(3), 0, table_of(2), 0)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_may_be_computed_level_by_level(family: str, runners: dict[str, ModelRunner]) -> None:
    """A draft model grows it so: each level is a pass, and sees the keys of the levels before it in the pool."""
    runner, text, table = runners[family], prompt(9), table_of(0)
    by_level = sorted(range(len(PARENTS)), key=lambda node: depths(PARENTS)[node])
    places = {node: place for place, node in enumerate(by_level)}
    parents = [places.get(PARENTS[node], -1) for node in by_level]
    draft = Draft(tuple(NODE_IDS[node] for node in by_level), (), tuple(parents))
    rows = [runner.forward([Span(text, 0, table, 1)])]
    first = 0
    for depth in range(1, max(depths(parents)) + 1):
        end = first + depths(parents).count(depth)
        ids = draft.token_ids[first:end]
        rows.append(runner.forward([Span(ids, len(text) + first, table, len(ids), parents[:end])]))
        first = end
    torch.testing.assert_close(torch.cat(rows), chain_logits(runner, text, draft), rtol=0, atol=2e-5)


def test_a_tree_without_branches_is_a_chain(runners: dict[str, ModelRunner]) -> None:
    runner, text = runners["llama"], prompt(9)
    draft = Draft(tuple(range(3, 3 + len(WIDE))), (), WIDE)
    runner.forward([Span(text, 0, table_of(0), 0)])
    as_tree = runner.forward([verification(text, draft, table_of(0))])
    as_chain = runner.forward([verification(text, Draft(draft.token_ids), table_of(0))])
    torch.testing.assert_close(as_tree, as_chain, rtol=0, atol=2e-5)


@pytest.mark.parametrize("node", [4, 6, 7, 8])
def test_after_compaction_a_path_continues_as_if_it_had_been_a_chain(
    node: int, runners: dict[str, ModelRunner]
) -> None:
    runner, text, table = runners["llama"], prompt(9), table_of(0)
    draft = Draft(NODE_IDS, (), PARENTS)
    runner.forward([Span(text, 0, table, 0)])
    runner.forward([verification(text, draft, table)])
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    move = compaction(table, len(text), path)
    assert move is not None
    runner.move([move])
    committed = [*text, *draft.path(node), 17]
    logits = runner.forward([Span(committed[-1:], len(committed) - 1, table, 1)])
    expected = runner.forward([Span(committed, 0, table_of(1), 1)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_a_path_that_leads_the_tree_moves_nothing() -> None:
    assert compaction([0], 4, ()) is None
    assert compaction([0], 4, (0, 1, 2)) is None
    move = compaction([0, 1], 4, (0, 2, 5))
    assert move is not None
    assert (list(move.from_indices), list(move.to_indices)) == ([6, 9], [5, 6])


def test_ancestors_and_depths_follow_the_parents() -> None:
    assert depths(PARENTS) == [1, 1, 2, 2, 2, 3, 4, 3, 5]
    seen = [{j for j, sees in enumerate(row) if sees} for row in ancestors(PARENTS).tolist()]
    assert seen[8] == {8, 6, 5, 2, 0}
    assert seen[4] == {4, 1}
    assert Draft(NODE_IDS, (), PARENTS).path(8) == (5, 7, 9, 10, 12)
