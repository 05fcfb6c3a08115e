"""Compile the fold of asynchronous copies for Hopper, without a GPU: registers, shared memory.

PYTHONPATH=. python scripts/gpu/compile_rows.py
"""

from __future__ import annotations

import sys

import triton

from baltoro.kernels.kda import gluon_fold
from baltoro.kernels.kda.tiles import Copied
from scripts.gpu.compile_kda import HOPPER, SHARED_LIMIT, resources, source

WIDE = ("x_ptr", "raw_ptr", "b_ptr", "gate_ptr", "v_ptr", "history_ptr", "out_ptr")
TYPES = dict.fromkeys(WIDE, "*bf16") | {"slots_ptr": "*i64", "accepted_ptr": "*i32"}
CHOICES = [Copied(64, 4, 2, 2), Copied(32, 4, 2, 4, 128)]


def compiled(choice: Copied) -> str:
    """What it takes."""
    options = choice.options()
    constants = {"TAPS": 4} | {key: options.pop(key) for key in ("ROWS", "WARPS", "BUFFERS")}
    built = triton.compile(source(gluon_fold.copied_fold_kernel, constants, TYPES), target=HOPPER, options=options)
    shared = built.metadata.shared
    programs = min(SHARED_LIMIT // (shared + 1024), choice.programs)
    mark = "" if programs == choice.programs and shared <= SHARED_LIMIT else f"ONLY {programs} FIT"
    return f"{resources(built.asm['cubin'])}, {shared} B shared {mark}"


def main() -> int:
    """A line each."""
    for choice in CHOICES:
        print(choice, compiled(choice))
    return 0


if __name__ == "__main__":
    sys.exit(main())
