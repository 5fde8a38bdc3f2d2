"""Medusa heads: both published formats, refused heads, and the distributions of their drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engine.accounting.record import PassedRows
from engine.batch.draft import Draft
from engine.config import HeadKind
from engine.model.draft_heads.loader import HeadTarget
from engine.model.draft_heads.medusa import MedusaHeads
from engine.model.draft_heads.published import TargetShape
from engine.model.forward_batch import UNKNOWN
from engine.proposer.state_proposer import BlockProposer
from engine.sequence.sequence import Sequence
from engine.verifier import rejection_rule
from protos.errors import ConfigError
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.builders import make_scheduled
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.fixtures.exactness_checks import (
    check_coupled_equality,
    check_samples,
    enumerated_probs,
    similar_model,
)
from tests.engine.fixtures.heads.heads_fixtures import HIDDEN_SIZE, lm_head_of, random, write_medusa, write_vllm_medusa
from tests.engine.fixtures.tabular import (
    NUM_PHASES,
    Experiment,
    TabularModel,
    TabularPair,
    joint_probs,
    new_sequence,
    pair_library,
    total_variation,
)

PEAKED = pair_library(4)[0]
HIDDEN = random(5, HIDDEN_SIZE, seed=3, scale=1.0)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Any:
    """The parts of a loaded target that heads are made from."""
    lm_head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False).requires_grad_(False)
    lm_head.weight.copy_(lm_head_of(target_folder))
    parts = HeadTarget(TargetShape(VOCAB_SIZE, HIDDEN_SIZE, 2), torch.zeros(VOCAB_SIZE, HIDDEN_SIZE))
    return SimpleNamespace(get_output_embeddings=lambda: lm_head, parts=parts)


def load(folder: Path, target: Any) -> MedusaHeads:
    head = target.parts.load(HeadKind.MEDUSA, str(folder))
    assert isinstance(head, MedusaHeads)
    head.lm_head = target.get_output_embeddings()
    return head


# ---- formats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_layers", "prefix"), [(1, ""), (2, "medusa_head.")])
def test_the_original_format_is_read(
    num_layers: int, prefix: str, tmp_path: Path, target_folder: Path, target: Any
) -> None:
    write_medusa(tmp_path / "m", target_folder, num_layers=num_layers, prefix=prefix)
    tensors = torch.load(tmp_path / "m" / "medusa_lm_head.pt", weights_only=True)
    logits = load(tmp_path / "m", target).logits(HIDDEN, 2)
    assert logits.shape == (5, 2, VOCAB_SIZE)
    for head in range(2):
        x = HIDDEN
        for layer in range(num_layers):
            name = f"{prefix}{head}.{layer}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        torch.testing.assert_close(logits[:, head], x @ tensors[f"{prefix}{head}.{num_layers}.weight"].T)


def test_a_file_may_hold_more_heads_than_its_configuration_names(
    tmp_path: Path, target_folder: Path, target: Any
) -> None:
    """The configuration of medusa-vicuna-7b-v1.3 names 2, its file holds 5."""
    write_medusa(tmp_path / "m", target_folder, num_heads=5, medusa_num_heads=2)
    assert load(tmp_path / "m", target).max_drafts == 5


@pytest.mark.parametrize("lm_head", ["own", "one", "target"])
def test_vllms_format_is_read(lm_head: str, tmp_path: Path, target_folder: Path, target: Any) -> None:
    write_vllm_medusa(tmp_path / "m", target_folder, lm_head=lm_head)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    logits = load(tmp_path / "m", target).logits(HIDDEN, 3)
    for head in range(3):
        x = HIDDEN + F.silu(HIDDEN @ weights[f"blocks.{head}.layers.0.weight"].T)
        torch.testing.assert_close(logits[:, head], x @ lm_head_of(target_folder).T)


@pytest.mark.parametrize("lm_head", ["own", "one"])
def test_a_cut_vocabulary_is_spread_over_the_targets(
    lm_head: str, tmp_path: Path, target_folder: Path, target: Any
) -> None:
    write_vllm_medusa(tmp_path / "m", target_folder, lm_head=lm_head, cut=10)
    logits = load(tmp_path / "m", target).logits(HIDDEN, 1)
    x = HIDDEN + F.silu(HIDDEN @ load_file(tmp_path / "m" / "model.safetensors")["blocks.0.layers.0.weight"].T)
    torch.testing.assert_close(logits[:, 0, :10], x @ lm_head_of(target_folder)[:10].T)
    assert bool((logits[:, 0, 10:] == UNKNOWN).all())
    assert float("-inf") < UNKNOWN, "a grammar may leave cut tokens alone, and then they need a distribution"


# ---- refused heads ------------------------------------------------------------------------------------------------


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def _wider(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: F.pad(tensors[name], (0, 1))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("1.0.linear.weight"), "'1.0.linear.weight' of shape .32, 32. is missing"),
        (_without("2.1.weight"), "'2.1.weight' of shape .64, 32. is missing"),
        (_wider("0.0.linear.weight"), "has shape .32, 33., but this target needs .32, 32."),
        (
            lambda tensors: tensors.update({"0.7.weight": torch.ones(1)}),
            "1 unknown tensors, '0.7.weight'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path, target_folder: Path, target: Any
) -> None:
    write_medusa(tmp_path / "m", target_folder)
    file = tmp_path / "m" / "medusa_lm_head.pt"
    tensors = torch.load(file, weights_only=True)
    change(tensors)
    torch.save(tensors, file)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "m", target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"posterior_threshold": 0.09}, "lossy acceptance: config.json has posterior_threshold = 0.09"),
        ({"typical_acceptance": True}, "lossy acceptance"),
        ({"medusa_num_heads": 4}, "3 heads in its file and medusa_num_heads = 4"),
        ({"medusa_num_layers": None}, "medusa_num_layers = None"),
        ({"truncated_vocab_size": "x"}, "truncated_vocab_size 'x' in config.json; it must be 1 to 64"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    config: dict[str, object], message: str, tmp_path: Path, target_folder: Path, target: Any
) -> None:
    write_medusa(tmp_path / "m", target_folder, **config)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "m", target)


def test_a_configuration_without_fields_is_refused(tmp_path: Path, target_folder: Path, target: Any) -> None:
    write_medusa(tmp_path / "m", target_folder)
    (tmp_path / "m" / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"has no fields in config\.json; fetch it again"):
        load(tmp_path / "m", target)


def test_a_lossy_key_that_is_off_is_accepted(tmp_path: Path, target_folder: Path, target: Any) -> None:
    write_medusa(tmp_path / "m", target_folder, typical_acceptance=False)
    assert load(tmp_path / "m", target).max_drafts == 3


def test_a_token_map_for_another_vocabulary_is_refused(tmp_path: Path, target_folder: Path, target: Any) -> None:
    write_vllm_medusa(tmp_path / "m", target_folder, cut=10)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["token_map"] = tensors["token_map"] + VOCAB_SIZE
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="ids from 64 to 73, but the target has 64 tokens"):
        load(tmp_path / "m", target)


def test_a_folder_without_a_head_is_refused(tmp_path: Path, target: Any) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=r"no readable config.json"):
        load(tmp_path / "m", target)
    (tmp_path / "m" / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    (tmp_path / "m" / "medusa_lm_head.pt").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "m", target)
    (tmp_path / "m" / "medusa_lm_head.pt").unlink()
    with pytest.raises(ConfigError, match=r"has no weights; it needs one of \*.safetensors, medusa_lm_head.pt"):
        load(tmp_path / "m", target)


# ---- distributions --------------------------------------------------------------------------------------------------


class TabularHeads(MedusaHeads):
    """Heads whose state is a text's length and its last token. They see no earlier draft."""

    def __init__(self, model: TabularModel, num_heads: int) -> None:
        self.layer_shapes = []
        self.max_drafts = num_heads
        self._model = model

    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        phases, last = hidden.long().unbind(1)
        rows = [self._model.table[(phases + head) % NUM_PHASES, last] for head in range(num_heads)]
        return torch.stack(rows, dim=1).float()


