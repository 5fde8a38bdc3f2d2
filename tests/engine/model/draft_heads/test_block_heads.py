"""DFlash, DSpark and P-EAGLE: blocks compute the published functions; heads that do not fit are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.batch.span import Span
from engine.config import AttentionKind, CacheConfig, HeadConfig, HeadKind, ModelConfig, Quantization
from engine.model.draft_heads.dflash import DFlashHead
from engine.model.draft_heads.eagle3 import ParallelEagleHead
from engine.model.draft_heads.layers import BlockConvolution
from engine.model.draft_heads.loader import load_head
from engine.model.forward_batch import UNKNOWN
from engine.model.linear.quantized_linear import can_quantize
from engine.model.runner.model_runner import ModelRunner
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.heads.block_heads import (
    MASK_ID,
    QWEN_LAYER,
    BlockShape,
    PlainDFlash,
    PlainParallelEagle,
    block_tensors,
    peagle_tensors,
    write_block_head,
    write_dflash_of_its_authors,
    write_peagle,
)
from tests.engine.fixtures.heads.eagle3_fixtures import write_original
from tests.engine.fixtures.heads.heads_fixtures import refused

TAPS = (1, 2)
TEXTS = ([5, 9, 33, 2, 17, 60, 5, 9, 41, 12, 7, 3], [8, 1, 44, 20])
NUM_DRAFTS = (4, 2)
TABLES = ([3, 1, 2, 0], [5, 4])  # of blocks with 8 slots
DRAFTED = (12, 13, 14, 15)  # the drafts before a draft, where they count


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=0)
    return folder


def tokens_before(text: Seq[int], depth: int) -> tuple[int, ...]:
    return (*text[-2:], *DRAFTED[:depth])


class Blocks:
    """The logits of two texts' blocks in one pass of a loaded head, after the texts are read in two chunks."""

    def __init__(self, target: Path, head: Path, kind: HeadKind, attention: AttentionKind = AttentionKind.AUTO) -> None:
        config = HeadConfig(kind, str(head))
        model = ModelConfig(str(target), dtype="float32", attention=attention)
        self.runner = ModelRunner(model, CacheConfig(8, 16), None, config)
        assert isinstance(self.runner.head, (DFlashHead, ParallelEagleHead))
        self.head = self.runner.head
        for begin, end in ((0, 3), (3, 100)):
            spans = [Span(text[:-1][begin:end], begin, table, 0) for text, table in zip(TEXTS, TABLES, strict=True)]
            spans = [span._replace(num_logits=1) for span in spans if span.token_ids]
            texts = [text for text in TEXTS if text[:-1][begin:end]]
            self.runner.forward(spans)
            after = [span._replace(token_ids=text[1:][begin:end]) for span, text in zip(spans, texts, strict=True)]
            assert self.runner.features is not None
            self.states = self.head.read(self.runner.lay_out(after), self.runner.features)
        if len(self.states) < len(TEXTS):  # the shorter text ended with the first chunk
            self.states = self.states[[0, 0]]

    def logits(self, num_drafts: Seq[int] = NUM_DRAFTS, *, has_blocks: bool = True) -> list[Tensor]:
        """For each text, [K, V]."""
        spans = []
        for text, table, num in zip(TEXTS, TABLES, num_drafts, strict=True):
            ids = self.head.block_ids(text[-1], num)
            spans.append(Span(ids, len(text) - 1, table, num + min(self.head.num_more_rows, 0)))
        batch = self.runner.lay_out(spans, has_blocks=has_blocks)
        found = self.head.block(batch, self.states, num_drafts)
        before = [
            tokens_before(text, depth) for text, num in zip(TEXTS, num_drafts, strict=True) for depth in range(num)
        ]
        rows = found(range(sum(num_drafts)), before)
        return list(rows.split(list(num_drafts)))


def check_like_reference(blocks: Blocks, reference: PlainDFlash) -> None:
    for text, num, found in zip(TEXTS, NUM_DRAFTS, blocks.logits(), strict=True):
        hidden = reference.hidden(text, num)
        expected = torch.stack([reference.logits(hidden, depth, tokens_before(text, depth)) for depth in range(num)])
        assert torch.allclose(found, expected.clamp(min=UNKNOWN), atol=1e-4)


SHAPES = {
    "whole": BlockShape(),
    "windows": BlockShape(windows=(None, 3, 3), are_causal=(False, False, False), rope_theta=1e6),
    "causal windows": BlockShape(windows=(4, None), are_causal=(True, False)),
    "own vocabulary": BlockShape(windows=(None,), are_causal=(False,), is_cut=True),
    "dflash 2": BlockShape(windows=(None, 3), is_refined=True),
    "xpress": BlockShape(windows=(None, 9), has_refiner=True),
    "xpress, own vocabulary": BlockShape(has_refiner=True, is_anchor_drafting=True, is_cut=True),
    "dspark": BlockShape(is_anchor_drafting=True, is_cut=True, markov_type="vanilla"),
    "dspark, gated": BlockShape(is_anchor_drafting=True, markov_type="gated"),
}


