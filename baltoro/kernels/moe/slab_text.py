"""PTX of the product of tiled MXFP4 experts with slabs of inputs: the loop over the columns, for each number of rows.

Written out, because wgmma takes any multiple of eight rows and Gluon's tensors have powers of two. A program has 256
rows of weights, two warpgroups with two blocks of 64 each, and up to MOST rows of inputs; each of the four operands of
a unit (block, half of the columns) is converted while the product of the one before it runs. Per unit and 256 x N
weights and inputs wgmma needs 16 N clocks, the conversion about 600 issue slots, and 17 + N/4 kB come from the second
cache: blocks of 128 rows ask for 29 bytes a clock of each multiprocessor at N = 160, near all that it gives.

Slabs: bf16 [columns / 64, rows, 64], columns in the order of `tile_moves.arrange` for runs of two, and the eight runs
of 16 bytes of a row where `run ^ row % 8` says: as wgmma's swizzle of 128 bytes wants them, so that whole rows of a
slab are copied as they lie, by one instruction. Rows of an expert begin at multiples of 8.
No triton here. `slab_end_text` has what follows the loop; `gluon_slabs` the kernel around both.
"""

from __future__ import annotations

from collections.abc import Iterator

from baltoro.errors import InvariantError
from baltoro.kernels.moe.slab_end_text import MOST, PITCH, PLACES_AT, SLAB, THREADS, ends
from baltoro.kernels.moe.weave_text import pair_lines

CLASSES = tuple(range(8, MOST + 1, 8))  # rows of inputs
STAGE = 2 * SLAB
AHEAD = 4  # units of weights that are asked for into the second cache
INPUTS = (
    "x", "table", "order", "packed", "scales", "out",
    "num_experts", "num_units", "num_row_tiles", "width", "slab_rows", "beta", "linear_beta",
)  # fmt: skip


