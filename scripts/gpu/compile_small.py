"""Compile the small kernels for sm_90 without a GPU: norms, activations, both ends of latent attention and of KDA's
chunk form, mix, top-k.

    python -m scripts.gpu.compile_small              needs triton, and TRITON_INTERPRET unset

Prints registers, stack and shared memory at K3's widths and the tiny model's. Exit status 1: one does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from baltoro.kernels.attnres import cluster_kernels
from baltoro.kernels.attnres.cluster_text import lane_sums, opening, warp_sums
from baltoro.kernels.kda import triton_enter
from baltoro.kernels.mla import absorb_kernels
from baltoro.kernels.moe import glu_kernels, gluon_route, route_kernels
from baltoro.kernels.norm import triton_kernels
from scripts.gpu.compile_kda import resources
from scripts.gpu.lab_mix import ENTER_TILES, GATED

ALIGNED = ("num_experts", "bank_source", "bank_token", "x_row", "raw_row", "o_row", "o_head", "gate_row", "gate_head")


def source(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> ASTSource:
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in ALIGNED]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


def cases() -> list[tuple[str, Any, dict[str, Any], dict[str, str]]]:
    found: list[tuple[str, Any, dict[str, Any], dict[str, str]]] = []
    for kind in ("bf16", "fp32"):
        p = f"*{kind}"
        row = {"x": p, "weight": p, "out": p, "eps": "fp32"}
        found.append(
            (
                f"norm {kind}",
                triton_kernels.rms_norm_kernel,
                {"D": 7168, "BLOCK": 8192, "PDL": True},
                row,
            )
        )
        halves = {"gate": p, "up": p, "out": p, "beta": "fp32", "linear_beta": "fp32"}
        found.append((f"glu {kind}", glu_kernels.glu_kernel, {"KIND": 1, "BLOCK": 512, "PDL": True}, halves))
        for heads, keys, values, rank, shared in ((12, 128, 128, 512, 64), (4, 32, 32, 64, 16)):
            sizes = {"H": heads, "BOTH": keys + values, "R": rank, "BLOCK_R": rank, "ROWS": 16}
            sizes |= {"PDL": False, "INTERPRET": False}
            enter = sizes | {"K": keys, "S": shared, "BLOCK_K": keys, "BLOCK_S": shared, "COLUMNS": 64}
            types = dict.fromkeys(("q", "row", "gain", "kv_b", "kv", "query"), p) | {"eps": "fp32"}
            types |= {"pages": "*i64", "offsets": "*i64"}
            found.append((f"enter {kind} {rank}", absorb_kernels.enter_kernel, enter, types))
            leave = sizes | {"V": values, "COLUMNS": 16, "HAS_GATE": True}
            types = {"out": "*fp32", "kv_b": p, "gate": p, "result": p}
            found.append((f"leave {kind} {rank}", absorb_kernels.leave_kernel, leave, types))
    return found


def mixers() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str], dict[str, Any]]]:
    """What stands before and behind KDA's chunk form, in the shapes that `lab_mix` tries."""
    for kind in ("bf16", "fp32"):
        names = ("x", "history", "raw", "logits", "planes", "after")
        types = dict.fromkeys(names, f"*{kind}") | {"jobs": "*i32", "bound": "fp32", "eps": "fp32"}
        types |= dict.fromkeys(("weight", "a_log", "bias", "decay", "beta"), "*fp32")
        for tile in ENTER_TILES:
            sizes = {"H": 12, "K": 128, "BLOCK": 128, "TAPS": 4, "GROUPS": tile.groups, "ROWS": tile.rows}
            for has_history in (True, False):
                flags = {"HAS_HISTORY": has_history, "IS_BOUNDED": True}
                name = f"before KDA {kind} {tile.groups}x{tile.rows}/{tile.warps}" + " past" * has_history
                yield name, triton_enter.enter_kernel, sizes | flags, types, {"num_warps": tile.warps}
        types = dict.fromkeys(("o", "gate", "out"), f"*{kind}") | {"weight": "*fp32", "eps": "fp32"}
        for values, warps in GATED:
            sizes = {"H": 12, "D": 128, "BLOCK": 128, "ROWS": values // 128}
            kernel = triton_kernels.gated_rms_norm_kernel
            yield f"gated norm {kind} {values}/{warps}", kernel, sizes, types, {"num_warps": warps}


def clusters(kind: str) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str], dict[str, Any]]]:
    """The depth mix of 9 sources, as many ways as a width of 7168 is cut."""
    for programs, warps in ((8, 4), (8, 2), (8, 8), (16, 2), (16, 4), (4, 8), (4, 4), (2, 16), (2, 8)):
        wide = 8192 // (32 * programs * warps)
        sizes = {"L": 8, "D": 7168, "PROGRAMS": programs, "WARPS": warps, "WIDE": wide}
        sizes |= {"ROW": cluster_kernels.row_layout(programs, warps, wide), "OPENING": opening(programs, warps)}
        sizes |= {"LANE_SUMS": lane_sums(programs, warps), "WARP_SUMS": warp_sums(programs, warps)}
        sizes |= dict.fromkeys(("HAS_PREFIX", "HAS_UPDATE", "HAS_NORM", "PDL"), True)
        names = ("bank_ptr", "prefix_ptr", "update_ptr", "gain_ptr", "total_ptr", "out_ptr")
        types = dict.fromkeys(names, f"*{kind}") | {"query_ptr": "*fp32", "eps": "fp32", "norm_eps": "fp32"}
        options = {"num_warps": warps, "num_ctas": programs, "launch_pdl": True}
        yield f"mix {kind} {programs} {warps}", cluster_kernels.cluster_mix_kernel, sizes, types, options