def kind_of(shape: BlockShape) -> HeadKind:
    return HeadKind.DFLASH if shape.markov_type is None else HeadKind.DSPARK


@pytest.mark.parametrize("name", SHAPES)
def test_a_block_is_computed_as_in_the_speculators_library(name: str, target: Path, tmp_path: Path) -> None:
    shape = SHAPES[name]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape)
    check_like_reference(Blocks(target, folder, kind_of(shape)), PlainDFlash(target, folder, TAPS, shape))


def test_every_attention_computes_blocks(target: Path, tmp_path: Path) -> None:
    shape = SHAPES["windows"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape)
    check_like_reference(
        Blocks(target, folder, HeadKind.DFLASH, AttentionKind.TORCH), PlainDFlash(target, folder, TAPS, shape)
    )


def test_a_block_whose_rows_see_no_later_ones_is_another_function(target: Path, tmp_path: Path) -> None:
    """The mutant: causal attention within the block."""
    shape = SHAPES["whole"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape)
    blocks = Blocks(target, folder, HeadKind.DFLASH)
    assert not torch.allclose(blocks.logits()[0], blocks.logits(has_blocks=False)[0], atol=1e-2)


def test_the_authors_layout_is_the_same_function(target: Path, tmp_path: Path) -> None:
    shape = SHAPES["causal windows"]
    tensors = block_tensors(target, 2, shape)
    folders = [
        write(tmp_path / write.__name__, tensors, TAPS, shape)
        for write in (write_block_head, write_dflash_of_its_authors)
    ]
    first, second = (Blocks(target, folder, HeadKind.DFLASH).logits()[0] for folder in folders)
    assert torch.equal(first, second)
    scaled = write_dflash_of_its_authors(
        tmp_path / "scaled",
        tensors,
        TAPS,
        shape,
        dflash_config={
            "mask_token_id": MASK_ID,
            "target_layer_ids": [0, 1],
            "output_multiplier": 0.5,
            "final_logit_softcapping": 3.0,
        },
    )
    third = Blocks(target, scaled, HeadKind.DFLASH).logits()[0]
    assert torch.allclose(third, 3 * torch.tanh(0.5 * first / 3), atol=1e-5)


@pytest.mark.parametrize("name", ["dflash 2", "xpress"])
def test_the_authors_layouts_of_dflash_2_and_xpress_are_the_same_functions(
    name: str, target: Path, tmp_path: Path
) -> None:
    """The codebooks of DFlash 2 are also published with the names of transformers' modules."""
    shape = SHAPES[name]
    tensors = block_tensors(target, 2, shape)
    renamed = {f"{name}.weight" if name.endswith("codebook") else name: each for name, each in tensors.items()}
    folders = [
        write_block_head(tmp_path / "a", tensors, TAPS, shape),
        write_dflash_of_its_authors(tmp_path / "b", tensors, TAPS, shape),
        write_dflash_of_its_authors(tmp_path / "c", renamed, TAPS, shape),
    ]
    first, *others = (Blocks(target, folder, HeadKind.DFLASH).logits()[0] for folder in folders)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["xpress", "xpress, own vocabulary"])
def test_drafts_chosen_one_by_one_are_what_the_authors_iterations_settle_at(
    name: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape)
    reference = PlainDFlash(target, folder, TAPS, shape)
    for text in TEXTS:
        hidden, chosen = reference.hidden(text, 4), list(text[-2:])
        for depth in range(4):
            chosen.append(int(reference.logits(hidden, depth, chosen).argmax()))
        assert tuple(chosen[2:]) == reference.drafts(text, 4)


