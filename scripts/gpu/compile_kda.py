"""Compile the KDA kernels for sm_90 at K3's shape, without a GPU: registers, stack (spills), matrix instructions.

    python -m scripts.gpu.compile_kda [--sizes]       --sizes: the chunk form at all sizes, instead

Needs triton, and TRITON_INTERPRET unset. What does not compile is reported and makes the exit status 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from baltoro.kernels.kda import (
    gluon_fold,
    gluon_prepare,
    gluon_scan,
    launch,
    tiles,
    triton_bounded,
    triton_chunk,
    triton_decode,
    triton_fold,
    triton_prepare,
    triton_verify,
)

HOPPER = GPUTarget("cuda", 90, 32)
BF16, INT = "*bf16", "*i32"
TOKEN_TYPES = dict.fromkeys(
    ("x_ptr", "raw_ptr", "b_ptr", "gate_ptr", "history_ptr", "out_ptr", "v_ptr", "kept_x_ptr"), BF16
)
TOKEN_TYPES |= {"slots_ptr": "*i64", "accepted_ptr": INT}
TOKEN_TYPES |= dict.fromkeys(("history_slot", "state_slot", "state_layer", "history_layer"), "i64")
CHUNK_TYPES = dict.fromkeys(("chunks_ptr", "segments_ptr", "order_ptr", "spans_ptr", "fragments_ptr"), INT)
CHUNK_TYPES["table_ptr"] = "*fp16"
CHUNK_TYPES |= dict.fromkeys(("v_ptr", "w_ptr", "u_ptr", "k_out_ptr", "q_in_ptr", "a_ptr", "out_ptr"), BF16)
EXACT_TYPES = {name: "*fp32" if kind in (BF16, "*fp16") else kind for name, kind in CHUNK_TYPES.items()}
CHUNK_TYPES |= {"q_ptr": BF16, "k_ptr": BF16}
ROWS = "tensordesc<bf16[64, {}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)>"
CHUNK_TYPES |= {f"{name}_rows": ROWS.format(64 if name == "a" else 128) for name in "wukqa"}
# what a program may have
SHARED_LIMIT = 232448
HEAD = {"H": 12, "K": 128, "V": 128, "TAPS": 4}
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
Case = tuple[str, Any, dict[str, Any], dict[str, str], dict[str, Any]]


def cases() -> Iterator[Case]:
    """(name, kernel, constants, types, options), as `fused` and `prefill` launch them."""
    for is_bounded in (True, False):
        for programs in (12, 24576):
            yield "decode", *_head(triton_decode.decode_kernel, tiles.decode(128, programs), is_bounded)
            yield "verify", *_head(triton_verify.verify_kernel, tiles.verify(128, programs), is_bounded)
    yield "fold in Triton", *_head(triton_fold.fold_kernel, tiles.fold(128), True)
    direct = tiles.DIRECT.options() | {"TAPS": 4}
    options = {name: direct.pop(name) for name in OPTIONS if name in direct}
    yield "fold", gluon_fold.direct_fold_kernel, direct, TOKEN_TYPES, options
    config = launch.choose(torch.bfloat16, keys=128, values=128)
    yield from prefill_cases([(part, config) for part in ("bounded", "prepare", "fragment", "scan")])
    merge = {"K": 128, "V": 128, "BV": launch.MERGE_ROWS, "KIND": "tf32x3"}
    yield from gluon_cases((launch.Columns(), launch.Columns(None)))
    yield "merge", triton_chunk.merge_kernel, merge, CHUNK_TYPES, {"num_warps": 8}


def prefill_cases(parts: Iterable[tuple[str, launch.Config]]) -> Iterator[Case]:
    """Of K3's head: (which kernel, configuration) each."""
    for part, config in parts:
        for first in (16, 1) if part == "prepare" else (16,):
            yield prefill_case(part, config, torch.bfloat16, keys=128, values=128, first=first)


def gluon_cases(launches: Iterable[launch.Columns]) -> Iterator[Case]:
    """Of K3's head: the preparation as given, and the serial part."""
    for one in launches:
        options = one.options()
        constants = {"HEADS_FIRST": options.pop("HEADS_FIRST")}
        yield f"columns {one.registers or ''}", gluon_prepare.column_kernel, constants, CHUNK_TYPES, options
    for is_cut in (True, False):
        cut = {"IS_CUT": is_cut, "IS_EARLY": is_cut}
        yield f"copies {is_cut}", gluon_scan.column_scan_kernel, cut, CHUNK_TYPES, {"num_warps": 8}


