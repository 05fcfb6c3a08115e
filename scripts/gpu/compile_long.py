"""Compile the variants of latent attention over long requests for Hopper, without a GPU; for `lab_long --dry`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from baltoro.kernels.mla import absorb_kernels, bulk_decode, triton_decode
from baltoro.kernels.mla.split_decode import MERGE_VALUES, MERGE_WARPS, Tiles
from scripts.gpu import compile_small
from scripts.gpu.compile_kda import HOPPER, SHARED_LIMIT, resources

ROWS = "tensordesc<bf16[64, {}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)>"
TYPES = {"q": "*bf16", "latent_rows": ROWS.format(512), "shared_rows": ROWS.format(64), "table": "*i64"}
TYPES |= {"stamps": "*i64", "lengths": "*i64", "scale2": "fp32"} | dict.fromkeys(
    ("out", "lse", "parts", "sums"), "*fp32"
)
ALIGNED = ("q_request", "q_row", "page_rows", "table_request")
SPLITS = 128


def latent(tiles: Tiles, kernels: tuple[Any, Any] = (bulk_decode.bulk_split_kernel, triton_decode.merge_kernel)) -> str:
    """What a split takes, and a merge of 128."""
    constants = {"ROWS": tiles.rows, "BUFFERS": tiles.stages, "AHEAD": tiles.ahead, "DIRECT": tiles.direct}
    constants |= {"WRITES_EMPTY": False, "PDL": True, "num_warps": tiles.warps}
    split = compiled(GluonASTSource, kernels[0], constants, tiles.warps)
    merge = {"R": 512, "BLOCK_R": MERGE_VALUES // SPLITS, "BLOCK_S": SPLITS, "OPENS": tiles.opens, "PDL": True}
    return f"{split}; merge {compiled(ASTSource, kernels[1], merge, MERGE_WARPS)}"


def compiled(kind: Any, kernel: Any, constants: dict[str, Any], warps: int) -> str:
    """Registers, stack, shared memory. Strides divisible by 16, as K3's are."""
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in ALIGNED]
    one = kind(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    built = triton.compile(one, target=HOPPER, options={"num_warps": warps, "launch_pdl": True})
    found, shared = resources(built.asm["cubin"]), built.metadata.shared
    return f"{found}, {shared} B shared{'' if shared <= SHARED_LIMIT else ' TOO LARGE'}"


def ends() -> Iterator[str]:
    """What comes before and behind it, which loads weights before the kernel in front has ended."""
    for name, kernel, constants, types in compile_small.cases():
        if kernel in (absorb_kernels.enter_kernel, absorb_kernels.leave_kernel):
            for options in ({}, {"launch_pdl": True}):
                one = compile_small.source(kernel, constants | {"PDL": bool(options)}, types)
                yield f"{name} {options}: {resources(triton.compile(one, target=HOPPER, options=options).asm['cubin'])}"