@pytest.mark.parametrize("has_name", [False, True])
def test_a_published_mask_embedding_replaces_the_table_s_row(has_name: bool, target: Path, tmp_path: Path) -> None:
    shape = SHAPES["whole"]
    tensors = block_tensors(target, 2, shape)
    trained = tensors["embed_tokens.weight"].clone()
    trained[MASK_ID] = torch.linspace(-1.0, 1.0, trained.shape[1])
    whole = write_block_head(tmp_path / "whole", tensors | {"embed_tokens.weight": trained}, TAPS, shape)
    apart = write_block_head(tmp_path / "apart", tensors, TAPS, shape)
    before = Blocks(target, apart, HeadKind.DFLASH).logits()[0]
    named = {"mask_token_id": MASK_ID, "embedding": trained[MASK_ID]}
    torch.save(named if has_name else trained[MASK_ID][None], apart / "mask_embedding.pt")
    found = Blocks(target, apart, HeadKind.DFLASH).logits()[0]
    assert torch.equal(found, Blocks(target, whole, HeadKind.DFLASH).logits()[0])
    assert not torch.allclose(found, before, atol=1e-2)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ({"mask_token_id": MASK_ID - 1, "embedding": torch.zeros(32)}, f"of token {MASK_ID - 1}, but config.json has"),
        ({"other": torch.zeros(32)}, "holds no tensor"),
        (torch.zeros(31), "'mask_embedding' has shape [31], but this target needs [32]"),
    ],
)
def test_a_mask_embedding_that_does_not_fit_is_refused_by_name(
    contents: object, said: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES["whole"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape)
    torch.save(contents, folder / "mask_embedding.pt")
    assert said in refused(target, folder, HeadKind.DFLASH)


def test_a_parallel_eagle_computes_all_drafts_as_in_the_speculators_library(target: Path, tmp_path: Path) -> None:
    folder = write_peagle(tmp_path / "head", peagle_tensors(target, 2), TAPS, norm_before_residual=True)
    reference = PlainParallelEagle.read(target, folder, TAPS, norm_before_residual=True)
    blocks = Blocks(target, folder, HeadKind.PEAGLE)
    expected = reference.block_logits(TEXTS[0], 4).clamp(min=UNKNOWN)
    assert torch.allclose(blocks.logits()[0], expected, atol=1e-4)


def test_the_authors_layouts_of_dspark_and_p_eagle_are_the_same_functions(target: Path, tmp_path: Path) -> None:
    shape = SHAPES["dspark, gated"]
    tensors = block_tensors(target, 2, shape)
    pairs = peagle_tensors(target, 2)
    for kind, folders in (
        (
            HeadKind.DSPARK,
            [
                write(tmp_path / write.__name__, tensors, TAPS, shape)
                for write in (write_block_head, write_dflash_of_its_authors)
            ],
        ),
        (
            HeadKind.PEAGLE,
            [
                write_peagle(tmp_path / "a", pairs, TAPS),
                write_original(tmp_path / "b", pairs, TAPS, ptd_token_id=MASK_ID),
            ],
        ),
    ):
        first, second = (Blocks(target, folder, kind).logits()[0] for folder in folders)
        assert torch.equal(first, second)


def test_a_block_of_one_pair_needs_no_pass(target: Path, tmp_path: Path) -> None:
    folder = write_peagle(tmp_path / "head", peagle_tensors(target, 2), TAPS)
    blocks = Blocks(target, folder, HeadKind.PEAGLE)
    assert blocks.head.block_ids(7, 1) == []
    alone = blocks.head.block(None, blocks.states[:1], [1])([0], [(2, 7)])
    assert torch.allclose(alone[0], blocks.logits((4, 2))[0][0], atol=1e-5)


@pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="no kernels for int8 weights here")
def test_the_head_of_a_quantized_target_is_quantized_with_it(target: Path, tmp_path: Path) -> None:
    shape = SHAPES["own vocabulary"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape)
    stock = AutoModelForCausalLM.from_pretrained(target)
    config = HeadConfig(HeadKind.DFLASH, str(folder))
    heads = [load_head(config, stock, stock.device, each) for each in (Quantization.NONE, Quantization.INT8)]
    assert all(isinstance(head, DFlashHead) for head in heads)
    x = torch.randn(4, 2 * 32, generator=torch.Generator().manual_seed(1))
    full, rounded = (head._fuse(x) for head in heads if isinstance(head, DFlashHead))
    assert 0 < float((full - rounded).norm() / full.norm()) < 0.02


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculators_model_type": "dspark"}, "kind 'dspark', and draft.kind is 'dflash'; set it to 'dspark'"),
        (
            {"speculators_model_type": "lilicorr"},
            "type 'lilicorr', which is not read; read are 'eagle3', 'peagle'",
        ),
        ({"speculators_model_type": "xpress"}, "'refiner_head.token_embed.weight' of shape [64, 256] is missing"),
        ({"speculators_model_type": "dflash2"}, "'layers.0.attention_conv.base_kernel' of shape [2, 2, 32] is missing"),
        ({"mask_token_id": None}, "mask_token_id None"),
        ({"mask_token_id": 64}, "mask_token_id 64 in config.json; it must be one of the target's 64 ids"),
        ({"block_size": 1}, "block_size 1"),
        ({"aux_hidden_state_layer_ids": None}, "config.json needs aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [1, 9]}, "after layer 8 of its target, which has 2 layers"),
        ({"aux_hidden_state_layer_ids": [0, 1, 2]}, "'fc.weight' has shape [32, 64], but this target needs [32, 96]"),
        ({"transformer_layer_config": {**QWEN_LAYER, "vocab_size": 99}}, "a vocabulary of 99 tokens"),
        ({"transformer_layer_config": {**QWEN_LAYER, "hidden_size": 64}}, "hidden size 64"),
        ({"draft_vocab_size": 60}, "tensor 'd2t' of shape [60] is missing"),
        ({"attention_sink_bias": True}, "attention_sink_bias True in config.json, and only False is computed"),
    ],
)
def test_a_block_head_that_does_not_fit_is_refused_by_name(
    config: dict[str, Any], said: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES["whole"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape, **config)
    assert said in refused(target, folder, HeadKind.DFLASH)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"conv_kernel_size": 6}, "conv_kernel_size 6 in config.json; it must be 1 to 5"),
        ({"conv_group_size": 5}, "conv_group_size 5 in config.json, which does not divide its hidden size 32"),
        ({"selector_top_k": 65}, "selector_top_k 65 in config.json; it must be 1 to 64"),
        ({"selector_top_k": True}, "selector_top_k True in config.json; it must be 1 to 64"),
        ({"selector_rank": "6"}, "selector_rank '6' in config.json; it must be 1 or more"),
        ({"selector_rank": 7}, "'candidate_selector.predecessor_codebook' has shape [64, 6], but this target needs"),
        ({"draft_vocab_size": 60}, "draft_vocab_size 60; only the target's whole vocabulary of 64 tokens is computed"),
    ],
)
def test_a_dflash_2_head_that_does_not_fit_is_refused_by_name(
    config: dict[str, Any], said: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES["dflash 2"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape, **config)
    assert said in refused(target, folder, HeadKind.DFLASH)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"xpress_rank": 0}, "xpress_rank 0 in config.json; it must be 1 or more"),
        ({"xpress_rank": 6}, "'refiner_head.token_embed.weight' has shape [64, 8], but this target needs [64, 6]"),
        ({"xpress_block_size": 16}, "xpress_block_size 16 and block_size 5 in config.json; only equal sizes"),
        ({"xpress_mlp_ratio": 4}, "'refiner_head.mlp_gate.weight' has shape [16, 8], but this target needs [32, 8]"),
    ],
)
def test_an_xpress_head_that_does_not_fit_is_refused_by_name(
    config: dict[str, Any], said: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES["xpress"]
    folder = write_block_head(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape, **config)
    assert said in refused(target, folder, HeadKind.DFLASH)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, "architecture LiLiCorrDraftModel, whose further layers are not"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            "'layers.0.attention_conv.base_kernel' of shape [2, 2, 32] is missing",
        ),
        (
            {"dflash_config": "none"},
            "has a field that cannot be read: 'str' object has no attribute 'items'; fetch",
        ),
        (
            {"dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": ["a", "b"]}},
            "has a field that cannot be read: can only concatenate str",
        ),
        ({"num_hidden_layers": "two"}, "cannot be read: Validation error for field 'num_hidden_layers'"),
        ({"attention_mode": "mla"}, "attention_mode 'mla' in config.json, and only 'gqa' is computed"),
        ({"num_target_layers": 36}, "made for a target of 36 layers, but the target has 2"),
        ({"is_neox_style": False}, "is_neox_style False"),
    ],
)
def test_a_block_head_of_the_authors_that_does_not_fit_is_refused_by_name(
    config: dict[str, Any], said: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES["whole"]
    folder = write_dflash_of_its_authors(tmp_path / "head", block_tensors(target, 2, shape), TAPS, shape, **config)
    assert said in refused(target, folder, HeadKind.DFLASH)


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("hidden_norm.weight"), "tensor 'hidden_norm.weight' of shape [32] is missing"),
        (without("layers.1.self_attn.q_norm.weight"), "'layers.1.self_attn.q_norm.weight'"),
        (without("markov_head.markov_w2.weight"), "'markov_head.markov_w2.weight' of shape [64, 32] is missing"),
        (lambda tensors: tensors.update({"layers.0.extra": torch.zeros(2)}), "1 unknown tensors, 'layers.0.extra'"),
    ],
)
def test_a_damaged_block_head_is_refused_by_the_tensors_name(
    damage: Callable[[dict[str, Tensor]], object], said: str, target: Path, tmp_path: Path
) -> None:
    shape = SHAPES["dspark, gated"]
    tensors = block_tensors(target, 2, shape)
    damage(tensors)
    assert said in refused(target, write_block_head(tmp_path / "head", tensors, TAPS, shape), HeadKind.DSPARK)


def test_a_row_without_finite_numbers_changes_no_other_block() -> None:
    base = torch.ones(2, 2, 4)
    convolution = BlockConvolution(base, lambda rows: rows.new_zeros(len(rows), 2 * 2 * 4))
    x, places = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
    expected = convolution.before(x, places)[0][2:]
    x[1] = float("nan")
    assert torch.equal(convolution.before(x, places)[0][2:], expected)
