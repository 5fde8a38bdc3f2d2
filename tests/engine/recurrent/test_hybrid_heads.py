"""Heads, and the target's first layers, draft for recurrent targets: they change no token, and equal a reference."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from engine.config import HeadConfig, HeadKind
from tests.engine.fixtures.checkpoints import VOCAB_SIZE
from tests.engine.fixtures.heads.block_heads import BlockShape, PlainDFlash, block_tensors, write_block_head
from tests.engine.fixtures.heads.eagle3_fixtures import PlainEagle3, head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import HIDDEN_SIZE, fit_medusa, random
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid
from tests.engine.fixtures.in_process_transport import InProcessTransport
from tests.engine.model.draft_heads.test_head_exactness import (
    HeadModels,
    HeadOracle,
    HeadSetup,
    build,
    changed,
    generate,
    model_runner,
    record,
    requests,
)

TAPS = (1, 2)
SHAPE = BlockShape(windows=(None, 9), are_causal=(False, True))
SETUPS = (HeadSetup(max_tokens_per_step=13, num_repeats=2), HeadSetup(num_blocks=16))
QWEN = ("qwen3_next", "qwen3_5_text")
CASES = [
    *((family, HeadKind.MTP) for family in QWEN),
    *((family, HeadKind.EAGLE3) for family in ("lfm2", "falcon_h1", "qwen3_next")),
    ("qwen3_next", HeadKind.DFLASH),
    ("bamba", HeadKind.MEDUSA),
    *((family, HeadKind.SELF) for family in HYBRIDS),
]
WITH_FILES = [each for each in CASES if each[1] not in (HeadKind.MTP, HeadKind.SELF)]
SELF = HeadConfig(HeadKind.SELF, num_layers=2)


class HybridMtp(HeadOracle):
    """Qwen's MTP as transformers has it."""

    def __init__(self, target: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", dtype=torch.float32).eval()
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
        self._target, self._mtp = model, MtpModel.from_pretrained(model).eval()


class FirstLayers(HeadOracle):
    """The target's first layers with its norm and head, run over the whole text for every draft."""

    def __init__(self, target: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", dtype=torch.float32)
        trunk = self._model.eval().get_decoder()
        trunk.layers = trunk.layers[: SELF.num_layers]

    @torch.no_grad()
    def drafts(self, token_ids: Seq[int], num_drafts: int) -> tuple[int, ...]:
        ids = torch.tensor([token_ids])
        for _ in range(num_drafts):
            chosen = self._model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, chosen), dim=1)
        return tuple(ids[0, len(token_ids) :].tolist())


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HeadModels, HeadKind]:
    family, kind = request.param
    world = HeadModels(tmp_path_factory.mktemp(family))
    write_target(world.target, family, has_mtp=kind is HeadKind.MTP)
    if kind is HeadKind.EAGLE3:
        write_original(world.root / kind, head_tensors(world.target, len(TAPS)), TAPS, num_target_layers=3)
    elif kind is HeadKind.DFLASH:
        write_block_head(world.root / kind, block_tensors(world.target, len(TAPS), SHAPE), TAPS, SHAPE)
    elif kind is HeadKind.MEDUSA:
        fit_medusa(world.root / kind, world.target)
    return world, kind


def write_target(folder: Path, family: str, *, has_mtp: bool) -> None:
    """Its layers do little, so that heads are often right; an MTP has Qwen's published names."""
    config = HYBRIDS[family]()
    config.vocab_size = VOCAB_SIZE
    if has_mtp:
        config.layer_types = ["linear_attention", "linear_attention", "full_attention"]  # MTP is of the last's kind
        config.mtp_num_hidden_layers = 1
    model = write_hybrid(folder, config)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "down_proj")):
            weights[name] *= 0.03
    if has_mtp:
        weights |= _mtp_weights(model)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _mtp_weights(model: object) -> dict[str, torch.Tensor]:
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    layer = MtpModel(model, 1).layers[0]
    size = HIDDEN_SIZE
    outside = {
        "mtp.fc.weight": torch.cat((torch.eye(size), 0.1 * torch.eye(size)), dim=1),
        "mtp.pre_fc_norm_embedding.weight": layer.enorm.weight,
        "mtp.pre_fc_norm_hidden.weight": layer.hnorm.weight,
        "mtp.norm.weight": layer.post_norm.weight,
    }
    inside = {
        f"mtp.layers.0.{name}": random(*tensor.shape, seed=index, scale=0.1) if tensor.ndim > 1 else tensor
        for index, (name, tensor) in enumerate(layer.mtp_block.state_dict().items())
    }
    return {name: tensor.detach().clone().contiguous() for name, tensor in (outside | inside).items()}


