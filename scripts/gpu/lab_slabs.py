"""Where a program of the experts' slabs spends its clocks, on one GPU: start, loop, end, and between programs.

    python -m scripts.gpu.lab_slabs --seconds 30        on the device
    python -m scripts.gpu.lab_slabs --dry               here: the texts with their stamps, compiled

16,352 rows of 112 experts at K3's widths. The kernel's text is the product's own with stamps of the clock written in;
they go behind the table of tiles. A line a product; `x ideal`: clocks a unit over what wgmma needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from baltoro.bench.kernels.moe import INNER, LATENT, RESIDENT
from baltoro.kernels.moe import slab_end_text, slab_text, slabs, tile_order
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_experts import MANY
from baltoro.kernels.moe.tile_layout import UNIT, padded
from scripts.gpu.lab_experts_cases import ACTIVATION, DEVICE, case, unwritten

EACH = 64  # bytes of a program's stamps


def stamped(is_first: bool) -> str:
    """The text, each program leaving four clocks and its multiprocessor behind the table."""
    kind = ACTIVATION[0] if is_first else 0
    lines = []
    for line in slabs.program(kind, is_first, is_first).split("\n"):
        if line.startswith("UNIT"):
            lines.append("mov.u32 t1, %clock;")
        if line == "bra DONE;":
            lines.insert(len(lines) - 1, LEFT)
        lines.append(line)
        if line == "mov.b32 $0, 0;":
            lines.append(".reg .b32 t0, t1, t2, t3, sm;\nmov.u32 t0, %clock;")
        if line.startswith("wgmma.wait_group.sync.aligned 0"):
            lines.append("mov.u32 t2, %clock;")
    return "\n".join(lines)


LEFT = """mov.u32 t3, %clock;
mov.u32 sm, %smid;
mov.u32 t, %ctaid.y;
mov.u32 s, %nctaid.x;
mad.lo.u32 t, t, s, block;
mov.u32 s, %nctaid.y;
mul.lo.u32 s, s, 12;
add.u32 s, s, 63;
and.b32 s, s, -64;
mad.lo.u32 s, t, 64, s;
cvt.u64.u32 wide, s;
add.u64 wide, wide, $2;
@lead st.global.v4.b32 [wide], {t0, t1, t2, t3};
@lead st.global.b32 [wide+16], sm;"""


def launch(is_first: bool, experts: TiledExperts, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The product on garbage: stamps int32 [programs, 5], the rows of each, of those that had any."""
    from baltoro.kernels.moe import gluon_slabs

    order, table = tile_order.grouped(ids, RESIDENT, slabs.MOST, slabs.ALIGN)
    columns, width = (padded(LATENT), padded(INNER)) if is_first else (padded(INNER), LATENT)
    one = experts.first if is_first else experts.second
    x = torch.randn(columns // 64, len(order), 64, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(max(len(order), ids.numel()) * width, device=DEVICE, dtype=torch.bfloat16)
    rows, tiles = one.packed.shape[1] * 8, table.shape[1]
    blocks, start = rows // slab_end_text.THREADS, (12 * tiles + 63) // 64 * 64 // 4
    kept = torch.zeros(start + blocks * tiles * EACH // 4, dtype=torch.int32, device=DEVICE)
    kept[: 3 * tiles] = table.flatten()
    betas: tuple[Any, ...] = ACTIVATION[1:] if is_first else (1.0, 1.0)
    for _ in range(3):
        gluon_slabs.slab_kernel[(blocks, tiles)](
            x, kept, order, one.packed.view(torch.int32), one.scale, out, RESIDENT, columns // UNIT, rows // 8,
            width, len(order), *betas, TEXT=stamped(is_first), OPERANDS=slab_text.constraints(),
            PIECES=slab_text.shared_bytes(slabs.STAGES) // 4096, num_warps=slab_end_text.THREADS // 32,
        )  # fmt: skip
    torch.cuda.synchronize()
    stamps = kept[start:].view(tiles, blocks, EACH // 4)[:, :, :5].cpu()
    sizes = (table[2] - table[1])[:, None].expand(tiles, blocks).cpu()
    used = (table[0] < RESIDENT).cpu()
    return stamps[used].flatten(0, 1), sizes[used].flatten()


def lines(stamps: Tensor, sizes: Tensor, units: int) -> Iterator[str]:
    """Means over programs."""
    t0, t1, t2, t3, sm = stamps.long().unbind(1)
    start, loop, end = (float(x.double().mean()) for x in (t1 - t0, t2 - t1, t3 - t2))
    yield f"programs {len(sm)}: start {start:.0f}, loop {loop:.0f}, end {end:.0f} clocks"
    rows = (sizes + 7) // 8 * 8
    for size in rows.unique().tolist():
        mine = rows == size
        each = float((t2 - t1)[mine].double().mean()) / units
        ideal = 16.0 * size
        yield (
            f"  {size:3d} rows, {int(mine.sum()):4d} programs: {each:6.0f} clocks a unit, {each / ideal:.2f} x ideal; "
            f"end {float((t3 - t2)[mine].double().mean()):.0f}"
        )
    gaps, busy = [], []
    for one in sm.unique():
        here = (sm == one).nonzero().flatten()
        here = here[t0[here].argsort()]
        gaps.append((t0[here][1:] - t3[here][:-1]).double().mean())
        busy.append((t3[here].max() - t0[here].min()).double())
    took = torch.stack(busy)
    yield f"  between programs {float(torch.stack(gaps).mean()):.0f}; a multiprocessor's whole {took.mean():.0f}, "
    yield f"  the longest {took.max():.0f}; ideal of all {float((16.0 * rows).sum()) * units / 132:.0f}"


def compile_one(is_first: bool) -> str:
    """In a worker: run once, so that it lies in the cache."""
    try:
        launch(is_first, unwritten(DEVICE), case("16352 rows", DEVICE).ids)
    except Exception as error:  # noqa: BLE001 - a report of any failure is the purpose
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def measure(seconds: float) -> None:
    begun, jobs = time.monotonic(), (True, False)
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        wrong = list(pool.map(compile_one, jobs))
    print(f"compiled at {time.monotonic() - begun:.0f} s", flush=True)
    experts, ids = unwritten(DEVICE), case("16352 rows", DEVICE).ids
    for scale in (experts.first_scale, experts.second_scale):
        scale.fill_(120)
    for one in (experts.first_packed, experts.second_packed):
        one.random_(0, 256)
    for is_first, why in zip(jobs, wrong, strict=True):
        name = "first" if is_first else "second"
        if why or time.monotonic() - begun > seconds:
            print(f"{name}: {why or 'time is up'}", flush=True)
            continue
        units = padded(LATENT if is_first else INNER) // UNIT
        print(f"{name}: " + "\n".join(lines(*launch(is_first, experts, ids), units)), flush=True)


def dry() -> int:
    """Compile for sm_90, and print of made-up stamps."""
    import triton

    from scripts.gpu.compile_experts import HOPPER, options_of, slab_source

    for is_first in (True, False):
        source: Any = slab_source(is_first, is_rounded=False)
        names = source.fn.arg_names
        source.constants[(names.index("TEXT"),)] = stamped(is_first)
        built: Any = triton.compile(source, target=HOPPER, options=options_of(MANY))
        print(is_first, built.metadata.shared, built.asm["ptx"].count("%smid"))
    stamps = torch.tensor([[100 * i, 100 * i + 20, 100 * i + 80, 100 * i + 95, i % 3] for i in range(12)])
    print("\n".join(lines(stamps, torch.arange(1, 13), 28)))
    return 0


def main() -> int:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.dry:
        return dry()
    measure(options.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
