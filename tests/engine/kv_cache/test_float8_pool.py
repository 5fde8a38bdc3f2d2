"""A float8 pool saturates, stores each token independently, moves as bytes, and serves engines by our kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.backend import check_kv_kind
from engine.attention.torch_attention import TorchAttention
from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    KVDtype,
    ModelConfig,
    SpeculationConfig,
)
from engine.engine_core.loading import load_engine
from engine.kv_cache.pool import KVCache, LayerShape, ShardedKVLayout, block_bytes, loaded, stored
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.attention_fixtures import DEVICE
from tests.engine.fixtures.heads.heads_fixtures import write_llama_with_mtp

SHAPES = [LayerShape(num_kv_heads=2, key_dim=24, value_dim=8)]
FP8 = KVDtype.FP8
needs_triton = pytest.mark.usefixtures("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond a span divide by zero


@pytest.fixture
def triton() -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")


def restored(heads: Tensor) -> Tensor:
    return loaded(FP8, stored(FP8, heads), heads.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_is_off_by_a_sixteenth_at_most_and_saturates_beyond_the_range(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = (torch.randn(50, 3, 64) * torch.logspace(-3, 2, 50)[:, None, None]).to(dtype)
    errors = (restored(heads).float() - heads.float()).abs()
    assert (errors <= (heads.float().abs() / 16).clamp(min=2**-10)).all()
    beyond = torch.tensor([449.0, 6e4], dtype=dtype)
    assert restored(beyond).tolist() == [448.0] * 2
    assert restored(-beyond).tolist() == [-448.0] * 2


@pytest.mark.parametrize("kind", list(KVDtype))
@pytest.mark.parametrize("fault", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_finite_when_it_is_read(kind: KVDtype, fault: float) -> None:
    heads = torch.ones(3, 2, 16)
    heads[1, 0, 5] = fault
    is_finite = loaded(kind, stored(kind, heads), heads.dtype).isfinite()
    assert not is_finite[1, 0, 5]
    assert is_finite[[0, 2]].all()


def test_stored_float8_heads_depend_on_the_token_alone() -> None:
    heads = torch.randn(40, 2, 64)
    assert torch.equal(stored(FP8, heads), torch.cat([stored(FP8, token[None]) for token in heads]))


def new_cache(dtype: torch.dtype = torch.float32, num_kv_heads: int = 2, kind: KVDtype = FP8) -> KVCache:
    shapes = [LayerShape(num_kv_heads, shape.key_dim, shape.value_dim) for shape in SHAPES]
    return KVCache(shapes, 6, 4, dtype=dtype, device=DEVICE, kind=kind)


def test_a_float8_pool_takes_a_byte_for_each_number() -> None:
    cache = new_cache(torch.bfloat16)
    num_bytes = sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert num_bytes == 6 * block_bytes(SHAPES, 4, torch.bfloat16, FP8) == 3 * block_bytes(SHAPES, 4, torch.bfloat16)


def random_kv() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 2, 24).to(DEVICE), torch.randn(8, 2, 8).to(DEVICE)


def test_blocks_keep_their_numbers_when_they_are_moved_copied_and_sent() -> None:
    cache, other = new_cache(), new_cache()
    key, value = random_kv()
    cache.write(0, slice(0, 8), key, value)
    cache.copy_blocks([1], [4])
    cache.move([17, 18], [20, 21])
    other.import_blocks([3], cache.export_blocks([5]))
    assert torch.equal(other.export_blocks([3]), cache.export_blocks([5]))
    keys, values = other.read_slots(0, torch.tensor([12, 13], device=DEVICE))
    assert torch.equal(keys, restored(key[5:7]))
    assert torch.equal(values, restored(value[5:7]))
    assert torch.equal(other.keys[0].flatten(0, 1)[12:14].float(), keys)  # the kernel's view


@pytest.mark.parametrize("kind", list(KVDtype))
def test_blocks_of_ranks_are_joined_and_sharded_by_heads(kind: KVDtype) -> None:
    whole, halves = new_cache(kind=kind), [new_cache(num_kv_heads=1, kind=kind) for _ in range(2)]
    key, value = random_kv()
    whole.write(0, slice(0, 8), key, value)
    for head, half in enumerate(halves):
        half.write(0, slice(0, 8), key[:, head : head + 1], value[:, head : head + 1])
    of_rank = [LayerShape(1, shape.key_dim, shape.value_dim) for shape in SHAPES]
    heads = ShardedKVLayout(SHAPES, of_rank, 4, torch.float32, 2, kind)
    blocks, parts = whole.export_blocks([0, 1]), [half.export_blocks([0, 1]) for half in halves]
    assert torch.equal(heads.join(parts), blocks)
    assert all(torch.equal(heads.of_rank(blocks, index), part) for index, part in enumerate(parts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "target"
    write_llama_with_mtp(path)
    return path


def load(folder: Path, dtype: str, attention: str = "triton", graphs: GraphConfig | None = None) -> ModelRunner:
    model = ModelConfig(
        str(folder), "float32", DEVICE.type, attention=attention, graphs=graphs or GraphConfig(GraphKind.OFF)
    )
    return ModelRunner(model, CacheConfig(8, num_blocks=16, dtype=dtype))


TEXT = list(range(1, 21))
TABLE = [7, 3, 9]


@needs_triton
def test_logits_are_near_those_of_the_full_pool_and_not_equal(folder: Path) -> None:
    full, float8 = (load(folder, kind).forward([Span(TEXT, 0, TABLE, 20)]) for kind in ("auto", "fp8"))
    assert 0 < float((float8 - full).norm() / full.norm()) < 0.1


@needs_triton
def test_a_block_that_was_sent_is_the_same_to_the_bit_and_read_alike(folder: Path) -> None:
    ours, theirs = load(folder, "fp8"), load(folder, "fp8")
    assert ours.kv_layout.difference(theirs.kv_layout) is None
    ours.forward([Span(TEXT[:16], 0, TABLE, 0)])
    blocks = ours.export_blocks(TABLE[:2])
    assert blocks.shape == (2, ours.bytes_per_block)
    theirs.import_blocks([2, 11], blocks)
    assert torch.equal(theirs.export_blocks([2, 11]), blocks)
    there = theirs.forward([Span(TEXT[16:], 16, [2, 11, 4], 4)])
    assert torch.equal(there, ours.forward([Span(TEXT[16:], 16, TABLE, 4)]))


@needs_triton
def test_recorded_passes_write_and_read_a_float8_pool(folder: Path) -> None:
    """Padded to a bucket, by the launches that a GPU replays."""
    kind = GraphKind.AUTO if DEVICE.type == "cuda" else GraphKind.EAGER
    graphs = GraphConfig(kind, batches=(2,), row_counts=(4,))
    plain, padded = load(folder, "fp8"), load(folder, "fp8", graphs=graphs)
    for span in (Span(TEXT, 0, TABLE, 0), Span([5, 6, 7], 20, TABLE, 3)):
        expected = plain.forward([span])
        torch.testing.assert_close(padded.forward([span]), expected, rtol=0, atol=1e-4)
    assert torch.equal(padded.export_blocks(TABLE), plain.export_blocks(TABLE))


@dataclass(frozen=True, slots=True)
class Way:
    """How drafts are made."""

    method: SpeculationMethod = SpeculationMethod.NONE
    head: HeadConfig | None = None
    tree_nodes: int = 0


def texts(folder: Path, way: Way) -> tuple[dict[str, list[int]], int]:
    """The tokens that two requests get, one greedy and one sampled, and how many drafts were accepted."""
    config = EngineConfig(
        ModelConfig(str(folder), "float32", DEVICE.type, attention="triton", graphs=GraphConfig(GraphKind.OFF)),
        CacheConfig(8, num_blocks=64, dtype="fp8"),
        speculation=SpeculationConfig(3, methods=(way.method,), tree_nodes=way.tree_nodes),
        head=way.head,
    )
    core = load_engine(config)
    for index in range(2):
        sampling = SamplingParams(seed=index, temperature=0.9 * index, max_tokens=10)
        core.add(GenerateRequest(str(index), tuple(range(1 + index, 12)), sampling))
    text: dict[str, list[int]] = {str(index): [] for index in range(2)}
    while core.has_work:
        for chunk in core.step():
            text[chunk.request_id] += chunk.token_ids
        core.scheduler.check_integrity()
    return text, core.stats().drafts.num_accepted_tokens


@needs_triton
def test_speculation_changes_no_token_with_a_float8_pool(folder: Path) -> None:
    """Drafts of an MTP layer, whose KV shares the pool, as chains and as compacted trees."""
    plain, _ = texts(folder, Way())
    assert all(plain.values())
    for tree_nodes in (0, 6):
        drafted, num_accepted = texts(folder, Way(SpeculationMethod.MTP, HeadConfig(HeadKind.MTP), tree_nodes))
        assert drafted == plain
        assert num_accepted > 0


@needs_triton
def test_engines_with_different_pools_exchange_no_blocks(folder: Path) -> None:
    float8 = load(folder, "fp8").kv_layout
    difference = float8.difference(load(folder, "auto").kv_layout)
    assert difference == "dtype is torch.float32 as fp8 here and torch.float32 there"
    if DEVICE.type == "cpu":
        difference = float8.difference(load(folder, "int8", "torch").kv_layout)
        assert difference == "dtype is torch.float32 as fp8 here and torch.float32 as int8 there"


def test_attention_in_torch_refuses_a_float8_pool_and_names_what_fits(folder: Path) -> None:
    model = ModelConfig(str(folder), "float32", "cpu", attention="torch")
    with pytest.raises(ConfigError, match=r"cache.dtype is 'fp8', .*runs on cpu with torch attention; set it to int8"):
        ModelRunner(model, CacheConfig(num_blocks=4, dtype="fp8"))
    with pytest.raises(
        ConfigError, match=r"on cuda with torch attention; set it to auto, or target\.attention to auto"
    ):
        check_kv_kind(FP8, TorchAttention, torch.device("cuda"))


@needs_triton
def test_a_gpu_without_float8_refuses_a_float8_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention.triton_attention import TritonAttention

    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9, and A100 has 8\.0; set it to auto"):
        check_kv_kind(FP8, TritonAttention, torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 9))
    check_kv_kind(FP8, TritonAttention, torch.device("cuda"))
