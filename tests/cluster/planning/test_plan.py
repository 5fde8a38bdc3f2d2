"""`outrider plan`: shapes, roofline and the choice of K by arithmetic that is done again here by hand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.cli.__main__ import main
from cluster.planning.replica_plan import (
    PlannedDraft,
    ReplicaPlan,
    acceptance_per_position,
    best_speed_up,
    capacity_of,
    memory_of,
    replayed_speed_up,
    tree_nodes,
)
from cluster.planning.roofline import DeviceSpec, ModelShape, pass_cost, read_table
from cluster.schema.models import DRAFT_KINDS
from protos.messages import SpeculationMethod

ROOT = Path(__file__).parents[3]


def deployment(draft: str | None = "llama-3-8b", chance: float = 0.8, num_devices: int = 4) -> ReplicaPlan:
    return ReplicaPlan(
        target=ModelShape.of("llama-3-70b", "fp8"),
        draft=PlannedDraft(ModelShape.of(draft, "fp8")) if draft else None,
        device=DeviceSpec.of("h100"),
        num_devices=num_devices,
        acceptance=acceptance_per_position([chance], 8),
        prompt_tokens=1000,
        output_tokens=250,
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3-70b", 70.6), ("llama-3-8b", 8.03), ("gemma-2-27b", 27.2), ("gemma-2-9b", 9.24), ("qwen3-30b-a3b", 30.5)],
)
def test_public_shapes_have_the_published_number_of_weights(name: str, billions: float):
    assert ModelShape.of(name, "bf16").num_weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_folder_is_read_and_counts_the_weights_of_its_checkpoint():
    folder = ROOT / "models" / "demo" / "target"
    file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert ModelShape.of(str(folder), "bf16").weight_bytes == pytest.approx(file_bytes, rel=0.02)


def test_a_pass_reads_every_weight_once_and_computes_two_operations_per_weight_and_row():
    cost = deployment().target_pass(1, num_drafts=3)
    assert cost.weight_bytes == pytest.approx(69.5e9, rel=0.01)
    assert cost.flops == pytest.approx(4 * 2 * 69.5e9, rel=0.05)
    assert cost.bytes_s == pytest.approx((cost.weight_bytes + cost.kv_bytes) / (4 * 3.35e12 * 0.75))
    assert cost.is_memory_bound
    assert not deployment().target_pass(256, num_drafts=1024).is_memory_bound


def test_few_rows_read_few_experts():
    shape = ModelShape.of("qwen3-30b-a3b", "bf16")
    assert shape.read_bytes(1) < 0.15 * shape.read_bytes(10_000)


def test_one_processor_caches_latents_and_gpus_keys_and_values(tmp_path: Path):
    sizes = {"num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 10944}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **latent, "vocab_size": 102400}))
    shape = ModelShape.of(str(tmp_path), "bf16")
    assert shape.cached_bytes(has_latents=True) == 27 * 2 * 576
    assert shape.cached_bytes(has_latents=False) == shape.kv_bytes == 27 * 2 * 5120
    one, two = (
        replace(deployment(), target=shape, device=DeviceSpec.of("xeon-amx-2core"), num_devices=n) for n in (1, 2)
    )
    assert one.target_pass(1, num_drafts=0).kv_bytes * 5120 == two.target_pass(1, num_drafts=0).kv_bytes * 576


def test_the_best_k_of_one_stream_maximises_tokens_per_second():
    plan = deployment()
    best = best_speed_up(plan, 1)
    tokens = [sum(0.8**j for j in range(k + 1)) for k in range(9)]
    speeds = [tokens[k] / (plan.target_pass(1, k).seconds + k * plan.draft_step_s(1)) for k in range(9)]
    assert best.num_drafts == max(range(9), key=speeds.__getitem__)
    assert best.tokens_per_s == pytest.approx(max(speeds))
    assert best.factor == pytest.approx(max(speeds) / speeds[0])


def test_a_draft_that_is_never_accepted_pays_nowhere():
    assert [best_speed_up(deployment(chance=0.0), streams).num_drafts for streams in (1, 8)] == [0.0, 0.0]


def test_drafts_pay_less_in_larger_batches():
    factors = [best_speed_up(deployment(draft=None), streams).factor for streams in (1, 32, 256)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 2 * factors[2]


def with_head(kind: str, **changes: object) -> ReplicaPlan:
    plan = deployment(draft=None, num_devices=1)
    small = replace(plan, target=ModelShape.of("llama-3-8b", "bf16"))
    head = PlannedDraft.of(SpeculationMethod(kind), None, small.target, "bf16")
    return replace(small, draft=head, **changes)


def test_a_block_costs_one_pass_of_its_head_however_long_it_is():
    block, chain = with_head("dflash"), with_head("eagle3")
    assert block.draft is not None
    assert block.draft.shape.num_layers == 5
    tokens = [sum(0.8**j for j in range(k + 1)) for k in range(9)]
    own_s = pass_cost(block.draft.shape, block.device, 1, 9, 1, block.context).seconds
    speeds = [tokens[k] / (block.target_pass(1, k).seconds + min(k, 1) * own_s) for k in range(9)]
    best = best_speed_up(block, 1)
    assert (best.shape, best.tokens_per_s) == ("block", pytest.approx(max(speeds), rel=0.01))
    assert best.num_drafts > best_speed_up(chain, 1).num_drafts
    assert best_speed_up(chain, 1).shape == "chain"


def test_a_tree_is_planned_where_it_promises_more_than_a_chain():
    """At one stream rows are free, and a wrong first draft is common."""
    plan = with_head("eagle3", acceptance=(0.4,) * 8)
    chain, tree = best_speed_up(plan, 1), best_speed_up(replace(plan, num_tree_nodes=24), 1)
    assert tree.shape == "tree"
    assert tree.tokens_per_s > 1.02 * chain.tokens_per_s
    many = replace(plan, num_tree_nodes=24, acceptance=(0.9,) * 8)
    assert best_speed_up(many, 256).num_drafts <= best_speed_up(many, 1).num_drafts


def test_the_nodes_of_a_tree_are_the_likeliest_of_all():
    """Against every node down to depth 3, by hand."""
    shares = [share / 0.4 for share in (0.14, 0.06, 0.035, 0.02, 0.015)]
    levels = [[chance, *((1 - chance) * share for share in shares)] for chance in (0.7, 0.5, 0.3)]
    paths = [path for depth in (1, 2, 3) for path in itertools.product(*levels[:depth])]
    expected = sorted((math.prod(path) for path in paths), reverse=True)[:10]
    found = tree_nodes((0.7, 0.5, 0.3), 10)
    assert [chance for chance, _ in found] == pytest.approx(expected)
    assert found[0] == (0.7, 1)


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_every_kind_of_draft_is_planned(kind: str, capsys: pytest.CaptureFixture[str]):
    draft = ["--draft", "llama-3.2-1b"] if kind == "model" else []
    assert main(["plan", "llama-3-8b", "--draft-kind", kind, *draft, "--tree-nodes", "8"]) == 0
    said = capsys.readouterr().out
    assert f"drafts: {kind}, trees of up to 8 nodes" in " ".join(said.split())
    assert ("draft's weights" in said) is SpeculationMethod(kind).can_branch


def test_heads_of_the_targets_own_weights_and_without_attention_keep_no_keys():
    medusa, own = with_head("medusa").draft, with_head("self").draft
    assert medusa is not None
    assert own is not None
    assert medusa.kv_bytes == own.kv_bytes == 0.0
    assert medusa.max_drafts == 5
    assert medusa.shape.num_weights == pytest.approx(5 * 4096 * (4096 + 128256))


def test_an_mtp_has_all_its_layers_in_memory_and_drafts_by_one_of_them(tmp_path: Path):
    config = {**read_table("shapes")["llama-3-8b"], "num_nextn_predict_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = ModelShape.of(str(tmp_path), "bf16")
    layer_bytes, layer_kv = (target.weight_bytes - 2 * 2 * 128256 * 4096) / 32, target.kv_bytes / 32

    def counted(path: str | None = None, num_layers: int | None = None) -> tuple[float, float]:
        draft = PlannedDraft.of(SpeculationMethod.MTP, path, target, "bf16", num_layers)
        assert draft is not None
        assert draft.shape.read_bytes(1) == pytest.approx(layer_bytes + 2 * 128256 * 4096)
        plan = replace(deployment(draft=None, num_devices=1), target=target, draft=draft)
        assert memory_of(plan).draft_bytes == pytest.approx(draft.whole.num_layers * layer_bytes)
        return draft.whole.num_layers, draft.kv_bytes / layer_kv

    assert counted() == (3, pytest.approx(3))
    assert counted(num_layers=2) == (2, pytest.approx(2))
    assert counted(path="trained-further") == (1, pytest.approx(1))


def test_first_layers_of_the_target_take_no_memory_and_other_bits_do():
    target = ModelShape.of("llama-3-8b", "bf16")
    shared, packed = (PlannedDraft.of(SpeculationMethod.SELF, None, target, dtype, 12) for dtype in ("bf16", "int4"))
    assert shared is not None
    assert packed is not None
    assert (shared.whole.weight_bytes, shared.kv_bytes) == (0.0, 0.0)
    assert shared.shape.read_bytes(1) == pytest.approx(target.read_bytes(1) * 0.42, rel=0.03)
    assert 0.0 < packed.whole.weight_bytes < 0.2 * target.weight_bytes


def test_a_deploy_file_gives_models_kind_and_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = (ROOT / "deploy.yaml").read_text()
    file = tmp_path / "deploy.yaml"
    spec = yaml.safe_load(text)
    args = spec["applications"][0]["args"]
    args["draft"] = {"kind": "eagle3", "path": str(ROOT / "models" / "demo" / "eagle3")}
    args["speculation"] = {"tree": {"num_nodes": 12}}
    file.write_text(yaml.safe_dump(spec))
    assert main(["plan", str(file), "--hardware", "zen5-2core"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "drafts: eagle3, trees of up to 12 nodes" in said
    assert "draft's weights" in said
    assert main(["plan", str(file), "--hardware", "zen5-2core", "--draft-kind", "suffix", "--tree-nodes", "0"]) == 0
    assert "drafts: suffix" in capsys.readouterr().out


def test_a_plan_names_what_of_the_file_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    spec["applications"][0]["args"]["speculation"] = {"mode": "async"}
    (tmp_path / "deploy.yaml").write_text(yaml.safe_dump(spec))
    assert main(["plan", str(tmp_path / "deploy.yaml"), "--hardware", "zen5-2core"]) == 0
    assert "drafts: model (mode async, planned as sync)" in " ".join(capsys.readouterr().out.split())


def test_a_replay_pays_for_its_prompts_and_for_the_drafts_of_every_pass():
    without_prompts = replace(deployment(), prompt_tokens=1)
    assert replayed_speed_up(without_prompts, 1, 1.0, 0.0, 0) == pytest.approx(1.0)
    assert replayed_speed_up(without_prompts, 1, 2.0, 0.0, 0) == pytest.approx(2.0, rel=0.02)
    step_s, plain_s = without_prompts.draft_step_s(1), without_prompts.target_pass(1).seconds
    with_steps = replayed_speed_up(without_prompts, 1, 2.0, 0.0, 4)
    assert with_steps == pytest.approx(2.0 * plain_s / (plain_s + 4 * step_s), rel=0.02)
    assert replayed_speed_up(without_prompts, 256, 2.0, 4.0, 0) < replayed_speed_up(without_prompts, 1, 2.0, 4.0, 0)
    assert replayed_speed_up(replace(deployment(), prompt_tokens=20_000), 1, 2.0, 0.0, 0) < 1.9


def test_replicas_carry_the_rate_and_cost_goes_with_the_price():
    capacity = capacity_of(deployment(), 32, rate=200.0, max_itl_ms=None)
    assert capacity.num_replicas is not None
    assert (capacity.num_replicas - 1) * 0.8 * capacity.requests_per_s < 200.0
    assert capacity.num_replicas * 0.8 * capacity.requests_per_s >= 200.0
    hourly_usd = 4 * DeviceSpec.of("h100").price_usd_per_hour
    assert capacity.usd_per_million_tokens == pytest.approx(hourly_usd / (0.8 * 0.0036 * capacity.output_tokens_per_s))


def test_the_draft_takes_room_for_streams():
    assert memory_of(deployment()).num_streams < memory_of(deployment(draft=None)).num_streams


@pytest.mark.parametrize("name", sorted(read_table("hardware")))
def test_every_device_has_its_source_and_date(name: str):
    device = DeviceSpec.of(name)
    assert device.source
    assert device.date.startswith("20")


def test_a_plan_says_speed_memory_roofline_replicas_and_cost(capsys: pytest.CaptureFixture[str]):
    arguments = ["llama-3-70b", "--draft", "llama-3-8b", "--dtype", "fp8", "--gpus", "2", "--rate", "200"]
    assert main(["plan", *arguments, "--acceptance", "0.8,0.7"]) == 0
    said = capsys.readouterr().out
    for words in ("11% of the target's", "speed-up", "1 verifying", "replicas, each 80% busy", "USD per million"):
        assert words in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-9"], "'llama-9' is not in the table of shapes"),
        (["llama-3-70b", "--hardware", "tpu"], "'tpu' is not in the table of hardware"),
        (["llama-3-70b", "--dtype", "fp3"], "dtype 'fp3' is unknown"),
        (["llama-3-70b"], "raise --gpus"),
        (["llama-3-8b", "--acceptance", "1.4"], "1.4 is not a probability"),
        (["llama-3-8b", "--acceptance", "high"], "has a value that is not a number"),
        (["llama-3-8b", "--streams", "500"], "--streams 500 do not fit"),
        (["llama-3-8b", "--max-itl-ms", "0.1"], "cannot be kept"),
        (["llama-3-8b", "--draft-kind", "hydra"], "--draft-kind 'hydra' is unknown; use one of model"),
        (["llama-3-8b", "--draft-kind", "model"], "a plan with a draft model needs --draft"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_recurrent_layers_whose_states_a_plan_does_not_count_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 64, "conv_L_cache": 3}))
    assert main(["plan", str(tmp_path)]) == 1
    assert "has conv_L_cache, so it has recurrent layers, whose states" in " ".join(capsys.readouterr().err.split())


def test_a_config_without_a_transformer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    assert main(["plan", str(tmp_path)]) == 1
    assert "has no 'num_hidden_layers'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[")
    assert main(["plan", str(tmp_path)]) == 1
    assert "config.json' cannot be read" in capsys.readouterr().err


LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_size", "x", "hidden_size 'x'"),
        ("hidden_size", 0, "hidden_size 0"),
        ("hidden_size", 64.0, "hidden_size 64.0"),
        ("hidden_size", math.inf, "hidden_size inf"),
        ("num_attention_heads", 0, "num_attention_heads 0"),
        ("num_attention_heads", 128, "no 'head_dim'"),
        ("num_hidden_layers", None, "num_hidden_layers None"),
        ("vocab_size", -1, "vocab_size -1"),
        ("vocab_size", 10**30, "vocab_size 1000000000000000000000000000000"),
        ("num_key_value_heads", True, "num_key_value_heads True"),
        ("head_dim", [16], "head_dim [16]"),
        ("text_config", [1], "text_config [1]"),
        ("num_experts_per_tok", 8, "num_experts_per_tok 8 of 1 experts"),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(
    tmp_path: Path, key: str, value: object, reason: str, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, key: value}))
    assert main(["plan", str(file)]) == 1
    assert f"the config of {str(file)!r} has {reason}" in capsys.readouterr().err


def test_sizes_that_are_left_out_follow_from_others(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = ModelShape.of(str(tmp_path), "bf16")
    assert (shape.num_kv_heads, shape.head_dim, shape.num_experts, shape.mlp_size) == (4, 16, 1, 128)
    unset = {"num_key_value_heads": None, "head_dim": None, "num_experts": 0, "moe_intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **unset, "text_config": None}))
    assert ModelShape.of(str(tmp_path), "bf16") == shape
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    assert ModelShape.of(str(tmp_path), "bf16") == shape


@pytest.mark.parametrize("text", ["[" * 100_000, "[]"])
def test_a_config_that_is_no_mapping_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", str(tmp_path)]) == 1
    assert "fix it, or fetch it again" in capsys.readouterr().err


def test_a_model_whose_name_is_no_path_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "x" * 5000]) == 1
    assert "is not in the table of shapes" in capsys.readouterr().err


PADDED = {
    "hidden_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 24_576,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("streams", "drafts", "measured_ms"), [(1, 0, 54), (1, 4, 52), (8, 0, 70), (8, 32, 104), (16, 0, 85)]
)
def test_passes_of_the_padded_model_are_within_a_fifth_of_the_measured(
    tmp_path: Path, streams: int, drafts: int, measured_ms: float
):
    """The figures are those that the device table was set by, 1,024 tokens of context."""
    (tmp_path / "config.json").write_text(json.dumps(PADDED))
    target = ModelShape.of(str(tmp_path), "bf16")
    plan = ReplicaPlan(target, None, DeviceSpec.of("xeon-amx-2core"), 1, (0.5,), prompt_tokens=1024, output_tokens=1)
    assert 1000 * plan.target_pass(streams, drafts).seconds == pytest.approx(measured_ms, rel=0.2)


@pytest.mark.parametrize(
    ("model", "streams", "drafts", "measured_ms"),
    [
        ("smollm2-135m", 1, 0, 22.6),
        ("smollm2-135m", 1, 4, 43.1),
        ("smollm2-135m", 8, 0, 57.4),
        ("smollm2-135m", 8, 32, 198),
        ("models/demo/target", 1, 0, 2.6),
        ("models/demo/target", 1, 4, 4.2),
    ],
)
def test_passes_of_one_thread_on_avx2_are_within_a_fifth_of_the_measured(
    model: str, streams: int, drafts: int, measured_ms: float
):
    """The device table was set by these figures, at 100 tokens of context; the device is half of the table's."""
    target = ModelShape.of(str(ROOT / model) if "/" in model else model, "bf16")
    both = DeviceSpec.of("zen3-2core")
    one = replace(both, bandwidth_gb_s=both.bandwidth_gb_s / 2, flops_use=both.flops_use / 2)
    plan = ReplicaPlan(target, None, one, 1, (0.5,), prompt_tokens=100, output_tokens=1)
    assert 1000 * plan.target_pass(streams, drafts).seconds == pytest.approx(measured_ms, rel=0.2)
