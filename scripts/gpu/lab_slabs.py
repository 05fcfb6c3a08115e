"""Where a program of the experts' slabs spends its clocks, on one GPU: start, loop, end, and between programs.

    python -m scripts.gpu.lab_slabs --seconds 30        on the device
    python -m scripts.gpu.lab_slabs --dry               here: the texts with their stamps, compiled

16,352 rows of 112 experts at K3's widths. The kernel's text is the product's own with stamps of the clock written in;
they go behind the table of tiles. `x ideal`: clocks a unit over what wgmma needs. Then both products as they are, with
hidden in line or in a loop, tiles as they come or the biggest first: whether the results are the same, and last a table
of medians over rounds, each form once a round, the next one first, since a card that grows warm gets slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch import Tensor

from baltoro.bench.kernels.moe import INNER, LATENT, RESIDENT
from baltoro.bench.kernels.timing import graph_us
from baltoro.kernels.moe import slab_end_text, slab_text, slabs, tile_order
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_experts import MANY
from baltoro.kernels.moe.tile_layout import UNIT, padded
from scripts.gpu.lab_experts_cases import ACTIVATION, DEVICE, case, unwritten

EACH = 64  # bytes of a program's stamps


def stamped(is_first: bool, is_turned: bool) -> str:
    """The text, each program leaving four clocks and its multiprocessor behind the table."""
    kind = ACTIVATION[0] if is_first else 0
    lines = []
    for line in slabs.program(kind, is_first, is_first, is_turned).split("\n"):
        if line.startswith("UNIT"):
            lines.append("mov.u32 t1, %clock;")
        if line == ("DONE:" if is_turned else "bra DONE;"):
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


def launch(is_first: bool, is_turned: bool, experts: TiledExperts, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The product on garbage: stamps int32 [programs, 5], the rows of each, of those that had any."""
    from baltoro.kernels.moe import gluon_slabs

    order, table = tile_order.grouped(ids, RESIDENT, slab_end_text.MOST, slabs.ALIGN)
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
            width, len(order), *betas, TEXT=stamped(is_first, is_turned), OPERANDS=slab_text.constraints(),
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


def biggest_first(table: Tensor) -> Tensor:
    """A table of tiles with those of the same expert side by side, by the most rows that an expert's tiles have."""
    expert, size = table[0].long(), (table[2] - table[1]).long()
    most = torch.zeros(RESIDENT + 1, dtype=torch.int64, device=table.device)
    most.scatter_reduce_(0, expert, size, "amax")
    most[RESIDENT] = -1
    return table[:, torch.argsort(most[expert], descending=True, stable=True)].contiguous()


@dataclass
class Form:
    """A way to run both products; us of each by round."""

    name: str
    first: Callable[[], Tensor]
    second: Callable[[], Tensor]
    is_same: bool = True
    times: list[tuple[float, float]] = field(default_factory=list)


