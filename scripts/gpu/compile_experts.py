"""Compile the products of permuted experts for sm_90 without a GPU: registers, stack, shared memory, instructions.

    python -m scripts.gpu.compile_experts            every plan of tile_experts at K3's sizes
    python -m scripts.gpu.compile_experts --sizes    all at those of the tests and the small models too, and the moves
    python -m scripts.gpu.lab_experts --dry          every variant of the lab

Needs triton, and TRITON_INTERPRET unset. "serial": ptxas runs wgmma one by one (C7515, C7510). Exit status 1: a kernel
failed or is too large.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from baltoro.kernels.moe import (
    gluon_few,
    gluon_ring,
    gluon_slabs,
    slab_end_text,
    slab_text,
    slabs,
    tile_experts,
    tile_kernels,
    tile_moves,
)
from baltoro.kernels.moe.tile_experts import Plan, Tile
from baltoro.kernels.moe.tile_layout import ROW_UNIT, UNIT, padded
from scripts.gpu.compile_kda import resources

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232448
BOXES = "tensordesc<bf16[{}, {}, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)>"

WORDS = "tensordesc<i32[{}, 4, 32],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)>"
BYTES = "tensordesc<u8[{}, 32],NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2)>"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model: columns of the experts' inputs, of what is between the products, experts, pairs a token."""

    width: int = 3584
    inner: int = 3072
    experts: int = 112
    active: int = 16


# K3; tests/kernels/test_moe_on_gpu.py; models/tiny, models/mini, the interpreter's
SIZES = (
    Sizes(), Sizes(608, 352, 24, 16), Sizes(608, 352, 24, 3), Sizes(608, 352, 6, 2), Sizes(1408, 1152, 24, 16),
    Sizes(128, 96, 8, 2), Sizes(64, 32, 8, 1), Sizes(96, 64, 5, 2),
)  # fmt: skip


def slab_source(is_first: bool, is_rounded: bool, sizes: Sizes = SIZES[0]) -> ASTSource:
    """As `slabs` launches it."""
    constants: dict[str, Any] = {
        "TEXT": slabs.program(1 if is_first else 0, is_first, is_first and not is_rounded),
        "OPERANDS": slab_text.constraints(), "PIECES": slab_text.shared_bytes(slabs.STAGES) // 4096,
    }  # fmt: skip
    types = {"x_ptr": "*bf16", "order_ptr": "*i64", "table_ptr": "*i32", "packed_ptr": "*i32", "scales_ptr": "*u8"}
    types |= {"out_ptr": "*bf16"} | dict.fromkeys(("beta", "linear_beta"), "fp32")
    columns, rows = (sizes.width, 2 * padded(sizes.inner)) if is_first else (sizes.inner, padded(sizes.width, ROW_UNIT))
    values = {
        "num_experts": sizes.experts, "num_units": padded(columns) // UNIT, "num_row_tiles": rows // 8,
        "width": padded(sizes.inner) if is_first else sizes.width, "slab_rows": 1000,
    }  # fmt: skip
    return _source(gluon_slabs.slab_kernel, types, constants, values)


