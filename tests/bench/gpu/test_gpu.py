"""The GPU bench without a GPU: its floors and tables, and a whole run on a tiny pair."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
import torch

from bench.gpu import look, serve
from bench.gpu.__main__ import main
from bench.gpu.floor import DeviceSpeed, ModelCost, most_tokens
from bench.gpu.table import EngineLine, GpuResults, KernelLine, Missing
from bench.wide_fixture import LLAMA_3_1B, LLAMA_3_8B

ROOT = Path(__file__).parents[3]
GIVEN = ("torch", "transformers", "pytest")  # on the machine with the card, with all that they need
COST = ModelCost(LLAMA_3_8B, itemsize=2, kv_itemsize=2)
H100 = DeviceSpeed(bytes_per_s=3.0e12, flops_per_s=7.0e14)


def test_the_floor_of_a_plain_step_is_its_bytes_and_of_a_large_one_its_products() -> None:
    assert 7.4e9 < COST.num_weights < 7.6e9  # of Llama-3-8B's 8.03 B, less the embedding's 0.53
    assert COST.kv_bytes_per_token == 128 << 10
    plain = COST.floor_s(H100, num_sequences=1, num_rows=1, context=1024)
    assert plain == pytest.approx((COST.weight_bytes + 1025 * (128 << 10)) / 3.0e12)
    assert COST.floor_s(H100, 1, 8, 1024) < 1.001 * plain + 1e-6
    large = COST.floor_s(H100, 128, 8, 1024)
    assert large == pytest.approx(COST.step_flops(128, 8, 1024) / 7.0e14)
    assert large > COST.step_bytes(128, 8, 1024) / 3.0e12


def test_pools_are_sized_by_what_both_models_leave() -> None:
    draft = ModelCost(LLAMA_3_1B, itemsize=2, kv_itemsize=2)
    free = COST.weight_bytes + draft.weight_bytes + 1e9
    assert most_tokens(free, COST, draft, 0.0) == int(1e9 // ((128 + 32) << 10))
    assert most_tokens(free, COST, draft, 2e9) == 0
    float8 = ModelCost(LLAMA_3_8B, itemsize=2, kv_itemsize=1)
    assert most_tokens(free, float8, draft, 0.0) == int(1e9 // ((64 + 32) << 10))


def test_every_line_is_on_disk_at_once_and_gaps_are_named(tmp_path: Path) -> None:
    results = GpuResults(tmp_path / "gpu.json")
    assert results.text().count("not measured") == 2
    results.add(EngineLine("plain", 1, 1024, 200.0, 1.0, 5.0, 4.0, 4.8, 0.0))
    results.add(EngineLine("sync", 1, 1024, 500.0, 3.0, 8.0, 4.0, 5.0, 2.0))
    results.add(KernelLine("bfloat16", 8, 8192, 1, 2700.0, 0.9))
    results.add(Missing("plain", "batch 128, context 8192", "its KV does not fit on this device"))
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert [line["kind"] for line in saved["lines"]] == ["EngineLine", "EngineLine", "KernelLine", "Missing"]
    text = (tmp_path / "gpu.md").read_text()
    assert "| plain | 1 | 1024 | 200 | 1.00 | 1.00 | 5.00 | 4.00 | 1.25 | 0.00 | 4% |" in text
    assert "| sync | 1 | 1024 | 500 | 2.50 | 3.00 | 8.00 | 4.00 | 2.00 | 2.00 | 12% |" in text
    assert "| bfloat16 | 8 | 8192 | 1 | 2,700 | 90% |" in text
    assert "- plain, batch 128, context 8192: its KV does not fit on this device" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path)])
    assert "no GPU here: not measured" in capsys.readouterr().out


def test_an_8b_model_on_the_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--out", str(tmp_path)])


def test_a_float8_pool_on_the_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--smoke", "--kv-dtype", "fp8", "--out", str(tmp_path)])


def test_the_whole_bench_runs_on_a_tiny_pair(tmp_path: Path) -> None:
    """A widened demo pair, a draft in its own process, plain decoding and trees."""
    main(["--device", "cpu", "--smoke", "--sections", "plain", "tree", "waiting", "--out", str(tmp_path)])
    lines = json.loads((tmp_path / "gpu.json").read_text())["lines"]
    assert [(line["kind"], line.get("mode"), line.get("batch")) for line in lines] == [
        ("EngineLine", "plain", 1),
        ("EngineLine", "plain", 2),
        ("EngineLine", "tree", 1),
        ("EngineLine", "tree", 2),
        ("EngineLine", "waiting", 1),
        ("EngineLine", "waiting", 2),
    ]
    assert all(line["tokens_per_s"] > 0 and line["step_ms"] > 0 and line["device_ms"] > 0 for line in lines)
    assert lines[2]["tokens_per_pass"] > 1.2  # the draft is the demo's, and as often right


def test_a_look_compares_texts_before_all_else_and_by_one_engine(tmp_path: Path) -> None:
    assert next(iter(look.PARTS)) == "texts"
    look.main(["--device", "cpu", "--smoke", "--parts", "texts", "syncs", "sampling", "drafts", "--out", str(tmp_path)])
    lines = json.loads((tmp_path / "look.json").read_text())
    texts = [line for line in lines if line["part"] == "texts" and "mode" in line]
    assert [line["mode"] for line in texts] == list(look.MODES)
    assert all(line["equal"] == line["tokens"] > 0 for line in texts)  # float32, where no rounding parts them
    drafts = [line for line in lines if line["part"] == "drafts" and "mode" in line]
    assert [line["equal"] for line in drafts] == [1, 1, 1, 8, 8, 8]
    assert not [line for line in lines if "failed" in line]


def test_a_pair_is_served_without_ray_and_its_texts_are_those_without_drafts(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--smoke", "--streams", "2", "--max-tokens", "8", "--out", str(tmp_path)]
    serve.main(arguments)
    plain, drafted = json.loads((tmp_path / "serve.json").read_text())
    assert (plain["streams"], plain["drafts"], drafted["drafts"], drafted["equal_texts"]) == (2, False, True, 2)
    assert plain["tokens_per_s"] > 0
    assert drafted["tokens_per_s"] > 0


def test_a_served_pair_imports_nothing_that_the_kit_lacks(tmp_path: Path) -> None:
    """A GPU machine may have no package registry, so the kit must hold every file."""
    kit = re.search(r"^GPU_KIT := (.*?)\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)
    assert kit is not None
    names = {*kit[1].replace("\\", " ").split(), *_with_needs(GIVEN)}
    for path in {path for name in names for path in _top_level(name)}:
        (tmp_path / path.name).symlink_to(path)
    program = f"import sys; sys.path += [{str(ROOT)!r}, {str(tmp_path)!r}]; import bench.gpu.serve, bench.gpu.look"
    ended = subprocess.run([sys.executable, "-S", "-I", "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_kernels_compile_to_the_registers_and_memory_of_the_table(tmp_path: Path) -> None:
    """For an H100 and H200; `python -m bench.gpu.compiled --check` compares the other cards. It takes 25 s."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    version = importlib.metadata.version("triton")
    lines = (ROOT / "bench/gpu/compiled.txt").read_text().splitlines()
    if not any(line.split("|")[1].strip() == version for line in lines):
        pytest.skip(f"bench/gpu/compiled.txt has no lines of Triton {version}: run `python -m bench.gpu.compiled`")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench.gpu.compiled", "--check", "90"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def _with_needs(names: Sequence[str]) -> set[str]:
    """Return the names of these packages and of all that they need."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        waiting += [re.split(r"[ ;<>=!~\[(]", need)[0] for need in needs if "extra ==" not in need]
    return found


def _top_level(name: str) -> set[Path]:
    """Return the files and folders of a package that lie in site-packages."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return set()
    site = Path(str(distribution(name).locate_file("")))
    return {site / file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
