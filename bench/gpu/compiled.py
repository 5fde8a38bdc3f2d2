"""Compiles every Triton kernel for GPUs that need not be there, and holds the results to a committed table.

    python -m bench.gpu.compiled                  compile for all architectures, and rewrite this Triton's lines
    python -m bench.gpu.compiled --check 90       print the cases whose numbers differ from the table's; status 1 if any

A line of `compiled.txt` has a case, the Triton that compiled it, and for each architecture registers of a thread, bytes
of shared memory and bytes that spill. A diff of it is to be read: more registers or memory leave room for fewer
programs on a processor. It needs no interpreter: TRITON_INTERPRET is 0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.attention.triton_kernel import attend_tiles, merge_splits
from engine.attention.triton_tiles import HeadShape, choose_tiling
from engine.kv_cache.triton_store import store_heads
from engine.model.decoders.triton_rows import norm_rows, rotate_heads
from engine.model.linear import triton_few_bits, triton_product
from engine.model.linear.triton_product import gate_rows
from engine.recurrent.triton_mixer import CHANNELS, convolve_rows, gate_and_norm, scan_heads, state_block
from engine.sampling.triton_draw import draw_blocks, edit_blocks, pick_tokens
from engine.sampling.triton_nucleus import draw_nuclei, find_thresholds

TABLE = Path(__file__).with_name("compiled.txt")
_MOST_SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a program
ARCHITECTURES = tuple(_MOST_SHARED)
_HEADS = HeadShape(num_kv_heads=8, group_size=4, key_dim=128, value_dim=128)
_BFLOAT16 = triton.language.bfloat16
_TYPES = {
    **dict.fromkeys(("out", "query", "x", "weight", "bias", "normed", "total", "rows", "delta"), "*bf16"),
    **dict.fromkeys(("rotated", "heads", "table", "gated", "joined", "keys", "values", "key", "value"), "*bf16"),
    **dict.fromkeys(("block_tables", "tiles", "merges", "positions", "spans", "ids", "counts", "places"), "*i32"),
    **dict.fromkeys(("sinks", "key_scales", "value_scales", "sums", "peaks", "totals", "factors", "biases"), "*fp32"),
    **dict.fromkeys(("thresholds", "top_p", "log_min_p"), "*fp32"),
    **dict.fromkeys(("ancestors", "slots", "tokens", "drawn"), "*i64"),
    **dict.fromkeys(("scale", "epsilon"), "fp32"),
    **dict.fromkeys(("scales", "zeros", "bases"), "*fp16"),
    "numbers": "*u8",
}
_NO_OPTIONS = dict.fromkeys(("ancestors", "positions", "sinks", "key_scales", "value_scales"))
_NO_EDITS = dict.fromkeys(("factors", "spans", "ids", "biases", "counts"))
_SAMPLED = {"scores": "*fp32", "keys": "*i64", "has_noise": "*i8"}
_EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with the types, constants and compiler's options of one use."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    types: dict[str, str]

    def compiled(self, architecture: int) -> Any:
        """Return Triton's result for compute capability `architecture` / 10."""
        names = self.kernel.arg_names
        known = {**_TYPES, **self.types}
        signature = {name: "constexpr" if name in self.constants else known.get(name, "i32") for name in names}
        aligned = [
            (index,) for index, name in enumerate(names) if signature[name].startswith("*") or name.endswith("stride")
        ]
        source = ASTSource(
            fn=self.kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={at: [["tt.divisibility", 16]] for at in aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=self.options)

    def cell(self, architecture: int) -> str:
        """Return "registers/shared/spilled", as the table has it; "-" where the engine refuses float8."""
        if architecture < 89 and ("*fp8e4nv" in self.types.values() or "float8" in self.name):
            return "-"
        compiled = self.compiled(architecture)
        shared = compiled.metadata.shared
        assert shared <= _MOST_SHARED[architecture], f"{self.name} takes {shared} bytes of sm_{architecture}'s memory"
        if self.kernel is edit_blocks:  # a product and a sum are rounded apart
            assert "fma" not in compiled.asm["ptx"]
            assert "div.rn" in compiled.asm["ptx"]
        with TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.ptx"
            file.write_text(compiled.asm["ptx"])
            target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
            assert target is not None, "PTX names its target"
            command = [get_ptxas(architecture).path, "-v", f"--gpu-name={target[1]}", file, "-o", f"{file}.cubin"]
            fusion = [] if self.options.get("enable_fp_fusion", True) else ["--fmad=false"]
            report = subprocess.run([*command, *fusion], check=True, capture_output=True, text=True).stderr
        registers = re.search(r"Used (\d+) registers", report)
        spilled = re.search(r"(\d+) bytes spill stores", report)
        assert registers is not None, report
        return f"{registers[1]}/{shared}/{spilled[1] if spilled else 0}"


def _case(name: str, kernel: Any, constants: dict[str, Any], types: dict[str, str] = {}, **options: Any) -> Case:  # noqa: B006
    return Case(name, kernel, constants, options, types)


def _attention(name: str, num_rows: int, stored: str, constants: dict[str, Any]) -> Case:
    tiling = choose_tiling(num_rows, _HEADS, itemsize=2)
    sizes = {
        **{"NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFTCAP": 0.0},
        **dict.fromkeys(("KEY_DIM", "VALUE_DIM", "KEY_WIDTH", "VALUE_WIDTH"), 128),
        **{"OPERAND": _BFLOAT16, "IS_BATCH_INVARIANT": False, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n},
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return _case(f"attend {name}", attend_tiles, {**sizes, **constants}, {"keys": stored, "values": stored}, **options)


def _products() -> Iterator[Case]:
    tiles = {"low": (triton_product._LOW, triton_few_bits._LOW), "tall": (triton_product._TALL, triton_few_bits._TALL)}
    forms = {
        "float8": (triton_few_bits.Kind.FLOAT8, 128, {"scales": "*fp32"}, {"zeros": None, "bases": None}),
        "int8": (triton_few_bits.Kind.INT8, 64, {"numbers": "*i8"}, {"zeros": None, "bases": None}),
        "int4": (triton_few_bits.Kind.INT4, 128, {}, {"zeros": None, "bases": None}),
        "int4 with zeros": (triton_few_bits.Kind.INT4, 128, {}, {"bases": None}),
        "our int4": (triton_few_bits.Kind.INT4, 32, {}, {"zeros": None}),
    }
    for height, (plain, few) in tiles.items():
        options: dict[str, Any] = {"num_warps": plain.num_warps, "num_stages": plain.num_stages}
        sizes = {"BLOCK_M": plain.num_rows, "BLOCK_N": plain.num_outputs, "BLOCK_K": plain.num_inputs}
        constants = {**sizes, "OPERAND": _BFLOAT16, "bias": None}
        yield _case(f"multiply bfloat16 {height}", triton_product.multiply, constants, **options)
        options = {"num_warps": few.num_warps, "num_stages": few.num_stages}
        for form, (kind, step, types, absent) in forms.items():
            sizes = {"BLOCK_M": few.num_rows, "BLOCK_N": few.num_outputs, "BLOCK_K": step, "KIND": kind.value}
            constants = {**sizes, **absent, "OPERAND": _BFLOAT16, "bias": None}
            yield _case(f"multiply {form} {height}", triton_few_bits.multiply_few_bits, constants, types, **options)
    num_outputs, num_warps = triton_few_bits._UNPACKED
    for form, (kind, step, types, absent) in forms.items():
        constants = {"BLOCK_N": num_outputs, "BLOCK_K": step, "KIND": kind.value, **absent}
        yield _case(f"unpack {form}", triton_few_bits.unpack_few_bits, constants, types, num_warps=num_warps)


def _mixers() -> Iterator[Case]:
    """Yield the kernels of recurrent layers: LFM2's convolution, a Mamba-2 of 9 B, and Qwen3-Next's delta rule."""
    floats = ("weight", "bias", "convolved", "rates", "step_biases", "skips", "norm", "scanned")
    types = {
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("inputs", "gates", "betas", "steps", "pool"), "*bf16"),
        **dict.fromkeys(("rows", "spans"), "*i64"),
        **dict.fromkeys(("step_factor", "least_step", "most_step", "gate_factor"), "fp32"),
    }
    scanned = {**types, "pool": "*fp32", "out": "*fp32"}
    gated = {"WIDTH": 2048, "NUM_KEPT": 2, "BLOCK": CHANNELS, "bias": None}
    yield _case("convolve, gated", convolve_rows, gated, types, num_warps=1)
    plain = {"WIDTH": 8192, "NUM_KEPT": 3, "BLOCK": CHANNELS, "gates": None, "betas": None}
    yield _case("convolve", convolve_rows, plain, {**types, "out": "*fp32"}, num_warps=1)
    shapes: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {  # heads, groups, width, depth
        "Mamba-2": (128, 1, 64, 128, {"IS_DELTA": False, "betas": None}),
        "Mamba-2, deep": (24, 1, 64, 256, {"IS_DELTA": False, "betas": None}),
        "delta rule": (32, 16, 128, 128, {"IS_DELTA": True, "skips": None}),
    }
    for name, (heads, groups, width, depth, constants) in shapes.items():
        block_d, block_w = state_block(depth, width)
        sizes = {"HEADS": heads, "GROUPS": groups, "WIDTH": width, "DEPTH": depth}
        blocks = {"BLOCK_W": block_w, "BLOCK_D": block_d}
        yield _case(f"scan {name}", scan_heads, {**sizes, **blocks, **constants}, scanned, num_warps=1)
    of_heads = {"GATES_FIRST": False, "GROUPS": 32, "SIZE": 128, "BLOCK": 128}
    yield _case("gate and norm of 32", gate_and_norm, of_heads, types, num_warps=1)
    of_row = {"GATES_FIRST": True, "GROUPS": 1, "SIZE": 8192, "BLOCK": 8192}
    yield _case("gate and norm of 1", gate_and_norm, of_row, types, num_warps=8)


def cases() -> Iterator[Case]:
    """Yield every kernel as the engine launches it for a model of Llama-3's 8 B shape, or a hybrid's."""
    yield _attention("one row", 1, "*bf16", _NO_OPTIONS)
    yield _attention("five rows", 5, "*bf16", _NO_OPTIONS)
    yield _attention("prompt", 2048, "*bf16", _NO_OPTIONS)
    yield _attention("one row, float8", 1, "*fp8e4nv", _NO_OPTIONS)
    yield _attention("prompt, float8, window, softcap, tree", 2048, "*fp8e4nv", {"WINDOW": 4096, "SOFTCAP": 30.0})
    yield _attention("one row, batch-invariant", 1, "*bf16", {**_NO_OPTIONS, "IS_BATCH_INVARIANT": True})
    merge = {"NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "VALUE_DIM": 128, "VALUE_WIDTH": 128, "BLOCK_M": 16, "BLOCK_S": 8}
    yield _case("merge", merge_splits, {**merge, "sinks": None}, num_warps=1)
    yield from _products()
    for constants in ({"GROUP": 1}, {"GROUP": 40, "delta": None}):
        yield _case(f"norm of {constants['GROUP']}", norm_rows, {**constants, "BLOCK": 4096}, num_warps=8)
    yield _case("rotate", rotate_heads, {"GROUP": 40, "SIZE": 128, "HEADS": 8, "BLOCK": 128})
    yield _case("gate", gate_rows, {"BLOCK": 1024})
    yield from _mixers()
    stored = {"NUM_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK": 128}
    yield _case("store", store_heads, stored, num_warps=1)
    large = {"HAS_LIBDEVICE": True}
    yield _case("draw, edited", draw_blocks, {"BLOCK": 1024, **large}, _SAMPLED, **_EXACT)
    yield _case("draw", draw_blocks, {"BLOCK": 1024, **large, **_NO_EDITS}, _SAMPLED, **_EXACT)
    yield _case("edit", edit_blocks, {"BLOCK": 1024}, {**_SAMPLED, "out": "*fp32"}, **_EXACT)
    yield _case("pick", pick_tokens, {"BLOCK": 128}, _SAMPLED, **_EXACT)
    yield _case("thresholds", find_thresholds, {"BLOCK": 8192}, _SAMPLED, num_warps=32, **_EXACT)
    yield _case(
        "draw from nuclei", draw_nuclei, {"BLOCK": 4096, **large, **_NO_EDITS}, _SAMPLED, num_warps=32, **_EXACT
    )


def read_table() -> dict[tuple[str, str], list[str]]:
    """Return the cells of each case and version of Triton, in the order of `ARCHITECTURES`."""
    lines = [line.split("|") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]] if TABLE.is_file() else []
    return {(line[0].strip(), line[1].strip()): [cell.strip() for cell in line[2:]] for line in lines}


def _write(table: dict[tuple[str, str], list[str]]) -> None:
    rows = [("case", "Triton", *(f"sm_{each}" for each in ARCHITECTURES))]
    rows += [(*key, *cells) for key, cells in sorted(table.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def differences(architecture: int) -> list[str]:
    """Return a line for each case that this Triton compiles to other numbers than the table's."""
    table, place = read_table(), ARCHITECTURES.index(architecture)
    found = []
    for case in cases():
        expected, cell = table.get((case.name, triton.__version__)), case.cell(architecture)
        if expected is None or expected[place] != cell:
            found.append(f"{case.name}: {cell}, in the table {expected and expected[place]}")
    return found


def main(arguments: list[str]) -> int:
    """Rewrite the table, or compare with it; return the process's status."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "an interpreter compiles nothing"
    if arguments[:1] == ["--check"]:
        found = [line for each in arguments[1:] or ARCHITECTURES for line in differences(int(each))]
        print("\n".join(found))
        return int(bool(found))
    table = {key: cells for key, cells in read_table().items() if key[1] != triton.__version__}
    for case in cases():
        table[case.name, triton.__version__] = [case.cell(architecture) for architecture in ARCHITECTURES]
        print(case.name, table[case.name, triton.__version__], flush=True)
    _write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
