"""Compile the variants of the fold and of latent attention's splits for Hopper, without a GPU; for `lab_fold --dry`."""

from __future__ import annotations

from typing import Any

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from baltoro.kernels.kda import gluon_fold, tiles, triton_fold
from baltoro.kernels.kda.tiles import Copied, Direct, Tile
from baltoro.kernels.mla import bulk_decode, triton_decode
from baltoro.kernels.mla.split_decode import Tiles
from scripts.gpu.compile_kda import HOPPER, SHARED_LIMIT, TOKEN_TYPES, resources, source

CONSTANTS = ("ROWS", "TILES", "WARPS", "BUFFERS", "BC", "PART", "IS_EARLY", "FETCHES")
ROWS = "tensordesc<bf16[64, {}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)>"
LATENT = {"q": "*bf16", "latent_rows": ROWS.format(512), "shared_rows": ROWS.format(64), "table": "*i64"}
LATENT |= {"lengths": "*i64", "scale2": "fp32"} | dict.fromkeys(("out", "lse", "parts", "sums"), "*fp32")
REGISTERS = 65536


def fold(choice: Tile | Copied | Direct | None) -> str:
    """What a fold takes, and how many of its programs a multiprocessor holds."""
    if isinstance(choice, Copied | Direct):
        kernel = gluon_fold.direct_fold_kernel if isinstance(choice, Direct) else gluon_fold.copied_fold_kernel
        options, constants = choice.options(), {"TAPS": 4}
    else:
        kernel, constants = triton_fold.fold_kernel, {"TAPS": 4, "H": 12, "K": 128, "V": 128}
        options = (choice or tiles.fold(128)).fold_constants(128)
    constants |= {name: options.pop(name) for name in CONSTANTS if name in options}
    built = triton.compile(source(kernel, constants, TOKEN_TYPES), target=HOPPER, options=options)
    return taken(built, options["num_warps"])


def latent(choice: Tiles | None, values: int, reads_all: bool) -> str:
    """What a split takes, and a merge of 128."""
    choice = choice or Tiles(16, 64, 2, 4, bulk=True)
    constants = {"ROWS": choice.rows, "BUFFERS": choice.stages, "SHAREDS": choice.shareds or choice.stages}
    constants |= {"WRITES_EMPTY": False, "PDL": True, "num_warps": choice.warps}
    split = compiled(GluonASTSource, bulk_decode.bulk_split_kernel, constants, choice.warps)
    merge = {"R": 512, "BLOCK_R": values // 128, "BLOCK_S": 128, "READS_ALL": reads_all, "PDL": True}
    return f"{split}; merge {compiled(ASTSource, triton_decode.merge_kernel, merge, 8)}"


def compiled(kind: Any, kernel: Any, constants: dict[str, Any], warps: int) -> str:
    """Strides divisible by 16, as K3's are."""
    signature = {name: "constexpr" if name in constants else LATENT.get(name, "i32") for name in kernel.arg_names}
    strides = ("q_request", "q_row", "page_rows", "table_request")
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in strides]
    one = kind(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "launch_pdl": True}
    return taken(triton.compile(one, target=HOPPER, options=options), warps)


def taken(built: Any, warps: int) -> str:
    """Registers, stack, shared memory, programs that a multiprocessor can hold."""
    found, shared = resources(built.asm["cubin"]), built.metadata.shared
    registers = -(-int(found.split("REG:")[1].split()[0]) // 8) * 8
    programs = min(REGISTERS // (registers * 32 * warps), (SHARED_LIMIT + 1024) // (shared + 1024))
    return f"{found}, {shared} B shared, {programs} programs{'' if shared <= SHARED_LIMIT else ' TOO LARGE'}"