def draft(model: TabularModel, sequences: Seq[Sequence], num_drafts: int, tree_nodes: int = 0) -> list[Draft]:
    """Medusa proposer over the states that `TabularHeads` reads."""
    states = torch.tensor([[len(s.token_ids) % NUM_PHASES, s.token_ids[-1]] for s in sequences], dtype=torch.float32)
    runner: Any = SimpleNamespace(features=states, block_size=8)
    proposer = BlockProposer(runner, TabularHeads(model, num_drafts))
    passed, batch = [], []
    for row, sequence in enumerate(sequences):
        proposer.open(sequence)
        end = len(sequence.token_ids)
        passed.append(PassedRows(sequence, end - 2, [row], [sequence.token_ids[-1]], is_newest=True))
        batch.append(make_scheduled(sequence, num_drafts, tree_nodes))
    proposer.learn(passed)
    return proposer.propose(batch)


def draft_trees(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    return draft(model, sequences, num_drafts, 5)


def all_paths(pair: TabularPair, verify: VerifyMode) -> list[tuple[Draft, float]]:
    """Every chain of two drafts with its probability under the distributions that the proposer reports."""
    (drawn,) = draft(pair.draft, [new_sequence(SamplingParams(), verify)], 2)
    first, second = drawn.distributions
    paths = []
    for a, b in product(first.token_ids, second.token_ids):
        q = rejection_rule.draft_probs_of([first, second], [a, b]).prod().item()
        paths.append((Draft((a, b), (first, second)), q))
    return paths


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_one_pass_emits_exactly_the_targets_distribution(verify: VerifyMode) -> None:
    """The second head's distribution is the same whatever the first drafted, and does not fit the text."""
    for pair in pair_library(3):
        emitted = enumerated_probs(pair, SamplingParams(), 3, all_paths(pair, verify), verify)
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 3)) < 1e-12, pair.name


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_samples_follow_the_target(verify: VerifyMode) -> None:
    check_samples(Experiment(PEAKED, num_drafts=2, num_tokens=3, num_sequences=1_500, verify=verify), draft)