def shared_bytes(stages: int) -> int:
    """Stages, barriers, places of the rows, and what is lost to alignment, in pieces of 4096."""
    return -(-(stages * STAGE + PLACES_AT + 4 * MOST + 1024) // 4096) * 4096


def text(stages: int, kind: int, is_first: bool, is_ordered: bool) -> str:
    """The program, of eight warps: outputs $0 (nothing), inputs as `INPUTS`."""
    if not MOST * PITCH <= stages * STAGE <= 8 * STAGE:
        raise InvariantError(f"{stages} stages: whole rows leave through their memory; barriers are for eight")
    name = {word: f"${i + 1}" for i, word in enumerate(INPUTS)}
    lines = ["{", *_registers(), "mov.b32 $0, 0;", *_place(name), *_barriers(stages)]
    lines += [*_TILE, *_pointers(name)]
    if not is_first:
        lines += _places(name)
    for stage in range(stages):
        lines += [f"setp.gt.and.u32 p, {name['num_units']}, {stage}, lead;", *_fetch(f"smem+{stage * STAGE}", stage)]
    lines += _asked("a") + _asked("b")
    for rows in CLASSES[:-1]:
        lines += [f"setp.le.u32 p, n8, {rows // 8};", f"@p bra ROWS{rows};"]
    lines.append(f"bra ROWS{MOST};")
    for rows in CLASSES:
        lines += [f"ROWS{rows}:", "{", *_loop(rows, stages, name)]
        lines += [*ends(rows, kind, is_first, is_ordered, name), "}", "bra DONE;"]
    return "\n".join([*lines, "DONE:", "}"])


def constraints() -> str:
    """Of its operands."""
    return ",".join(["=r"] + ["l"] * 6 + ["r"] * 5 + ["f"] * 2)


def _registers() -> list[str]:
    return [
        ".reg .pred p, q, lead, first_warp, arrives, some, always;",
        ".reg .b32 tid, lane, warp, block, expert, first, end, n8, size, smem, bells, bytes, slab, t, s, u, at, bell;",
        ".reg .b32 phase, at_before, bell_before, phase_before, pair, order;",
        ".reg .b32 low_words, row_words, low_scales, row_scales;",
        ".reg .b64 wide, from, from2, xs, slab_wide, unit_wide, words, scale, here, ahead, ahead_step, desc;",
        *(f".reg .b32 {n}<8>;" for n in ("wa", "wb")),
        *(f".reg .b32 {n}<2>;" for n in ("ga", "gb", "fa", "fb")),
        *(f".reg .b32 {n}<16>;" for n in ("ka", "kb")),
    ]


def _place(name: dict[str, str]) -> list[str]:
    """What tile, which rows; nothing to do beyond the last one."""
    return [
        "mov.u32 tid, %tid.x;", "and.b32 lane, tid, 31;", "shr.u32 warp, tid, 5;", "mov.u32 block, %ctaid.x;",
        "mov.u32 t, %ctaid.y;", "mov.u32 s, %nctaid.y;",
        f"mad.wide.u32 wide, t, 4, {name['table']};", "ld.global.u32 expert, [wide];",
        "mad.wide.u32 wide, s, 4, wide;", "ld.global.u32 first, [wide];",
        "mad.wide.u32 wide, s, 4, wide;", "ld.global.u32 end, [wide];",
        f"setp.ge.u32 p, expert, {name['num_experts']};", "@p bra DONE;",
        "sub.u32 size, end, first;", "add.u32 n8, size, 7;", "shr.u32 n8, n8, 3;",
        "mov.u32 smem, global_smem;", "add.u32 smem, smem, 1023;", "and.b32 smem, smem, -1024;",
        "mov.pred always, 1;", "setp.eq.u32 lead, tid, 0;", "setp.lt.u32 first_warp, tid, 32;",
    ]  # fmt: skip


def _barriers(stages: int) -> list[str]:
    """`full` of each stage at bells, `empty`, for which every warp rings, 64 bytes on."""
    lines = [f"add.u32 bells, smem, {stages * STAGE};"]
    for stage in range(stages):
        lines.append(f"@lead mbarrier.init.shared::cta.b64 [bells+{8 * stage}], 1;")
        lines.append(f"@lead mbarrier.init.shared::cta.b64 [bells+{64 + 8 * stage}], {THREADS // 32};")
    return [*lines, "fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;", "bar.sync 0;"]


# t: the first of a block's tiles of eight rows that is the warp's; of the other block 8 tiles on, both with the one
# after it
_TILE = ("shl.b32 t, block, 5;", "shr.u32 s, warp, 2;", "mad.lo.u32 t, s, 16, t;", "and.b32 s, warp, 3;",
         "shl.b32 s, s, 1;", "add.u32 t, t, s;")  # fmt: skip


def _places(name: dict[str, str]) -> list[str]:
    """Which pair the tile's row is that is the thread's: asked for here, put into shared memory after the loop."""
    return [
        "mov.u32 t, tid;", "setp.lt.u32 p, t, size;", "add.u32 t, t, first;",
        f"mad.wide.u32 wide, t, 8, {name['order']};", "mov.u32 order, 0;", "@p ld.global.nc.u32 order, [wide];",
    ]  # fmt: skip


def _pointers(name: dict[str, str]) -> list[str]:
    """Where the program's inputs begin, and the thread's words and scale bytes."""
    tiles, units = name["num_row_tiles"], name["num_units"]
    return [
        f"mad.lo.u32 t, expert, {tiles}, t;",
        "shl.b32 bytes, n8, 10;",  # of a slab
        f"mul.wide.u32 slab_wide, {name['slab_rows']}, 128;", "add.u64 unit_wide, slab_wide, slab_wide;",
        f"mad.wide.u32 xs, first, 128, {name['x']};",
        f"mul.wide.u32 wide, t, {units};",
        "mul.lo.u64 words, wide, 512;", f"add.u64 words, words, {name['packed']};",
        "mul.lo.u64 scale, wide, 32;", f"add.u64 scale, scale, {name['scales']};",
        f"mul.lo.u32 row_words, {units}, 512;", f"mul.lo.u32 row_scales, {units}, 32;",
        # lanes 0 to 15: 128 bytes each of the four tiles' words; 16 to 19: scales of the four
        "shr.u32 t, lane, 2;", "setp.lt.u32 p, lane, 16;", "and.b32 s, lane, 3;", "selp.b32 t, t, s, p;",
        "and.b32 t, t, 3;", "shr.u32 pair, t, 1;", "and.b32 t, t, 1;", "mad.lo.u32 t, pair, 8, t;",
        "selp.b32 low_words, row_words, row_scales, p;", "selp.b64 ahead, words, scale, p;",
        "mad.wide.u32 ahead, t, low_words, ahead;", "shl.b32 s, s, 7;", "selp.b32 s, s, 0, p;",
        "cvt.u64.u32 wide, s;", "add.u64 ahead, ahead, wide;", "selp.b64 ahead_step, 512, 32, p;",
        "setp.lt.u32 some, lane, 20;",
        *(f"add.u64 ahead, ahead, ahead_step;\nsetp.gt.and.u32 q, {units}, {n}, some;\n"
          "@q prefetch.global.L2 [ahead];" for n in range(1, AHEAD)),
        "mad.wide.u32 words, lane, 16, words;", "cvt.u64.u32 wide, lane;", "add.u64 scale, scale, wide;",
    ]  # fmt: skip


def _fetch(to: str, stage: int | None = None) -> list[str]:
    """Where p: the next unit's slabs to `to`; stage of the barrier, or that of the unit before."""
    bell = "bell_before" if stage is None else f"bells+{8 * stage}"
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return [
        "shl.b32 t, bytes, 1;",
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bell}], t;",
        "add.u64 from2, xs, slab_wide;",
        *([f"mov.b32 t, {to};"] if "+" not in to else [f"add.u32 t, {to.replace('+', ', ')};"]),
        f"@p {copy} [t], [xs], bytes, [{bell}];",
        f"add.u32 t, t, {SLAB};",
        f"@p {copy} [t], [from2], bytes, [{bell}];",
        "add.u64 xs, xs, unit_wide;",
    ]


