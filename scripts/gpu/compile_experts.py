"""Compile the products of permuted experts for sm_90 without a GPU: registers, stack, shared memory, instructions.

    python -m scripts.gpu.compile_experts            every plan of tile_experts
    python -m scripts.gpu.lab_experts --dry          every variant of the lab

Needs triton, and TRITON_INTERPRET unset. "serial": ptxas runs wgmma one by one (C7515, C7510). Exit status 1: a kernel
failed or is too large.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baltoro.kernels.moe import tile_experts, tile_kernels
from baltoro.kernels.moe.tile_experts import Plan, Tile
from scripts.gpu.compile_kda import resources

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232448


def source(tile: Tile, is_first: bool, is_pairs: bool, dtype: str, *, is_rounded: bool = False) -> ASTSource:
    """As `tile_experts` launches it; pointers and all sizes but the number of active experts divisible by 16."""
    seconds: tuple[Any, Any] = tile_kernels.second_of_groups, tile_kernels.second_of_pairs
    kernel: Any = tile_kernels.first_product if is_first else seconds[is_pairs]
    is_arranged = tile.is_arranged and not is_pairs
    constants: dict[str, Any] = {
        "N1": tile.rows, "N2": tile.more, "N": tile.rows, "BLOCK": tile.block, "WIDE": tile.wide, "WARPS": tile.warps,
        "IS_PAIRS": is_pairs, "INTERPRET": False, "KIND": 1, "IS_ARRANGED": is_arranged, "IS_WHOLE": True,
        "IS_ROUNDED": is_rounded, "COUNTERS": 64, "SPLIT": tile.split, "PARTS": triton.next_power_of_2(16 * tile.split),
        "FETCH": min(tile.fetch, 24 // tile.split), "PDL": is_first or is_pairs or not tile.is_arranged,
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
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    sizes = ("num_experts", "width", "stride", "num_row_tiles")
    aligned = [i for i, (n, kind) in enumerate(signature.items()) if kind.startswith("*") or n in sizes]
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


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
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            options |= {"maxnreg": tile.registers} if tile.registers else {}
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
            used = f"{resources(built.asm['cubin'])} of {tile.registers or 255}, {shared} B shared"
            print(f"{name:7} {part:6} {cut}: {used}, {counts}{serial}", flush=True)
    return failed


def main() -> int:
    """All plans that `plan_for` can choose."""
    plans = [("pairs", tile_experts.PAIRS, True, "bf16"), ("exact", tile_experts.EXACT, True, "fp32")]
    plans += [("exact", tile_experts.EXACT, False, "fp32")]
    plans += [(f"<= {limit}", plan, False, "bf16") for limit, plan in tile_experts.GROUPS]
    return report(plans)


if __name__ == "__main__":
    sys.exit(main())