def ring_source(tile: Tile, is_first: bool, sizes: Sizes = SIZES[0]) -> ASTSource:
    """As `gluon_launch` launches it."""
    parts = tile.block // (16 * tile.warps)
    constants: dict[str, Any] = {
        "N": tile.rows, "SHORT": tile.short, "WARPS": tile.warps, "PARTS": parts, "STAGES": tile.stages,
        "KIND": 1 if is_first else 0, "IS_FIRST": is_first, "IS_ORDERED": is_first, "AHEAD": tile.ahead,
        "PDL": True,
    }  # fmt: skip
    types = {"x": BOXES.format(2, tile.rows), "x_short": BOXES.format(2, tile.short or tile.rows)}
    types |= {"w": WORDS.format(tile.block // 8), "s": BYTES.format(tile.block // 8), "order_ptr": "*i64"}
    types |= {"table_ptr": "*i32", "out_ptr": "*bf16"} | dict.fromkeys(("beta", "linear_beta"), "fp32")
    columns, rows = (sizes.width, 2 * padded(sizes.inner)) if is_first else (sizes.inner, padded(sizes.width, ROW_UNIT))
    values = {
        "num_experts": sizes.experts, "num_units": padded(columns) // UNIT, "num_row_tiles": rows // 8,
        "width": padded(sizes.inner) if is_first else sizes.width,
    }  # fmt: skip
    return _source(gluon_ring.ring_kernel, types, constants, values)


def few_source(tile: Tile, is_first: bool, is_rounded: bool, sizes: Sizes = SIZES[0]) -> ASTSource:
    """As `gluon_launch.few` launches it."""
    constants: dict[str, Any] = {
        "WARPS": tile.warps, "KIND": 1 if is_first else 0, "IS_FIRST": is_first,
        "IS_ROUNDED": is_rounded and is_first, "IS_WHOLE": sizes.width % UNIT == 0 or not is_first, "PDL": True,
    }  # fmt: skip
    types = {"x_ptr": "*bf16", "order_ptr": "*i64", "table_ptr": "*i32", "packed_ptr": "*i32", "scales_ptr": "*u8"}
    types |= {"out_ptr": "*bf16"} | dict.fromkeys(("beta", "linear_beta"), "fp32")
    columns, rows = (sizes.width, 2 * padded(sizes.inner)) if is_first else (sizes.inner, padded(sizes.width, ROW_UNIT))
    stride = sizes.width if is_first else padded(sizes.inner)
    values = {
        "num_experts": sizes.experts, "num_units": padded(columns) // UNIT, "num_row_tiles": rows // 8,
        "width": padded(sizes.inner) if is_first else sizes.width, "stride": stride, "x_width": stride,
        "num_active": sizes.active if is_first else 1,
    }  # fmt: skip
    return _source(gluon_few.few_kernel, types, constants, values)


def source(
    tile: Tile, is_first: bool, is_pairs: bool, dtype: str, *, is_rounded: bool = False, sizes: Sizes = SIZES[0]
) -> ASTSource:
    """As `tile_experts` launches it: sizes of 1 are constants, what 16 divides is said to be so."""
    if tile.slabs and not is_pairs:
        return slab_source(is_first, is_rounded, sizes)
    if tile.ring and not is_pairs:
        return ring_source(tile, is_first, sizes)
    if tile.few and not is_pairs:
        return few_source(tile, is_first, is_rounded, sizes)
    seconds: tuple[Any, Any] = tile_kernels.second_of_groups, tile_kernels.second_of_pairs
    kernel: Any = tile_kernels.first_product if is_first else seconds[is_pairs]
    is_arranged = tile.is_arranged and not is_pairs
    constants: dict[str, Any] = {
        "N1": tile.rows, "N2": tile.more, "N": tile.rows, "BLOCK": tile.block, "WIDE": tile.wide, "WARPS": tile.warps,
        "IS_PAIRS": is_pairs, "INTERPRET": False, "KIND": 1, "IS_ARRANGED": is_arranged,
        "IS_WHOLE": sizes.width % UNIT == 0, "IS_ROUNDED": is_rounded,
        "COUNTERS": triton.next_power_of_2(padded(sizes.width, ROW_UNIT) // tile.block), "SPLIT": tile.split,
        "PARTS": triton.next_power_of_2(sizes.active * tile.split),
        "FETCH": tile_experts.fetched(tile, padded(sizes.inner) // UNIT), "SPREAD": tile.spread, "SIGNAL": tile.signal,
        "PDL": is_first or is_pairs or not tile.is_arranged, "WAITS": is_pairs,
    }  # fmt: skip
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    types = dict.fromkeys(("x", "hidden"), f"*{dtype}") | dict.fromkeys(("ids", "order"), "*i64")
    types |= {
        "packed": "*i32",
        "scales": "*u8" if tile.wide == 8 else "*i32",
        "counters": "*i32",
        "weights": "*fp32",
        "out": f"*{dtype}",
    }
    types |= dict.fromkeys(("beta", "linear_beta"), "fp32")
    types |= {"table": "*i64" if is_pairs else "*i32", "parts": "*fp32" if is_pairs else f"*{dtype}"}
    columns, rows = (sizes.width, 2 * sizes.inner) if is_first else (sizes.inner, sizes.width)
    values = {
        "num_experts": sizes.experts, "num_active": sizes.active, "width": sizes.width, "stride": sizes.width,
        "num_units": padded(columns) // UNIT, "num_units_out": padded(sizes.inner) // UNIT,
        "num_counters": padded(sizes.width, ROW_UNIT) // tile.block, "num_row_tiles": padded(rows, ROW_UNIT) // 8,
    }  # fmt: skip
    return _source(kernel, types, constants, values)


def _source(kernel: Any, types: dict[str, str], constants: dict[str, Any], values: dict[str, int]) -> ASTSource:
    constants = constants | {n: 1 for n, value in values.items() if value == 1 and n in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = [i for i, (n, kind) in enumerate(signature.items()) if kind[0] == "*" or values.get(n, 1) % 16 == 0]
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    return form(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


def moves(sizes: Sizes, dtype: str) -> Iterator[tuple[str, ASTSource]]:
    """What stands around the products: inputs in order, few and many rows, both for W4A8 too; groups; the last sum."""
    types = dict.fromkeys(("x", "out", "parts"), f"*{dtype}") | dict.fromkeys(("ids", "order"), "*i64")
    types |= dict.fromkeys(("counts", "table"), "*i32") | {"weights": "*fp32"}
    values = {
        "num_active": sizes.active, "num_experts": sizes.experts, "width": sizes.width, "stride": sizes.width,
        "rows": 80, "num_units": padded(sizes.width) // UNIT, "num_places": 1000,
    }  # fmt: skip
    for units, wide, is_sorted, is_rounded in ((8, 2, True, False), (32, 2, True, True), (8, 32, False, True)):
        constants = {"UNITS": units, "WIDE": wide, "IS_SORTED": is_sorted, "IS_ROUNDED": is_rounded}
        constants["IS_SLAB"] = wide == 2
        yield f"arrange {constants}", _source(tile_moves.arrange, types, constants, values)
    for block in (512, 1024, 4096):
        yield f"count {block}", _source(tile_moves.count, types, {"BLOCK": block}, values)
        constants = {"BLOCK": block, "EXPERTS": triton.next_power_of_2(sizes.experts), "ALIGN": 8}
        yield f"group {block}", _source(tile_moves.group, types, constants, values)
    constants = {"PARTS": triton.next_power_of_2(sizes.active), "BLOCK": 256}
    yield "combine", _source(tile_moves.combine, types, constants, values)


def compile_sizes() -> int:
    """Every plan, also as pairs in one, two and three pieces, and every move at all sizes; 1 if one fails, else 0."""
    failed, plans = 0, [(plan, False) for _, plan in tile_experts.GROUPS] + [(tile_experts.EXACT, False)]
    plans += [(plan, False) for plan in in_triton()]
    for first in (tile_experts.PAIRS, tile_experts.EXACT):
        plans += [(Plan(first.first, replace(first.second, split=split)), True) for split in (1, 2, 3)]
    for sizes in SIZES:
        cases = []
        for plan, is_pairs in plans:
            dtype = "fp32" if plan.first == tile_experts.EXACT.first else "bf16"
            for part, tile in (("first", plan.first), ("second", plan.second)):
                options = options_of(tile)
                name = f"{part} {tile}{' of pairs' if is_pairs else ''}"
                cases.append((name, source(tile, part == "first", is_pairs, dtype, sizes=sizes), options))
        cases += [(name, ast, {"num_warps": 4}) for dtype in ("bf16", "fp32") for name, ast in moves(sizes, dtype)]
        wrong = 0
        for name, ast, options in cases:
            try:
                wrong += triton.compile(ast, target=HOPPER, options=options).metadata.shared > SHARED_LIMIT
            except (triton.CompilationError, RuntimeError) as error:
                print(f"{sizes} {name}: FAILED {error}", flush=True)
                wrong += 1
        print(f"{sizes}: {len(cases)} kernels, {wrong} of them wrong", flush=True)
        failed |= int(wrong > 0)
    return failed


def in_triton() -> list[Plan]:
    """The plans of groups as other cards have them."""
    tiles = [replace(plan.first, slabs=False, few=False, ring=False) for _, plan in tile_experts.GROUPS]
    return [Plan(tile, tile) for tile in tiles]


def options_of(tile: Tile) -> dict[str, int]:
    """As its launch has them."""
    if tile.slabs:
        return {"num_warps": slab_end_text.THREADS // 32}
    bound = {"maxnreg": tile.registers} if tile.registers else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages} | bound


def is_serial(ptx: str) -> bool:
    """Whether ptxas says that it runs the asynchronous products one by one."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        return "serialized" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def report(plans: Iterable[tuple[str, Plan, bool, str]]) -> int:
    """One line a kernel of (name, plan, is_pairs, dtype); 1 if one does not compile or fit, else 0."""
    failed = 0
    for name, plan, is_pairs, dtype in plans:
        for part, tile in (("first", plan.first), ("second", plan.second)):
            options = options_of(tile)
            try:
                built = triton.compile(source(tile, part == "first", is_pairs, dtype), target=HOPPER, options=options)
            except (triton.CompilationError, RuntimeError) as error:
                print(f"{name} {part} {tile}: FAILED {error}", flush=True)
                failed = 1
                continue
            ptx, shared = built.asm["ptx"], built.metadata.shared
            failed |= int(shared > SHARED_LIMIT)
            counts = f"wgmma {ptx.count('wgmma.mma_async')}, mma {ptx.count('mma.sync')}"
            serial = ", serial" if is_serial(ptx) else ""
            cut = f"{tile.rows}+{tile.more} x {tile.block}, {tile.warps} warps, {tile.stages} stages"
            cut = "slabs" if tile.slabs and not is_pairs else cut
            used = f"{resources(built.asm['cubin'])} of {options.get('maxnreg', 255)}, {shared} B shared"
            print(f"{name:7} {part:6} {cut}: {used}, {counts}{serial}", flush=True)
    return failed


def main() -> int:
    """All plans that `plan_for` can choose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", action="store_true")
    if parser.parse_args().sizes:
        return compile_sizes()
    plans = [("pairs", tile_experts.PAIRS, True, "bf16"), ("exact", tile_experts.EXACT, True, "fp32")]
    plans += [("exact", tile_experts.EXACT, False, "fp32")]
    plans += [(f"<= {limit}", plan, False, "bf16") for limit, plan in tile_experts.GROUPS]
    plans += [("triton", plan, False, "bf16") for plan in in_triton()]
    return report(plans)


if __name__ == "__main__":
    sys.exit(main())