def forms(experts: TiledExperts, ids: Tensor) -> Iterator[Form]:
    """The first: hidden in line and tiles as they come."""
    order, table = tile_order.grouped(ids, RESIDENT, slab_end_text.MOST, slabs.ALIGN)
    x = torch.randn(padded(LATENT) // 64, len(order), 64, device=DEVICE, dtype=torch.bfloat16)
    first = partial(slabs.first, x, order=order, experts=experts, activation=ACTIVATION, is_ordered=True)
    hidden = first(table=table, is_turned=False)
    second = partial(slabs.second, hidden, order=order, experts=experts, pairs=ids.numel())
    for kind, tiles in (("as they come", table), ("biggest first", biggest_first(table))):
        for is_turned in (False, True):
            name = f"hidden {'in a loop' if is_turned else 'in line'}, tiles {kind}"
            form = Form(name, partial(first, table=tiles, is_turned=is_turned), partial(second, table=tiles))
            form.is_same = torch.equal(form.first()[:, order >= 0], hidden[:, order >= 0])
            form.is_same &= torch.equal(form.second(), second(table=table))
            yield form


def in_rounds(all_forms: Sequence[Form], time_of: Callable[[Callable[[], Tensor]], float], rounds: int) -> None:
    """Each form once a round, every round beginning with the next one."""
    for i in range(rounds):
        for k in range(len(all_forms)):
            form = all_forms[(i + k) % len(all_forms)]
            form.times.append((time_of(form.first), time_of(form.second)))


def table_of(all_forms: Sequence[Form]) -> Iterator[str]:
    """A line a form: medians, and by how much a form's sums differ from the first one's of the same round."""
    for form in all_forms:
        first, second = (median(us) for us in zip(*form.times, strict=True))
        gaps = [sum(us) - sum(others) for us, others in zip(form.times, all_forms[0].times, strict=True)]
        same = "the same" if form.is_same else "NOT THE SAME"
        yield (
            f"{form.name:42} first {first:7.1f} + second {second:6.1f} = {first + second:7.1f} us, "
            f"{median(gaps):+6.1f} ({min(gaps):+.1f} to {max(gaps):+.1f}), {same}"
        )


def compile_one(is_first: bool, is_turned: bool) -> str:
    """In a worker: run once, so that it lies in the cache, with its stamps and without."""
    try:
        experts, ids = unwritten(DEVICE), case("16352 rows", DEVICE).ids
        launch(is_first, is_turned, experts, ids)
        order, table = tile_order.grouped(ids, RESIDENT, slab_end_text.MOST, slabs.ALIGN)
        x = torch.randn(padded(LATENT if is_first else INNER) // 64, len(order), 64, device=DEVICE).bfloat16()
        if is_first:
            slabs.first(x, table, order, experts, ACTIVATION, is_ordered=True, is_turned=is_turned)
        else:
            slabs.second(x, table, order, experts, ids.numel())
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a report of any failure is the purpose
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def measure(seconds: float) -> None:
    """The lab."""
    begun, jobs = time.monotonic(), ((True, False), (True, True), (False, False))
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        wrong = list(pool.map(compile_one, *zip(*jobs, strict=True)))
    print(f"compiled at {time.monotonic() - begun:.0f} s", flush=True)
    experts, ids = unwritten(DEVICE), case("16352 rows", DEVICE).ids
    for scale in (experts.first_scale, experts.second_scale):
        scale.fill_(120)
    for one in (experts.first_packed, experts.second_packed):
        one.random_(0, 256)
    for (is_first, is_turned), why in zip(jobs, wrong, strict=True):
        name = ("first" if is_first else "second") + ", in a loop" * is_turned
        if why or time.monotonic() - begun > seconds:
            print(f"{name}: {why or 'time is up'}", flush=True)
            continue
        units = padded(LATENT if is_first else INNER) // UNIT
        print(f"{name}: " + "\n".join(lines(*launch(is_first, is_turned, experts, ids), units)), flush=True)
    if not any(wrong):
        all_forms = list(forms(experts, ids))
        in_rounds(all_forms, partial(graph_us, samples=5, inner=5), rounds=2 * len(all_forms))
        print("\n".join(table_of(all_forms)), flush=True)


def dry() -> int:
    """Compile for sm_90, and print of made-up stamps."""
    import triton

    from scripts.gpu.compile_experts import HOPPER, options_of, slab_source

    for is_first, is_turned in ((True, False), (True, True), (False, False)):
        source: Any = slab_source(is_first, is_rounded=False)
        names = source.fn.arg_names
        source.constants[(names.index("TEXT"),)] = stamped(is_first, is_turned)
        built: Any = triton.compile(source, target=HOPPER, options=options_of(MANY))
        print(is_first, is_turned, built.metadata.shared, built.asm["ptx"].count("%smid"))
    stamps = torch.tensor([[100 * i, 100 * i + 20, 100 * i + 80, 100 * i + 95, i % 3] for i in range(12)])
    print("\n".join(lines(stamps, torch.arange(1, 13), 28)))
    table = torch.tensor([[0, 1, 1, 2, RESIDENT], [0, 8, 24, 40, 0], [7, 24, 33, 56, 0]], dtype=torch.int32)
    print(biggest_first(table).tolist())
    made_up = [
        Form(name, partial(torch.ones, 1), partial(torch.zeros, 1)) for name in ("in line", "in a loop", "other")
    ]
    in_rounds(made_up, lambda launch: float(launch()) + len(made_up[0].times), rounds=6)
    print("\n".join(table_of(made_up)))
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