def _asked(block: str) -> list[str]:
    """Words and scale bytes of a block's two tiles; those of other warps lie between the blocks'."""
    load, byte = "ld.global.nc.L1::no_allocate.v4.b32", "ld.global.nc.L1::no_allocate.u8"
    lines, tile = [], 0 if block == "a" else 8
    for kind, row, base in (("w", "row_words", "words"), ("g", "row_scales", "scale")):
        for i in range(2):
            lines.append(f"mad.wide.u32 here, {row}, {tile + i}, {base};")
            if kind == "w":
                lines.append(f"{load} {{{', '.join(f'w{block}{4 * i + n}' for n in range(4))}}}, [here];")
            else:
                lines.append(f"{byte} g{block}{i}, [here];")
    return lines


def _converted(block: str, half: int) -> list[str]:
    """16 registers of operand: four steps of 16 columns (two words, word), each (row, row + 8), then 8 columns on."""
    lines = []
    if half == 0:
        for i in range(2):
            lines += [f"add.u32 f{block}{i}, g{block}{i}, 94;", f"min.u32 f{block}{i}, f{block}{i}, 255;",
                      f"mul.lo.u32 f{block}{i}, f{block}{i}, 0x00800080;"]  # fmt: skip
    for i in range(2):
        for two in range(2):
            one, other = f"w{block}{4 * i + 2 * two}", f"w{block}{4 * i + 2 * two + 1}"
            for word in range(2):
                for low in range(2):
                    to = f"k{block}{4 * (2 * two + word) + 2 * low + i}"
                    lines += pair_lines(4 * word + 2 * half + low, one, other, f"f{block}{i}", to)
    return lines