def test_samples_of_trees_follow_the_target() -> None:
    check_samples(Experiment(PEAKED, num_drafts=2, num_tokens=2, num_sequences=500), draft_trees)


def test_a_second_draft_from_the_distribution_of_the_first_fails_the_samples() -> None:
    """The mutant: tokens of one head go along with the distribution of another."""

    def mutant(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
        return [Draft(each.token_ids, each.distributions[::-1]) for each in draft(model, sequences, num_drafts)]

    with pytest.raises(AssertionError):
        check_samples(Experiment(PEAKED, num_drafts=2, num_tokens=3, num_sequences=1_500), mutant)


def test_a_coupled_draft_changes_no_token() -> None:
    check_coupled_equality(draft, similar_model(), 3)


def test_a_state_is_used_for_the_tokens_that_it_belongs_to_and_no_others() -> None:
    sequence = new_sequence(SamplingParams())
    runner: Any = SimpleNamespace(features=torch.zeros(1, 2), block_size=8)
    proposer = BlockProposer(runner, TabularHeads(PEAKED.draft, 2))
    scheduled = make_scheduled(sequence, 2)
    assert proposer.propose([scheduled]) == [Draft()]
    proposer.open(sequence)
    assert proposer.propose([scheduled]) == [Draft()]
    proposer.learn([PassedRows(sequence, 0, [0], [1], is_newest=True)])
    assert len(proposer.propose([scheduled])[0].token_ids) == 2
    sequence.append((2,))
    assert proposer.propose([scheduled]) == [Draft()]
    proposer.close(sequence.request_id)
    proposer.close(sequence.request_id)
