"""A second start maps the packed weights that the first one kept, and makes them again where anything differs."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.span import Span
from engine.config import CacheConfig, HeadConfig, HeadKind, ModelConfig, ModelDtype, Quantization
from engine.model import paged_model
from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear import cache_folder, packed_file, quantized_linear
from engine.model.linear.native_quantized import PackedPart, packed_part
from engine.model.loader import model_version
from engine.model.runner import served_weights
from engine.model.runner.model_runner import ModelRunner
from engine.native.library import Instructions, native_library
from tests.engine.fixtures.families import SERVED, write_family

pytestmark = pytest.mark.skipif(native_library(Instructions.AVX2) is None, reason="our kernels do not run here")
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of entries; the processor's disk may be fuller than a user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "1")
    monkeypatch.setattr(packed_file, "LEAST_FREE", 0)
    return tmp_path / "cache" / "outrider" / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path / "model", "llama")


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that were packed."""
    found: list[Tensor] = []

    def noted(weight: QuantizedWeight) -> PackedPart:
        found.append(weight.numbers)
        return packed_part(weight)

    monkeypatch.setattr(quantized_linear, "packed_part", noted)
    return found


def written(folder: Path, family: str) -> Path:
    write_family(folder, SERVED[family]()).bfloat16().save_pretrained(folder)
    return folder


def started(
    model: Path,
    quantization: str = "int4",
    head: HeadConfig | None = None,
    *,
    repeats_checks: bool = False,
    deterministic: bool = False,
) -> ModelRunner:
    """A runner whose weights are kept, or known not to be."""
    runner = ModelRunner(
        ModelConfig(
            str(model),
            ModelDtype.FLOAT32,
            "cpu",
            quantization=Quantization(quantization),
            deterministic=deterministic,
        ),
        CacheConfig(num_blocks=4),
        head=head,
        repeats_checks=repeats_checks,
    )
    for thread in threading.enumerate():
        if thread.name == "packed-weights":
            thread.join()
    return runner


def logits_of(runner: ModelRunner) -> Tensor:
    return runner.forward([Span(TEXT, 0, [0], len(TEXT))]).clone()


def file_of(cache: Path) -> Path:
    (file,) = cache.glob("*/weights")
    return file


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "gpt_oss"])
def test_a_second_start_packs_nothing_and_computes_the_same(
    tmp_path: Path, packings: list[Tensor], family: str, quantization: str
) -> None:
    folder = written(tmp_path / "model", family)
    first = logits_of(started(folder, quantization))
    packings.clear()
    assert torch.equal(logits_of(started(folder, quantization)), first)
    assert packings == []


def test_packed_weights_are_mapped_from_one_shared_file(model: Path, cache: Path) -> None:
    kept = [started(model), started(model)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert any(" r--s " in line and str(file_of(cache)) in line for line in maps)
    assert kept


def test_a_second_start_does_not_read_the_checkpoints_layers(model: Path) -> None:
    first = logits_of(started(model))
    file = model / "model.safetensors"
    times, contents = file.stat(), bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(contents[:8], "little")
    gate = json.loads(contents[8:begin])["model.layers.0.mlp.gate_proj.weight"]["data_offsets"]
    contents[begin + gate[0] : begin + gate[1]] = b"\xff" * (gate[1] - gate[0])  # NaN
    digest = model_version(str(model))
    file.write_bytes(contents)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.MonkeyPatch.context() as patch:  # the cache takes the file for the old one
        patch.setattr(served_weights, "model_version", lambda _: digest)
        assert torch.equal(logits_of(started(model)), first)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path, place: int) -> None:
    contents = bytearray(file.read_bytes())
    contents[place] ^= 1
    file.write_bytes(contents)


def change(checkpoint: Path) -> None:
    """Set some weights to zero."""
    contents = checkpoint.read_bytes()
    middle = len(contents) // 2
    checkpoint.write_bytes(contents[:middle] + bytes(64) + contents[middle + 64 :])


def replace_by_noise(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 100)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "empty": empty,
    "first byte": lambda file: flip(file, 0),
    "a byte of an array": lambda file: flip(file, 100),
    "a byte of the index": lambda file: flip(file, file.stat().st_size - 200),
    "a byte of the end": lambda file: flip(file, -1),
    "noise": replace_by_noise,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_made_anew(
    model: Path, cache: Path, packings: list[Tensor], damage: Callable[[Path], None]
) -> None:
    first = logits_of(started(model))
    whole = file_of(cache).read_bytes()
    damage(file_of(cache))
    packings.clear()
    assert torch.equal(logits_of(started(model)), first)
    assert packings
    assert file_of(cache).read_bytes() == whole


def test_a_file_of_other_weights_is_made_anew(tmp_path: Path, model: Path, cache: Path) -> None:
    first = logits_of(started(model))
    own = file_of(cache)
    other = written(tmp_path / "other", "llama")
    change(other / "model.safetensors")
    started(other)
    (foreign,) = set(cache.glob("*/weights")) - {own}
    shutil.copy(foreign, own)
    assert torch.equal(logits_of(started(model)), first)
    assert own.read_bytes() != foreign.read_bytes()


