"""PTX of what follows the loop of `slab_text`: activation, and the way to memory through the stages' shared memory.

A thread has, of each of its two blocks' sums, rows lane / 4 and lane / 4 + 8 of its warp's 16 rows of weights (of the
first product: gate and up of one column of hidden) and, of every eight rows of inputs, those 2 (lane % 4) and one more.
Slabs of hidden are written in their order and leave by two copies; plain rows (parts, or hidden that will be rounded)
leave 16 bytes a lane, a row a warp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

MOST = 160  # rows of inputs a tile
THREADS = 256
SLAB = MOST * 128  # bytes of a slab in shared memory, whatever the number of rows
PLACES_AT = 128  # beyond the stages, behind the barriers
PITCH = 528  # bytes of a plain row: 256 columns, and 16 so that eight rows lie in different banks
SCALE = 4294967296.0  # what the factors of the conversion leave out
LOG2E = 1.4426950408889634
EDGE = 43.0  # exponents of 2 beyond which tanh is one


def number(x: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + struct.pack(">f", x).hex().upper()


def ends(rows: int, kind: int, is_first: bool, is_ordered: bool, name: dict[str, str]) -> Iterator[str]:
    """For a number of rows; the sums in ca and cb are complete."""
    yield ".reg .b32 r<4>, to, m, i;\n.reg .b64 goal;\n.reg .f32 v<4>, es, ep, eq, by, a, b, d, p1, q1;"
    if not is_first:
        yield f"mad.lo.u32 to, tid, 4, bells;\nsetp.lt.u32 p, tid, {MOST};"
        yield f"@p st.shared.b32 [to+{PLACES_AT}], order;"
    yield "bar.sync 0;"  # all have read their inputs
    if is_first:
        yield from constants(kind, name)
    if is_first and is_ordered:
        yield from _slabs(rows, kind, name)
    else:
        yield from _rows(rows, kind, is_first, name)


def constants(kind: int, name: dict[str, str]) -> Iterator[str]:
    """What `activated` takes, of the betas."""
    yield f"mov.f32 es, {number(-LOG2E * SCALE)};"
    if kind:
        yield f"mov.f32 a, {number(-2 * LOG2E * SCALE)};"
        yield f"div.rn.f32 ep, a, {name['beta']};\ndiv.rn.f32 eq, a, {name['linear_beta']};"
        yield f"mov.f32 by, {name['linear_beta'] if kind == 1 else number(SCALE)};\nmul.f32 by, by, {name['beta']};"


def activated(kind: int, gate: str, up: str, out: str) -> Iterator[str]:
    """out = `tile_kernels.activated` of sums: tanh(x) = (1 - e) / (1 + e) with e = exp(-2 x), all with one division."""
    yield f"mul.f32 d, {gate}, es;\nex2.approx.ftz.f32 d, d;\nadd.f32 d, d, {number(1)};"
    if kind == 0:
        yield f"rcp.approx.ftz.f32 d, d;\nmul.f32 a, {gate}, {number(SCALE)};\nmul.f32 a, a, d;"
        yield f"mul.f32 b, {up}, {number(SCALE)};\nmul.f32 {out}, a, b;"
        return
    for source, exponent, bound in ((gate, "ep", "p1"), (up, "eq", "q1"))[: 2 if kind == 1 else 1]:
        yield f"mul.f32 {bound}, {source}, {exponent};\nmin.NaN.f32 {bound}, {bound}, {number(EDGE)};"
        yield f"max.NaN.f32 {bound}, {bound}, {number(-EDGE)};\nex2.approx.ftz.f32 {bound}, {bound};"
    yield f"sub.f32 a, {number(1)}, p1;\nadd.f32 p1, p1, {number(1)};\nmul.f32 d, d, p1;"
    if kind == 1:
        yield f"sub.f32 b, {number(1)}, q1;\nadd.f32 q1, q1, {number(1)};\nmul.f32 d, d, q1;\nmul.f32 a, a, b;"
    else:
        yield f"mul.f32 a, a, {up};"
    yield f"rcp.approx.ftz.f32 d, d;\nmul.f32 a, a, by;\nmul.f32 {out}, a, d;"


def _hidden(kind: int, eight: int, block: str, out: str) -> Iterator[str]:
    """Two numbers of hidden, of rows of inputs 8 eight + 2 (lane % 4) and one more, in a register."""
    c = [f"c{block}{4 * eight + n}" for n in range(4)]
    yield from activated(kind, c[0], c[2], "v0")
    yield from activated(kind, c[1], c[3], "v1")
    yield f"cvt.rn.bf16x2.f32 {out}, v1, v0;"


def _slabs(rows: int, kind: int, name: dict[str, str]) -> Iterator[str]:
    """Eight columns of hidden a warp and block, turned so that a lane has two of them of one row of inputs."""
    yield "shr.u32 t, lane, 2;\nand.b32 s, lane, 3;\nand.b32 m, warp, 1;\nmad.lo.u32 s, m, 4, s;\nxor.b32 s, s, t;"
    yield "mad.lo.u32 to, t, 128, smem;\nmad.lo.u32 to, s, 16, to;"
    yield "shr.u32 t, warp, 2;\nmad.lo.u32 to, t, 8, to;"
    yield f"shr.u32 t, warp, 1;\nand.b32 t, t, 1;\nmad.lo.u32 to, t, {SLAB}, to;"
    for eight in range(rows // 8):
        for n, block in enumerate("ab"):
            yield from _hidden(kind, eight, block, f"r{n}")
            yield f"movmatrix.sync.aligned.m8n8.trans.b16 r{n}, r{n};"
        yield f"st.shared.v2.b32 [to+{1024 * eight}], {{r0, r1}};"
    yield "fence.proxy.async.shared::cta;\nbar.sync 0;"
    yield f"shl.b32 bytes, size, 7;\nmul.lo.u32 t, block, 2;\nmul.wide.u32 goal, t, {name['slab_rows']};"
    yield "cvt.u64.u32 wide, first;\nadd.u64 goal, goal, wide;\nshl.b64 goal, goal, 7;"
    yield f"add.u64 goal, goal, {name['out']};"
    yield "@lead cp.async.bulk.global.shared::cta.bulk_group [goal], [smem], bytes;\nadd.u64 goal, goal, slab_wide;"
    yield f"add.u32 t, smem, {SLAB};\n@lead cp.async.bulk.global.shared::cta.bulk_group [goal], [t], bytes;"
    yield "@lead cp.async.bulk.commit_group;\n@lead cp.async.bulk.wait_group.read 0;"


def _rows(rows: int, kind: int, is_first: bool, name: dict[str, str]) -> Iterator[str]:
    """Matrices of eight by eight, turned while they are written; then whole rows."""
    columns = 8 if is_first else 16
    yield f"shr.u32 m, lane, {3 if is_first else 4};\nand.b32 m, m, 1;\nshr.u32 i, lane, 3;\nand.b32 i, i, 1;"
    yield "shr.u32 t, warp, 2;\nshl.b32 t, t, 3;\nmad.lo.u32 t, m, 4, t;\nand.b32 s, warp, 3;\nadd.u32 t, t, s;"
    yield f"mad.lo.u32 to, t, {2 * columns}, smem;\nand.b32 t, lane, 7;\nmad.lo.u32 to, t, {PITCH}, to;"
    if not is_first:
        yield "mad.lo.u32 to, i, 16, to;"
    for eight in range(rows // 8):
        if is_first:
            for n, block in enumerate("ab"):
                yield from _hidden(kind, eight, block, f"r{n}")
            kept = "x2.trans.shared.b16", "r0, r1"
        else:
            for n in range(4):
                c = [f"c{'ab'[n // 2]}{4 * eight + 2 * (n % 2) + k}" for k in range(2)]
                yield f"mul.f32 v0, {c[0]}, {number(SCALE)};\nmul.f32 v1, {c[1]}, {number(SCALE)};"
                yield f"cvt.rn.bf16x2.f32 r{n}, v1, v0;"
            kept = "x4.trans.shared.b16", "r0, r1, r2, r3"
        yield f"stmatrix.sync.aligned.m8n8.{kept[0]} [to+{8 * PITCH * eight}], {{{kept[1]}}};"
    yield "bar.sync 0;"
    yield from _to_memory(rows, 16 * columns, is_first, name)


def _to_memory(rows: int, columns: int, is_first: bool, name: dict[str, str]) -> Iterator[str]:
    """Eight rows at a time, a warp each; beyond the width nothing is written."""
    yield f"mul.lo.u32 s, block, {columns};\nsub.s32 t, {name['width']}, s;\nmin.s32 t, t, {columns};"
    yield "mov.u32 i, lane;\nshl.b32 m, i, 3;\nsetp.lt.s32 q, m, t;\nadd.u32 s, s, m;"
    yield "mul.wide.u32 wide, s, 2;\nmov.u32 s, warp;"  # s: the first of its rows
    yield f"add.u64 wide, wide, {name['out']};\nshl.b32 m, {name['width']}, 1;"
    yield f"mad.lo.u32 to, s, {PITCH}, smem;\nmad.lo.u32 to, i, 16, to;\nmad.lo.u32 pair, s, 4, bells;"
    for eight in range(rows // 8):
        yield f"add.u32 t, s, {8 * eight};\nsetp.lt.and.u32 p, t, size, q;"
        if is_first:
            yield "add.u32 i, t, first;"
        else:
            yield f"ld.shared.b32 i, [pair+{PLACES_AT + 32 * eight}];"
        yield f"mad.wide.u32 goal, i, m, wide;\n@p ld.shared.v4.b32 {{r0, r1, r2, r3}}, [to+{8 * PITCH * eight}];"
        yield "@p st.global.v4.b32 [goal], {r0, r1, r2, r3};"
