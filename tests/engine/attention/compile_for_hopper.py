"""Run as a script, on any machine: compiles the kernels to machine code for an H200, or fails.

All of them in one process, whose start takes as long as some compilations.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.triton_kernel import attend_tiles, merge_splits
from engine.attention.triton_tiling import HeadShape, choose_tiling
from engine.kv_cache.triton_store import store_heads
from engine.model.decoders.triton_rows import norm_rows, rotate_heads
from engine.model.linear import triton_few_bits
from engine.model.linear.triton_few_bits import Kind
from engine.model.linear.triton_gate import gate_rows
from engine.model.linear.triton_product import _LOW, _TALL, multiply
from engine.sampling.triton_draw import draw_blocks, edit_blocks, pick_tokens
from engine.sampling.triton_nucleus import draw_nuclei, find_thresholds

HEADS = HeadShape(num_kv_heads=8, group_size=4, key_dim=128, value_dim=128)
MOST_SHARED_BYTES = 227 << 10
POINTERS = {
    "block_tables": "*i32",
    "tiles": "*i32",
    "merges": "*i32",
    "ancestors": "*i64",
    "positions": "*i32",
    "sinks": "*fp32",
    "key_scales": "*fp32",
    "value_scales": "*fp32",
    "sums": "*fp32",
    "peaks": "*fp32",
    "totals": "*fp32",
}
NUMBERS = {"scale": "fp32", "query_row_stride": "i32", "query_head_stride": "i32", "num_lanes": "i32"}
OPTIONAL = {"ancestors": None, "positions": None, "sinks": None, "key_scales": None, "value_scales": None}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> None:
    """`types` are of the arguments missing in POINTERS and NUMBERS, or with another type than there."""
    known = {**POINTERS, **NUMBERS, **types}
    signature = {name: "constexpr" if name in constants else known[name] for name in kernel.arg_names}
    aligned = [
        (index,)
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("stride")
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={at: [["tt.divisibility", 16]] for at in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"], kernel
    assert compiled.metadata.shared <= MOST_SHARED_BYTES, compiled.metadata.shared


def compile_attention(num_rows: int, stored: str, constants: dict[str, Any]) -> None:
    tiling = choose_tiling(num_rows, HEADS, itemsize=2)
    sizes = {
        "NUM_KV_HEADS": HEADS.num_kv_heads,
        "GROUP_SIZE": HEADS.group_size,
        "BLOCK_SIZE": 16,
        "KEY_DIM": HEADS.key_dim,
        "VALUE_DIM": HEADS.value_dim,
        "KEY_WIDTH": HEADS.key_dim,
        "VALUE_WIDTH": HEADS.value_dim,
        "WINDOW": 0,
        "SOFTCAP": 0.0,
        "OPERAND": triton.language.bfloat16,
        "IS_BATCH_INVARIANT": False,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
    }
    types = {"out": "*bf16", "query": "*bf16", "keys": stored, "values": stored}
    launch = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    compile_kernel(attend_tiles, types, {**sizes, **constants}, **launch)


def compile_merge() -> None:
    sizes = {"NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "VALUE_DIM": 128, "VALUE_WIDTH": 128, "BLOCK_M": 16, "BLOCK_S": 8}
    compile_kernel(merge_splits, {"out": "*bf16"}, {**sizes, "sinks": None}, num_warps=1)


def compile_product() -> None:
    for tile in (_LOW, _TALL):
        sizes = {"BLOCK_M": tile.num_rows, "BLOCK_N": tile.num_outputs, "BLOCK_K": tile.num_inputs}
        types = {"out": "*bf16", "x": "*bf16", "weight": "*bf16", "num_rows": "i32", "num_inputs": "i32"}
        constants = {**sizes, "OPERAND": triton.language.bfloat16, "bias": None}
        launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        compile_kernel(multiply, {**types, "num_outputs": "i32"}, constants, **launch)


def compile_few_bits() -> None:
    for tile in (triton_few_bits._LOW, triton_few_bits._TALL):
        for kind, step, without in ((Kind.FLOAT8, 128, "bases"), (Kind.INT8, 64, "bases"), (Kind.INT4, 32, "zeros")):
            sizes = {"BLOCK_M": tile.num_rows, "BLOCK_N": tile.num_outputs, "BLOCK_K": step, "KIND": kind.value}
            types = {
                **{"out": "*bf16", "x": "*bf16", "numbers": "*i8" if kind is Kind.INT8 else "*u8"},
                **dict.fromkeys(("scales", "zeros", "bases"), "*fp16"),
                **dict.fromkeys(("num_rows", "num_inputs", "num_outputs"), "i32"),
                **dict.fromkeys(("group_size", "num_scales", "row_step"), "i32"),
            }
            constants = {**sizes, "OPERAND": triton.language.bfloat16, "bias": None, without: None}
            launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            compile_kernel(triton_few_bits.multiply_few_bits, types, constants, **launch)


def compile_norm() -> None:
    types = dict.fromkeys(("normed", "total", "rows", "delta", "weight"), "*bf16")
    numbers = {"row_stride": "i32", "size": "i32", "epsilon": "fp32"}
    for constants in ({"GROUP": 1}, {"GROUP": 40, "delta": None}):
        compile_kernel(norm_rows, {**types, **numbers}, {**constants, "BLOCK": 4096}, num_warps=8)


def compile_rows() -> None:
    """Everything between a layer's products: rotary embeddings, gates, and the storing of keys and values."""
    types = {**dict.fromkeys(("rotated", "heads", "table", "gated", "joined"), "*bf16"), "row_stride": "i32"}
    compile_kernel(rotate_heads, types, {"GROUP": 40, "SIZE": 128, "HEADS": 8, "BLOCK": 128})
    compile_kernel(gate_rows, {**types, "size": "i32"}, {"BLOCK": 1024})
    pools = {**dict.fromkeys(("keys", "values", "key", "value"), "*bf16"), "slots": "*i64"}
    strides = {f"{name}_{kind}_stride": "i32" for name in ("key", "value") for kind in ("row", "head")}
    sizes = {"NUM_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK": 128}
    compile_kernel(store_heads, {**pools, **strides}, sizes, num_warps=1)