@pytest.fixture(scope="module")
def reference(case: tuple[HeadModels, HeadKind]) -> dict[str, tuple[int, ...]]:
    engine = build(case[0], None, HeadSetup(num_drafts=0))
    texts: dict[str, tuple[int, ...]] = {}
    for request in requests(HeadSetup()):
        texts |= generate(engine, [request])
    return texts


def test_a_head_changes_no_token(case: tuple[HeadModels, HeadKind], reference: dict[str, tuple[int, ...]]) -> None:
    """In odd chunks, after prefix hits and, for MTP, after a preemption."""
    world, kind = case
    oracle = _oracle(world, kind)
    for setup in SETUPS if kind is HeadKind.MTP else SETUPS[:1]:
        engine = build(world, SELF if kind is HeadKind.SELF else kind, setup)
        drafted = record(engine)
        for _ in range(setup.num_repeats):
            assert generate(engine, requests(setup)) == reference
        stats = engine.stats()
        assert stats.drafts.num_accepted_tokens > 5
        assert (stats.num_preemptions > 0) is (setup.num_blocks < 20)
        assert stats.num_prefix_hit_tokens > 0
        for each in drafted[:: 1 + len(drafted) // 12] if oracle else ():
            assert each.draft.token_ids == oracle.drafts(each.token_ids, len(each.draft.token_ids))


def _oracle(world: HeadModels, kind: HeadKind) -> HeadOracle | PlainEagle3 | PlainDFlash | None:
    if kind is HeadKind.MTP:
        return HybridMtp(world.target)
    if kind is HeadKind.SELF:
        return FirstLayers(world.target)
    if kind is HeadKind.EAGLE3:
        return PlainEagle3.read(world.target, world.root / kind, TAPS)
    return PlainDFlash(world.target, world.root / kind, TAPS, SHAPE) if kind is HeadKind.DFLASH else None


@pytest.mark.parametrize("case", CASES[:1], indirect=True, ids=str)
def test_a_head_drafts_after_a_prompt_that_was_read_elsewhere(
    case: tuple[HeadModels, HeadKind], reference: dict[str, tuple[int, ...]]
) -> None:
    world, kind = case
    remote = build(world, kind, HeadSetup(num_drafts=0, max_tokens_per_step=16))
    engine = build(world, kind, HeadSetup(), InProcessTransport(remote))
    texts: dict[str, tuple[int, ...]] = {}
    for request in requests(HeadSetup()):
        texts |= generate(engine, [request])
    assert texts == reference
    assert engine.stats().remote.num_tokens > 50
    assert engine.stats().drafts.num_accepted_tokens > 5


def test_the_mtp_of_a_checkpoint_that_does_not_count_its_layers_is_found(tmp_path: Path) -> None:
    write_target(tmp_path / "target", "qwen3_next", has_mtp=True)
    file = tmp_path / "target" / "config.json"
    file.write_text(file.read_text().replace('"mtp_num_hidden_layers": 1,', ""))
    engine = build(HeadModels(tmp_path), HeadConfig(HeadKind.MTP), HeadSetup())
    assert len(engine.runner.kv_layout.layers) == 2


@pytest.mark.parametrize("case", WITH_FILES, indirect=True, ids=str)
def test_heads_exchanged_while_they_draft_change_no_token_and_leave_no_state(
    case: tuple[HeadModels, HeadKind], reference: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    world, kind = case
    engine = build(world, kind, SETUPS[0])
    runner, steps = model_runner(engine), count(1)
    heads = [runner.head, runner.load_head(str(changed(world.head(kind), tmp_path / "other", -0.7).path))]

    def exchange() -> None:
        if next(steps) % 3 == 0:
            heads.reverse()
            assert heads[0] is not None
            engine.exchange_head(heads[0])

    assert generate(engine, requests(SETUPS[0]), exchange) == reference
