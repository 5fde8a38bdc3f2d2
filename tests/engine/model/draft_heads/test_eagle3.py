"""EAGLE-3 heads: both published layouts compute the paper's function; heads that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    EngineConfig,
    HeadConfig,
    HeadKind,
    ModelConfig,
    Quantization,
    SpeculationConfig,
)
from engine.engine_core.loading import load_engine
from engine.model.draft_heads.eagle3 import Eagle3Head
from engine.model.draft_heads.loader import load_head
from engine.model.forward_batch import UNKNOWN
from engine.model.linear import quantized_linear
from engine.model.linear.quantized_linear import can_quantize
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, VerifyMode
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.fixtures.heads.eagle3_fixtures import (
    HIDDEN_SIZE,
    LAYER,
    LOSSLESS,
    PlainEagle3,
    StockLayers,
    head_tensors,
    random,
    write_original,
    write_speculators,
)
from tests.engine.fixtures.tabular import chi_square_tail

TAPS = (0, 1, 2)
TEXT = [5, 9, 33, 2, 17, 60, 5, 9, 41, 12]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tensors(target: Path) -> dict[str, Tensor]:
    return head_tensors(target, len(TAPS))


class HeadLogits:
    """Logits of a loaded head after every pair of a text, and after one more step on its own state."""

    def __init__(self, target: Path, head: Path) -> None:
        config = HeadConfig(HeadKind.EAGLE3, str(head))
        runner = ModelRunner(ModelConfig(str(target), dtype="float32"), CacheConfig(4, 8), None, config)
        assert isinstance(runner.head, Eagle3Head)
        runner.forward([Span(TEXT, 0, [3, 1, 2, 0], 1)])
        assert runner.features is not None
        states = runner.head.enter(runner.features[:-1])
        pairs = runner.lay_out([Span(TEXT[1:], 0, [3, 1, 2, 0], len(TEXT) - 1)])
        states = runner.head.forward(pairs, states)
        self.logits = runner.head.logits(states)  # [T - 1, V]
        step = runner.lay_out([Span([7], len(TEXT) - 1, [3, 1, 2, 0], 1)])
        self.next_logits = runner.head.logits(runner.head.forward(step, states[-1:]))[0]


def check_like_reference(told: HeadLogits, reference: PlainEagle3) -> None:
    states = reference.states(TEXT[:-1])
    for num_pairs in range(1, len(TEXT)):
        logits, last = reference.step(states[:num_pairs], TEXT[1 : num_pairs + 1])
        assert torch.allclose(told.logits[num_pairs - 1], logits.clamp(min=UNKNOWN), atol=1e-4)
    logits, _ = reference.step(torch.cat((states, last[None])), [*TEXT[1:], 7])
    assert torch.allclose(told.next_logits, logits.clamp(min=UNKNOWN), atol=1e-4)


def test_both_layouts_are_one_function_and_that_of_the_paper(
    target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    original = HeadLogits(target, write_original(tmp_path / "a", tensors, TAPS))
    check_like_reference(original, PlainEagle3(target, tensors, TAPS))
    others = (
        write_original(tmp_path / "b", tensors, TAPS, is_pickled=True),
        write_speculators(tmp_path / "c", tensors, TAPS),
    )
    for folder in others:
        told = HeadLogits(target, folder)
        assert torch.equal(told.logits, original.logits)
        assert torch.equal(told.next_logits, original.next_logits)


def test_tokens_outside_of_the_drafts_vocabulary_are_never_drafted(
    target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    told = HeadLogits(target, write_original(tmp_path / "a", tensors, TAPS))
    assert torch.equal((told.logits > UNKNOWN).all(dim=0), tensors["t2d"])
    assert (told.logits[:, ~tensors["t2d"]] == UNKNOWN).all()


@pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="no kernels for int8 and int4 weights here")
@pytest.mark.parametrize(("quantization", "most"), [(Quantization.INT8, 0.02), (Quantization.INT4, 0.2)])
def test_the_head_of_a_quantized_target_is_quantized_with_it(
    quantization: Quantization, most: float, target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    folder = write_original(tmp_path / "head", tensors, TAPS)
    stock = AutoModelForCausalLM.from_pretrained(target)
    config = HeadConfig(HeadKind.EAGLE3, str(folder))
    full, quantized = (load_head(config, stock, stock.device, each) for each in (Quantization.NONE, quantization))
    assert isinstance(full, Eagle3Head)
    assert isinstance(quantized, Eagle3Head)
    features = random(20, len(TAPS) * HIDDEN_SIZE, seed=5)
    for got, expected in (
        (quantized.enter(features), full.enter(features)),
        (quantized.logits(features[:, :HIDDEN_SIZE]), full.logits(features[:, :HIDDEN_SIZE])),
    ):
        is_known = expected > UNKNOWN
        error = (got - expected)[is_known].norm() / expected[is_known].norm()
        assert 0 < error < most


@pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="no kernels for int4 weights here")
def test_a_head_may_have_fewer_bits_than_its_target(
    target: Path, tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes as the head of an int4 target does, and the target as without it."""
    folder = write_original(tmp_path / "head", tensors, TAPS)
    features = random(20, len(TAPS) * HIDDEN_SIZE, seed=5)

    def entered(of_target: Quantization, of_head: Quantization) -> Tensor:
        config = HeadConfig(HeadKind.EAGLE3, str(folder), of_head)
        runner = ModelRunner(
            ModelConfig(str(target), "float32", quantization=of_target), CacheConfig(num_blocks=4), head=config
        )
        head, again = runner.head, runner.load_head(str(folder))
        assert isinstance(head, Eagle3Head)
        assert isinstance(again, Eagle3Head)
        found = head.enter(features)
        assert torch.equal(again.enter(features), found)  # a swapped one too
        return found

    none, int4 = Quantization.NONE, Quantization.INT4
    assert torch.equal(entered(none, int4), entered(int4, none))
    assert not torch.equal(entered(none, int4), entered(none, none))
    monkeypatch.setattr(quantized_linear, "can_quantize", lambda _: False)
    with pytest.raises(ConfigError, match=r"draft\.quantization is 'int4', which needs our kernels"):
        entered(none, int4)


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True},
        {"fc_norm": True},
    ],
    ids=lambda flags: "+".join(flags),
)
def test_the_variants_of_the_speculators_library_are_computed(
    flags: dict[str, bool], target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors = {**tensors, "fc.weight": tensors["fc.weight"] * 10}  # so that it matters what enters
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = 1 + random(len(TAPS) * HIDDEN_SIZE, seed=30)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{tap}.weight": 1 + random(HIDDEN_SIZE, seed=40 + tap) for tap in range(len(TAPS))}
    told = HeadLogits(target, write_speculators(tmp_path / "head", tensors, TAPS, **flags))
    check_like_reference(told, PlainEagle3(target, tensors, TAPS, **flags))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 5.0, 9.0]}