def _product(rows: int, block: str, half: int) -> list[str]:
    """A half's four steps, begun; then the product before it has ended."""
    sums = ", ".join(f"c{block}{i}" for i in range(rows // 2))
    lines = ["shr.u32 t, at, 4;", f"add.u32 t, t, {(1 << 16) + half * SLAB // 16};", "wgmma.fence.sync.aligned;"]
    for step in range(4):
        operand = ", ".join(f"k{block}{4 * step + i}" for i in range(4))
        lines += [
            *(["add.u32 t, t, 2;"] if step else []),
            "mov.b64 desc, {t, 0x40000040};",
            f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 "
            f"{{{sums}}}, {{{operand}}}, desc, always, 1, 1, 0;",
        ]
    return [*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"]


def _waited(label: str, bell: str, parity: str) -> list[str]:
    return [f"{label}:", f"mbarrier.try_wait.parity.shared::cta.b64 p, [{bell}], {parity};", f"@!p bra {label};"]


def _refilled(rows: int, stages: int, units: str) -> Iterator[str]:
    """The first warp puts a unit to come where the unit before was."""
    yield f"add.u32 t, u, {stages - 1};\nsetp.lt.and.u32 q, t, {units}, first_warp;\nand.pred q, q, some;"
    yield f"@!q bra NEXT{rows};"
    yield from _waited(f"EMPTY{rows}", "bell_before+64", "phase_before")
    yield "mov.pred p, lead;"
    yield from _fetch("at_before")
    yield f"NEXT{rows}:"


def _loop(rows: int, stages: int, name: dict[str, str]) -> Iterator[str]:
    """All units; sums of both blocks in ca and cb."""
    units = name["num_units"]
    yield from (f".reg .f32 c{block}<{rows // 2}>;" for block in "ab")
    yield from (f"mov.f32 c{block}{i}, 0f00000000;" for block in "ab" for i in range(rows // 2))
    yield from ("mov.u32 u, 0;", "mov.b32 at, smem;", "mov.b32 bell, bells;", "mov.u32 phase, 0;")
    yield from ("mov.b32 at_before, smem;", "mov.b32 bell_before, bells;", "mov.u32 phase_before, 0;", f"UNIT{rows}:")
    yield from _converted("a", 0)
    yield from _waited(f"FULL{rows}", "bell", "phase")
    yield "setp.ne.u32 some, u, 0;"
    yield from _product(rows, "a", 0)
    # the unit before has been read
    yield from ("setp.eq.and.u32 arrives, lane, 0, some;",
                "@arrives mbarrier.arrive.shared::cta.b64 _, [bell_before+64];")  # fmt: skip
    yield from _converted("b", 0)
    yield from _product(rows, "b", 0)
    yield from _refilled(rows, stages, units)
    yield from _converted("a", 1)
    yield f"add.u32 t, u, 1;\nsetp.lt.u32 q, t, {units};\nselp.b64 wide, 512, 0, q;\nadd.u64 words, words, wide;"
    yield "selp.b64 wide, 32, 0, q;\nadd.u64 scale, scale, wide;\nadd.u64 ahead, ahead, ahead_step;"
    yield from _asked("a")
    yield f"add.u32 t, u, {AHEAD};\nsetp.lt.u32 q, t, {units};\nsetp.lt.and.u32 q, lane, 20, q;"
    yield "@q prefetch.global.L2 [ahead];"
    yield from _product(rows, "a", 1)
    yield from _converted("b", 1)
    yield from _asked("b")
    yield from _product(rows, "b", 1)
    yield "mov.b32 at_before, at;\nmov.b32 bell_before, bell;\nmov.b32 phase_before, phase;"
    yield f"add.u32 at, at, {STAGE};\nadd.u32 bell, bell, 8;\nadd.u32 t, bells, {8 * stages};\nsetp.eq.u32 q, bell, t;"
    yield "@q mov.b32 at, smem;\n@q mov.b32 bell, bells;\n@q xor.b32 phase, phase, 1;"
    yield f"add.u32 u, u, 1;\nsetp.lt.u32 q, u, {units};\n@q bra UNIT{rows};"
    yield "wgmma.wait_group.sync.aligned 0;"
