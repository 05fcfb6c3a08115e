"""Compile the KDA kernels for sm_90 at K3's shape, without a GPU: registers, stack (spills), matrix instructions.

    python -m scripts.gpu.compile_kda

Needs triton, and TRITON_INTERPRET unset. What does not compile is reported and makes the exit status 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baltoro.kernels.kda import tiles, triton_chunk, triton_decode, triton_fold, triton_verify

HOPPER = GPUTarget("cuda", 90, 32)
BF16, INT = "*bf16", "*i32"
TOKEN_TYPES = dict.fromkeys(
    ("x_ptr", "raw_ptr", "b_ptr", "gate_ptr", "history_ptr", "out_ptr", "v_ptr", "kept_x_ptr"), BF16
)
TOKEN_TYPES |= {"slots_ptr": "*i64", "accepted_ptr": INT}
TOKEN_TYPES |= dict.fromkeys(("history_slot", "state_slot", "state_layer", "history_layer"), "i64")
CHUNK_TYPES = dict.fromkeys(("chunks_ptr", "segments_ptr", "order_ptr", "spans_ptr", "fragments_ptr"), INT)
CHUNK_TYPES |= dict.fromkeys(("v_ptr", "w_ptr", "u_ptr", "k_out_ptr", "q_in_ptr", "a_ptr", "out_ptr"), BF16)
HEAD = {"H": 12, "K": 128, "V": 128, "TAPS": 4}
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
CHUNK = {"K": 128, "V": 128, "C": 64}


def cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str], dict[str, Any]]]:
    """(name, kernel, constants, types, options), as `fused` and `prefill` launch them."""
    for is_bounded in (True, False):
        for programs in (12, 24576):
            yield "decode", *_head(triton_decode.decode_kernel, tiles.decode(128, programs), is_bounded)
            yield "verify", *_head(triton_verify.verify_kernel, tiles.verify(128, programs), is_bounded)
    yield "fold", *_head(triton_fold.fold_kernel, tiles.fold(128), True)
    for first in (16, 1):
        kinds = {"BLOCK": 64, "FIRST": first, "KIND": "bf16", "INVERSE_KIND": "tf32"}
        yield f"prepare {first}", triton_chunk.prepare_kernel, CHUNK | kinds, CHUNK_TYPES, {"num_warps": 8}
    for rows in (32, 64):
        scan, fragment = {"BV": rows, "IS_CUT": True, "KIND": "bf16"}, {"BV": rows, "KIND": "tf32"}
        yield f"scan {rows}", triton_chunk.scan_kernel, CHUNK | scan, CHUNK_TYPES, {"num_warps": 4}
        yield f"fragment {rows}", triton_chunk.fragment_kernel, CHUNK | fragment, CHUNK_TYPES, {"num_warps": 4}
    merge = {"K": 128, "V": 128, "BV": 16, "KIND": "tf32x3"}
    yield "merge", triton_chunk.merge_kernel, merge, CHUNK_TYPES, {"num_warps": 8}


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
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


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
    for name, kernel, constants, types, options in cases():
        try:
            built = triton.compile(source(kernel, constants, types), target=HOPPER, options=options)
        except (triton.CompilationError, RuntimeError) as error:
            print(f"{name:14} FAILED: {error}")
            failed = 1
            continue
        ptx = built.asm["ptx"]
        counts = f"wgmma {ptx.count('wgmma.mma_async')}, mma {ptx.count('mma.sync')}"
        print(f"{name:14} {resources(built.asm['cubin'])}, {built.metadata.shared} B shared, {counts}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