def routes() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str], dict[str, Any]]]:
    """Top 16 of 896, in Triton and by hand."""
    names = {"logits": "*fp32", "bias": "*fp32", "ids": "*i64", "weights": "*fp32", "counts": "*i32"}
    flags = dict.fromkeys(("IS_RENORMALISED", "HAS_COUNTS", "PDL"), True) | {"TOP": 16}
    for width in (128, 256):
        sizes = flags | {"TOP_BLOCK": 16, "SLOTS": 32, "GROUPS": 1024 // width, "WIDTH": width, "IS_SIGMOID": True}
        options = {"num_warps": 1024 // width, "launch_pdl": True}
        yield f"select {width}", route_kernels.select, sizes, names | {"scaling": "fp32"}, options
    for wide in (2, 4, 8, 16):
        groups = 32 // wide
        experts, pairs = gluon_route.layouts(groups, 16, wide)
        sizes = flags | {"SLOTS": 16, "GROUPS": groups, "WIDE": wide, "EXPERTS": experts, "PAIRS": pairs}
        types = {f"{name}_ptr": kind for name, kind in names.items()} | {"scaling": "fp32"}
        options = {"num_warps": groups, "launch_pdl": True}
        yield f"select by hand {wide}", gluon_route.select_kernel, sizes, types, options


def main() -> int:
    status = 0
    every = [(*case, {"num_warps": 16 if case[0].startswith("norm") else 4}) for case in cases()]
    for name, kernel, constants, types, options in [*clusters("bf16"), *clusters("fp32"), *routes(), *mixers(), *every]:
        try:
            made = triton.compile(source(kernel, constants, types), target=GPUTarget("cuda", 90, 32), options=options)
            print(f"{name:<28} shared {made.metadata.shared:>6}  {resources(made.asm['cubin'])}", flush=True)
        except Exception as error:  # noqa: BLE001 - one line a kernel, whatever went wrong
            status = 1
            print(f"{name:<28} FAILED {type(error).__name__}: {str(error)[-300:]}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
