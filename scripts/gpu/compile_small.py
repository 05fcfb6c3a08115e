"""Compile norm, gated activations, and what stands before and behind latent attention, for sm_90 without a GPU.

    python -m scripts.gpu.compile_small              needs triton, and TRITON_INTERPRET unset

Prints registers, stack and shared memory at K3's widths and the tiny model's. Exit status 1: one does not compile.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baltoro.kernels.mla import absorb_kernels
from baltoro.kernels.moe import glu_kernels
from baltoro.kernels.norm import triton_kernels
from scripts.gpu.compile_kda import resources


def source(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> ASTSource:
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


def cases() -> list[tuple[str, Any, dict[str, Any], dict[str, str]]]:
    found: list[tuple[str, Any, dict[str, Any], dict[str, str]]] = []
    for kind in ("bf16", "fp32"):
        p = f"*{kind}"
        row = {"x": p, "weight": p, "out": p, "eps": "fp32"}
        found.append((f"norm {kind}", triton_kernels.rms_norm_kernel, {"D": 7168, "BLOCK": 8192}, row))
        halves = {"gate": p, "up": p, "out": p, "beta": "fp32", "linear_beta": "fp32"}
        found.append((f"glu {kind}", glu_kernels.glu_kernel, {"KIND": 1, "BLOCK": 512}, halves))
        for heads, keys, values, rank, shared in ((12, 128, 128, 512, 64), (4, 32, 32, 64, 16)):
            sizes = {"H": heads, "BOTH": keys + values, "R": rank, "BLOCK_R": rank, "ROWS": 16, "INTERPRET": False}
            enter = sizes | {"K": keys, "S": shared, "BLOCK_K": keys, "BLOCK_S": shared, "COLUMNS": 64}
            types = dict.fromkeys(("q", "row", "gain", "kv_b", "kv", "query"), p) | {"eps": "fp32"}
            types |= {"pages": "*i64", "offsets": "*i64"}
            found.append((f"enter {kind} {rank}", absorb_kernels.enter_kernel, enter, types))
            leave = sizes | {"V": values, "COLUMNS": 16, "HAS_GATE": True}
            types = {"out": "*fp32", "kv_b": p, "gate": p, "result": p}
            found.append((f"leave {kind} {rank}", absorb_kernels.leave_kernel, leave, types))
    return found


def main() -> int:
    status = 0
    for name, kernel, constants, types in cases():
        try:
            options = {"num_warps": 16 if name.startswith("norm") else 4}
            made = triton.compile(source(kernel, constants, types), target=GPUTarget("cuda", 90, 32), options=options)
            print(f"{name:<20} shared {made.metadata.shared:>6}  {resources(made.asm['cubin'])}", flush=True)
        except Exception as error:  # noqa: BLE001 - one line a kernel, whatever went wrong
            status = 1
            print(f"{name:<20} FAILED {type(error).__name__}: {str(error)[-300:]}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
