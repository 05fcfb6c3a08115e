"""Compile the decode and fold kernels of asynchronous copies for Hopper, without a GPU: registers, shared memory.

PYTHONPATH=. python scripts/gpu/compile_rows.py
"""

from __future__ import annotations

import sys

import triton

from baltoro.kernels.kda import gluon_decode, gluon_fold
from baltoro.kernels.kda.tiles import Copied
from scripts.gpu.compile_kda import HOPPER, SHARED_LIMIT, resources, source

WIDE = ("x_ptr", "raw_ptr", "b_ptr", "gate_ptr", "v_ptr", "history_ptr", "out_ptr")
TYPES = dict.fromkeys(WIDE, "*bf16") | {"slots_ptr": "*i64", "accepted_ptr": "*i32"}
CHOICES = [("fold", Copied(64, 4, 2, 2)), ("decode", Copied(32, 4, 4, 3, 168))]


def compiled(name: str, choice: Copied) -> str:
    """What it takes."""
    kernel = gluon_fold.copied_fold_kernel if name == "fold" else gluon_decode.copied_decode_kernel
    options = choice.options()
    constants = {key: options.pop(key) for key in ("ROWS", "WARPS", "BUFFERS")} | (
        {"TAPS": 4} if name == "fold" else {}
    )
    built = triton.compile(source(kernel, constants, TYPES), target=HOPPER, options=options)
    shared = built.metadata.shared
    programs = min(SHARED_LIMIT // (shared + 1024), choice.programs)
    mark = "" if programs == choice.programs and shared <= SHARED_LIMIT else f"ONLY {programs} FIT"
    return f"{resources(built.asm['cubin'])}, {shared} B shared {mark}"


def main() -> int:
    """A line each."""
    for name, choice in CHOICES:
        print(name, choice, compiled(name, choice))
    return 0


if __name__ == "__main__":
    sys.exit(main())