QWEN = {**LAYER, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


@pytest.mark.parametrize(
    "layer",
    [
        {**LAYER, **TWO, "mlp_bias": True, "attention_bias": True},
        {**QWEN, **TWO, "use_sliding_window": True, "attention_bias": True, "hidden_act": "gelu"},
        {**LAYER, "rope_parameters": YARN},
        {**LAYER, "rope_parameters": LLAMA3},
        {**LAYER, "rope_parameters": LONG},
        {**LAYER, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ],
    ids=["llama", "qwen3", "yarn", "llama3", "longrope", "dynamic"],
)
def test_layers_are_those_of_transformers(
    layer: dict[str, Any], target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    """Windows, norms of heads, biases, activations, several layers, and all scalings of positions."""
    stock = StockLayers(layer)
    own = {name: each for name, each in tensors.items() if not name.startswith(("midlayer.self_attn", "midlayer.mlp"))}
    own["fc.weight"] = own["fc.weight"] * 10
    own["midlayer.input_layernorm.weight"] = stock.tensors()["layers.0.input_layernorm.weight"]
    own["midlayer.post_attention_layernorm.weight"] = stock.tensors()["layers.0.post_attention_layernorm.weight"]
    folder = write_speculators(tmp_path / "head", own | stock.tensors(), TAPS, transformer_layer_config=layer)
    check_like_reference(HeadLogits(target, folder), PlainEagle3(target, own, TAPS, stock))


def test_a_head_may_have_embeddings_of_its_own(target: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors = {**tensors, "embed_tokens.weight": random(VOCAB_SIZE, HIDDEN_SIZE, seed=50)}
    told = HeadLogits(target, write_speculators(tmp_path / "head", tensors, TAPS))
    check_like_reference(told, PlainEagle3(target, tensors, TAPS))


def test_without_layer_ids_a_low_a_middle_and_a_high_layer_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=9, **sizes)).save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    tensors = head_tensors(tmp_path / "target", 3)
    for write in (write_original, write_speculators):
        folder = write(tmp_path / write.__name__, tensors, None)
        head = load_head(HeadConfig(HeadKind.EAGLE3, str(folder)), target, target.device)
        assert head.taps.layers == (2, 4, 6)


def test_a_target_too_shallow_for_the_default_layers_is_refused(
    target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    message = refused(target, write_original(tmp_path / "head", tensors, None))
    assert "eagle_aux_hidden_state_layer_ids" in message


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without("fc.weight"), "tensor 'fc.weight' of shape [32, 96] is missing"),
        (without("midlayer.hidden_norm.weight"), "'midlayer.hidden_norm.weight'"),
        (without("d2t"), "tensor 'd2t' of shape [60] is missing"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64)}), "needs [32, 96]"),
        (lambda tensors: tensors.update({"midlayer.extra.weight": torch.zeros(2)}), "'midlayer.extra.weight'"),
        (lambda tensors: tensors["d2t"].fill_(10), "'d2t'"),
        (lambda tensors: tensors["t2d"].logical_not_(), "'d2t' and 't2d' name different tokens"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_tensors_name(
    damage: Callable[[dict[str, Tensor]], object], said: str, target: Path, tmp_path: Path
) -> None:
    tensors = head_tensors(target, len(TAPS))
    damage(tensors)
    assert said in refused(target, write_original(tmp_path / "head", tensors, TAPS))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 64}, "hidden size 64, but the target's is 32"),
        ({"target_hidden_size": 48}, "hidden size 48, but the target's is 32"),
        ({"vocab_size": 128}, "a vocabulary of 128 tokens, but the target's has 64"),
        ({"num_hidden_layers": 2}, "tensor 'layers.1.self_attn.q_proj.weight' of shape [32, 32] is missing"),
        ({"num_target_layers": 3}, "made for a target of 3 layers"),
        ({"hidden_act": "glu"}, "hidden_act 'glu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 in config.json; it must be 1 or more"),
        ({"num_attention_heads": 0}, "the layers in config.json of"),
        ({"num_key_value_heads": -1}, "num_key_value_heads -1 in config.json; it must be 1 or more"),
        ({"rope_theta": None}, "rope_theta None in config.json; it must be a number above 0"),
        ({"rope_theta": "x"}, "rope_theta 'x' in config.json; it must be a number above 0"),
        ({"draft_vocab_size": "x"}, "draft_vocab_size 'x' in config.json; it must be 1 to 64"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 in config.json; it must be 1 to 64"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_parameters"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}}, "after layer 7 of its target"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"typical_acceptance": True}, "lossy acceptance"),
    ],
)
def test_a_head_for_another_target_is_refused(
    config: dict[str, Any], said: str, target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    assert said in refused(target, write_original(tmp_path / "head", tensors, TAPS, **config))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"speculators_model_type": "dflash"}, "kind 'dflash', and draft.kind is 'eagle3'; set it to 'dflash'"),
        ({"speculators_model_type": "tomorrow"}, "type 'tomorrow', which is not read; read are 'eagle3', 'peagle'"),
        ({"transformer_layer_config": {**LAYER, "model_type": "qwen3_next"}}, "model_type 'qwen3_next'"),
        ({"transformer_layer_config": {**LAYER, "layer_types": ["sliding_attention"]}}, "no size in sliding_window"),
        ({"transformer_layer_config": {**LAYER, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"speculators_config": {"proposal_methods": [{**LOSSLESS, "accept_tolerance": 0.1}]}},
            "accept_tolerance is 0.1",
        ),
        (
            {"speculators_config": {"proposal_methods": [{**LOSSLESS, "verifier_accept_k": 3}]}},
            "verifier_accept_k is 3",
        ),
    ],
)
def test_unsupported_options_of_a_speculators_checkpoint_are_refused(
    config: dict[str, Any], said: str, target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    assert said in refused(target, write_speculators(tmp_path / "head", tensors, TAPS, **config))


def test_a_folder_without_a_head_is_refused(target: Path) -> None:
    assert "is not an EAGLE-3, DFlash or DSpark head" in refused(target, target)


def test_blocks_of_engines_with_other_heads_do_not_fit(
    target: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    other = {**tensors, "norm.weight": tensors["norm.weight"] * 2}
    folders = [write_original(tmp_path / str(i), each, TAPS) for i, each in enumerate((tensors, other))]
    first, second = (
        ModelRunner(ModelConfig(str(target)), CacheConfig(4, 8), None, HeadConfig(HeadKind.EAGLE3, str(folder)))
        for folder in folders
    )
    assert first.kv_layout != second.kv_layout
    assert first.model_version == second.model_version  # whose names the router's index knows


def refused(target: Path, head: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with pytest.raises(ConfigError) as caught:
        load_head(HeadConfig(HeadKind.EAGLE3, str(head)), model, model.device)
    return str(caught.value)


NUM_SEQUENCES = 3000
SAMPLING = SamplingParams(temperature=1.3, top_k=3, max_tokens=4)


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_sampled_text_has_the_targets_distribution(verify: VerifyMode, tmp_path: Path) -> None:
    """The distributions that go with the drafts are those they were drawn from, over the head's own vocabulary."""
    target = tmp_path / "target"
    write_checkpoint(target, seed=0)
    weights = load_file(target / "model.safetensors")
    for name in weights:  # layers that do little, so that the head is often right
        weights[name] *= 0.03 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    head = write_original(tmp_path / "head", head_tensors(target, len(TAPS)), TAPS)
    config = EngineConfig(
        ModelConfig(str(target), dtype="float32"),
        CacheConfig(8, 1024),
        speculation=SpeculationConfig(2, verify, 2, (SpeculationMethod.EAGLE3,)),
        head=HeadConfig(HeadKind.EAGLE3, str(head)),
    )
    engine = load_engine(config)
    for seed in range(NUM_SEQUENCES):
        sampling = SamplingParams(
            temperature=SAMPLING.temperature, top_k=SAMPLING.top_k, max_tokens=SAMPLING.max_tokens, seed=seed
        )
        engine.add(GenerateRequest(str(seed), tuple(TEXT), sampling))
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for chunk in engine.step():
            texts[chunk.request_id] = texts.get(chunk.request_id, ()) + chunk.token_ids
    drafts = engine.stats().drafts
    assert 0.1 < drafts.num_accepted_tokens / drafts.num_draft_tokens < 0.9
    expected, places = exact_probs(target)
    generated = torch.tensor([[places[text[:i]][text[i]] for i in range(4)] for text in texts.values()])
    assert chi_square_tail(generated, expected) > 1e-6


def exact_probs(target: Path) -> tuple[Tensor, dict[tuple[int, ...], dict[int, int]]]:
    """The joint distribution [3, 3, 3, 3] of four tokens by rank, and the rank of each token after each prefix."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    joint = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    ranks: dict[tuple[int, ...], dict[int, int]] = {}
    probs: dict[tuple[int, ...], Tensor] = {}
    for path in product(range(3), repeat=4):
        prefix: tuple[int, ...] = ()
        prob = 1.0
        for rank in path:
            if prefix not in ranks:
                with torch.no_grad():
                    top = model(torch.tensor([[*TEXT, *prefix]])).logits[0, -1].topk(3)
                ranks[prefix] = {token: place for place, token in enumerate(top.indices.tolist())}
                probs[prefix] = (top.values.double() / SAMPLING.temperature).softmax(0)
            prob *= float(probs[prefix][rank])
            prefix = (*prefix, list(ranks[prefix])[rank])
        joint[path] = prob
    return joint, ranks