def test_a_changed_checkpoint_is_not_served_from_the_cache(model: Path) -> None:
    first = logits_of(started(model))
    file = model / "model.safetensors"
    times, contents = file.stat(), file.read_bytes()
    change(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = logits_of(started(model))
    assert not torch.equal(changed, first)
    file.write_bytes(contents)
    assert torch.equal(logits_of(started(model)), first)


@pytest.mark.parametrize("part", ["native_digest", "_code_digest", "native_instructions"])
def test_other_kernels_or_code_pack_anew(
    model: Path, packings: list[Tensor], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    started(model)
    packings.clear()
    other = Instructions.AMX if part == "native_instructions" else "another"
    monkeypatch.setattr(served_weights, part, lambda: other)
    started(model)
    assert packings


def test_a_deterministic_model_has_products_of_its_own(model: Path, packings: list[Tensor]) -> None:
    """Other kernels may compute them."""
    started(model)
    packings.clear()
    started(model, deterministic=True)
    assert packings


def test_the_agreement_check_is_repeated_only_on_demand(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, checks = paged_model.PagedModel._check_agreement, list[object]()

    def counted(*arguments: Any, **options: Any) -> None:
        checks.append(arguments)
        check(*arguments, **options)

    monkeypatch.setattr(paged_model.PagedModel, "_check_agreement", counted)
    started(model)
    assert len(checks) == 1
    started(model)
    assert len(checks) == 1
    started(model, repeats_checks=True)
    assert len(checks) == 2
    monkeypatch.setattr(paged_model, "processor_name", lambda: "another processor")
    started(model)
    assert len(checks) == 3


def test_a_start_that_fails_keeps_nothing(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no agreement")

    with monkeypatch.context() as patch:
        patch.setattr(paged_model.PagedModel, "_check_agreement", refuse)
        with pytest.raises(RuntimeError, match="no agreement"):
            started(model)
    assert not [*cache.glob("*/weights*")]
    started(model)
    assert file_of(cache)


def test_a_draft_of_the_targets_weights_is_kept_too(model: Path, packings: list[Tensor]) -> None:
    head = HeadConfig(HeadKind.SELF, quantization=Quantization.INT4)
    started(model, "none", head)
    packings.clear()
    runner = started(model, "none", head)
    assert runner.self_draft is not None
    assert packings == []


def _start(model: str, results: object) -> None:
    results.put(logits_of(started(Path(model))).tolist())  # type: ignore[attr-defined]


def test_of_two_processes_that_start_at_once_one_writes_and_both_work(model: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_start, args=(str(model), results)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = (results.get(timeout=200) for _ in processes)
    for process in processes:
        process.join()
    assert first == second
    assert torch.equal(torch.tensor(first), logits_of(started(model)))
    assert not [*cache.glob("*/weights.part")]


def test_files_and_folders_are_the_users_own(model: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        started(model)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (cache, *cache.iterdir())} == {0o700}
    assert {file.stat().st_mode & 0o777 for file in cache.glob("*/*")} == {0o600}


def test_a_full_disk_serves_without_the_cache(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits_of(started(model))
    shutil.rmtree(cache)
    monkeypatch.setattr(packed_file, "LEAST_FREE", 1 << 60)
    assert torch.equal(logits_of(started(model)), first)
    assert [record.message for record in caplog.records if "not kept" in record.message] == [
        f"packed weights are not kept: the disk of {str(next(cache.iterdir()))!r} is nearly full"
    ]
    assert not [*cache.glob("*/weights*")]


def test_a_folder_that_cannot_be_made_serves_without_the_cache(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    started(model)
    assert len([record for record in caplog.records if "not kept" in record.message]) == 1


def test_a_user_without_a_home_folder_serves_without_the_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without an entry in passwd
    started(model)
    (said,) = [record.message for record in caplog.records if "not kept" in record.message]
    assert said.endswith("no home folder for a cache; set XDG_CACHE_HOME to the path of a folder")


def test_the_entries_that_were_not_used_for_longest_leave_first(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quantization in ("int4", "int8"):
        started(model, quantization)
    for age, quantization in enumerate(("int8", "int4")):
        entry = next(each for each in cache_folder.packed_entries() if each.quantization == quantization)
        for file in entry.folder.iterdir():
            os.utime(file, (age, age))
    sizes = sum(entry.num_bytes for entry in cache_folder.packed_entries())
    monkeypatch.setattr(cache_folder, "max_bytes", lambda: sizes + 4096)
    started(model, "none")
    assert [entry.quantization for entry in cache_folder.packed_entries()] == ["none", "int4"]


def test_a_bound_of_zero_keeps_nothing(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "0")
    started(model)
    assert not cache.exists()