def compile_sampling() -> None:
    numbers = {"num_tokens": "i32", "score_stride": "i32"}
    edits = {"factors": "*fp32", "spans": "*i32", "ids": "*i32", "biases": "*fp32", "counts": "*i32"}
    counted = {**edits, **numbers, "count_stride": "i32"}
    draw = {"peaks": "*fp32", "places": "*i32", "scores": "*fp32", "keys": "*i64", "has_noise": "*i8", **counted}
    edit = {"out": "*fp32", "scores": "*fp32", **counted}
    no_edits, no_noise = dict.fromkeys(edits), dict.fromkeys(("keys", "has_noise"))
    pick = {"tokens": "*i64", "peaks": "*fp32", "places": "*i32", "num_blocks": "i32", "num_tokens": "i32"}
    nucleus = {"thresholds": "*fp32", "scores": "*fp32", "top_p": "*fp32", **numbers}
    noise = {"keys": "*i64", "has_noise": "*i8"}
    draw_of_nucleus = {"drawn": "*i64", "scores": "*fp32", **noise, "top_p": "*fp32", "log_min_p": "*fp32", **counted}
    for kernel, types, constants in (
        (draw_blocks, draw, {"BLOCK": 1024, "HAS_LIBDEVICE": True}),
        (draw_blocks, draw, {"BLOCK": 1024, "HAS_LIBDEVICE": True, **no_edits}),
        (draw_blocks, draw, {"BLOCK": 1024, "HAS_LIBDEVICE": True, **no_noise}),
        (edit_blocks, edit, {"BLOCK": 1024}),
        (pick_tokens, pick, {"BLOCK": 128}),
        (find_thresholds, nucleus, {"BLOCK": 8192}),
        (draw_nuclei, draw_of_nucleus, {"BLOCK": 4096, "HAS_LIBDEVICE": True}),
        (draw_nuclei, draw_of_nucleus, {"BLOCK": 4096, "HAS_LIBDEVICE": True, **no_edits}),
    ):
        source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
        options = {"enable_fp_fusion": False, "num_warps": 32 if kernel in (find_thresholds, draw_nuclei) else 4}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.asm["cubin"]
        if kernel is edit_blocks:
            assert "fma" not in compiled.asm["ptx"], "a product and a sum are rounded apart"
            assert "div.rn" in compiled.asm["ptx"]


if __name__ == "__main__":
    compile_attention(1, "*bf16", OPTIONAL)
    compile_attention(8, "*fp8e4nv", OPTIONAL)
    compile_attention(2048, "*fp8e4nv", {"WINDOW": 4096, "SOFTCAP": 30.0})
    compile_attention(1, "*bf16", {**OPTIONAL, "IS_BATCH_INVARIANT": True})
    compile_merge()
    compile_product()
    compile_few_bits()
    compile_norm()
    compile_rows()
    compile_sampling()