def prefill_case(part: str, config: launch.Config, dtype: torch.dtype, *, keys: int, values: int, first: int) -> Case:
    """One kernel of the chunk form."""
    one, kinds = getattr(config, part), launch.products(dtype)
    constants = {
        "K": keys,
        "V": values,
        "C": 64,
        "IS_DIRECT": config.is_direct,
        "KIND": kinds.pairs if part in ("prepare", "bounded") else getattr(kinds, part),
    }
    if part in ("prepare", "bounded"):
        constants |= {"BLOCK": one.block, "INVERSE_KIND": kinds.inverse, "SUMS": kinds.sums}
        kernel = triton_prepare.prepare_kernel if part == "prepare" else triton_bounded.bounded_kernel
        constants |= {"FIRST": first} if part == "prepare" else {"HAS_BLOCKS": config.has_blocks}
    else:
        constants["BV"] = one.block
        kernel = triton_chunk.scan_kernel if part == "scan" else triton_chunk.fragment_kernel
    if part == "scan":
        constants["IS_CUT"] = True
    types = EXACT_TYPES if dtype == torch.float32 else CHUNK_TYPES
    name = f"{part} {one.block} {one.warps} {one.stages} {one.registers or ''} K {keys} V {values} {first}"
    name += " direct" * config.is_direct
    return name, kernel, constants, types, one.options()


def every_size() -> Iterator[Case]:
    """The chosen configurations at all sizes the chunk form takes."""
    for dtype in (torch.bfloat16, torch.float32):
        for keys in (16, 32, 64, 128):
            for values in (16, 32, 64, 128):
                config = launch.choose(dtype, keys=keys, values=values)
                for part in ("prepare", "bounded", "scan", "fragment"):
                    if getattr(config, part) is not None:
                        yield prefill_case(part, config, dtype, keys=keys, values=values, first=16)


def _head(kernel: Any, tile: tiles.Tile | tiles.VerifyTile, is_bounded: bool) -> tuple[Any, ...]:
    """(kernel, constants, types, options) of decode, verify or fold with this tile."""
    every = HEAD | {"IS_BOUNDED": is_bounded, "IS_MILD": is_bounded, "RECORDS": False, "window": 8, "BG": 8}
    every |= {"PRECISION": "tf32"} | tile.constants(128)
    constants = {name: value for name, value in every.items() if name in kernel.arg_names}
    options = {name: every[name] for name in OPTIONS if name in every}
    if kernel is triton_fold.fold_kernel:
        constants.pop("window")
    return kernel, constants, TOKEN_TYPES, options


def source(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> ASTSource:
    """Types as a launch would find them; pointers and strides divisible by 16."""
    scalars = dict.fromkeys(("scale", "eps", "bound"), "fp32")
    signature = {}
    for name in kernel.arg_names:
        default = "*fp32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else (types | scalars).get(name, default)
    aligned = [
        i
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name.endswith(("_row", "_slot", "_layer")) and name not in ("b_row", "beta_row"))
    ]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


def resources(cubin: bytes) -> str:
    """What cuobjdump says of registers and stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False)
    return " ".join(re.findall(r"(?:REG|STACK):\d+", done.stdout))


def main() -> int:
    """Print one line a kernel."""
    failed = 0
    for name, kernel, constants, types, options in every_size() if "--sizes" in sys.argv else cases():
        try:
            built = triton.compile(source(kernel, constants, types), target=HOPPER, options=options)
        except (triton.CompilationError, RuntimeError) as error:
            print(f"{name:14} FAILED: {error}")
            failed = 1
            continue
        ptx = built.asm["ptx"]
        counts = f"wgmma {ptx.count('wgmma.mma_async')}, mma {ptx.count('mma.sync')}"
        is_large = built.metadata.shared > SHARED_LIMIT
        failed |= is_large
        print(
            f"{name:14} {resources(built.asm['cubin'])}, {built.metadata.shared} B shared, {counts}",
            "FAILED" * is_large,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
