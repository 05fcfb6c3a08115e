"""The depth mix of a token in one launch on Hopper, in Gluon: eight blocks of a cluster share its channels.

Each keeps its channels of all sources in registers; the sums for the scores, and the square for the norm, cross the
cluster through shared memory: two exchanges instead of a second launch that loads everything again.
Triton 3.6 has no sums across a cluster, so the exchange is PTX. All tensors have a leading axis, the block.
In and out: see `fast.py`, which launches it. Importing this needs triton; the interpreter does not know Gluon.
Source: spec/kernels.md D.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCKS: gl.constexpr = gl.constexpr(8)
WARPS = 8
BY_BLOCK = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
TILE = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 1, WARPS], [2, 1, 0], BY_BLOCK))
ROW = gl.constexpr(gl.SliceLayout(1, TILE.value))
SUMS = gl.constexpr(gl.SliceLayout(2, TILE.value))
BLOCK = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, TILE.value)))
SOURCE = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, TILE.value)))
CHANNEL = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, TILE.value)))
# a value a lane, the same in every warp; where there are fewer values than lanes, the lanes repeat them
LANES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0], [one[:2] for one in BY_BLOCK]))


def exchange(name: str, count: int, end: str) -> str:
    """PTX: write `count` values a lane, wait for the whole cluster, add up what the eight blocks have in that place.

    In the same order everywhere. Results $0.., values after them.
    """
    read = [f"mapa.shared::cluster.u32 there, here, {block};" for block in range(8)]
    for block, at in enumerate(read):
        for n in range(count):
            at += f" ld.shared::cluster.f32 one, [there+{4 * n}]; add.f32 sum{n}, sum{n}, one;"
        read[block] = at
    every = range(count)
    return "\n".join([
        "{", f".shared .align 16 .b8 exchanged_{name}[{128 * count}];", ".reg .b32 here, there, lane; .reg .f32 one;",
        *(f".reg .f32 sum{n}; mov.f32 sum{n}, 0f00000000;" for n in every),
        "mov.u32 lane, %laneid;", f"mov.u32 here, exchanged_{name};", f"mad.lo.u32 here, lane, {4 * count}, here;",
        *(f"st.shared.f32 [here+{4 * n}], ${count + n};" for n in every),
        "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;", *read,
        *(f"mov.f32 ${n}, sum{n};" for n in every), end, "}",
    ])  # fmt: skip


FIRST_SUM = gl.constexpr(exchange("scores", 2, ""))
# nobody may leave while another still reads its memory; the wait for that is LEAVE
LAST_SUM = gl.constexpr(exchange("norm", 1, "barrier.cluster.arrive.release.aligned;"))
LEAVE = gl.constexpr("barrier.cluster.wait.acquire.aligned; // dummy $0")


@gluon.jit
def cluster_kernel(
    bank, prefix, update, query, gain, total, out, bank_source, bank_token, eps, norm_eps,
    L: gl.constexpr, D: gl.constexpr, BLOCK_L: gl.constexpr, STEP: gl.constexpr, SPAN: gl.constexpr,
    HAS_PREFIX: gl.constexpr, HAS_UPDATE: gl.constexpr, HAS_NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (token), a cluster of 8 blocks with STEP channels each. Arguments as `triton_kernels.read_kernel`."""
    token = gl.program_id(0).to(gl.int64)
    block, source, c = gl.arange(0, BLOCKS, BLOCK), gl.arange(0, BLOCK_L, SOURCE), gl.arange(0, SPAN, CHANNEL)
    block_of_row = gl.arange(0, BLOCKS, gl.SliceLayout(1, ROW))
    channel = gl.arange(0, SPAN, gl.SliceLayout(0, ROW))
    d = block_of_row[:, None] * STEP + channel[None, :]
    mask = (channel < STEP)[None, :] & (d < D)
    wide_query = gl.load(query + d, mask=mask, other=0).to(gl.float32)
    scale = gl.full([BLOCKS, SPAN], 1.0, gl.float32, ROW)
    if HAS_NORM:
        scale = gl.load(gain + d, mask=mask, other=0).to(gl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    whole = block[:, None, None] * STEP + c[None, None, :]
    is_real = (c < STEP)[None, None, :] & (whole < D) & (source < L)[None, :, None]
    rows = bank + source.to(gl.int64)[None, :, None] * bank_source + token * bank_token
    tile = gl.load(rows + whole, mask=is_real, other=0)
    at = token * D + d
    if HAS_PREFIX or HAS_UPDATE:
        if HAS_PREFIX and HAS_UPDATE:
            kept = gl.load(prefix + at, mask=mask, other=0).to(gl.float32)
            kept = (kept + gl.load(update + at, mask=mask, other=0).to(gl.float32)).to(tile.dtype)
            gl.store(total + at, kept, mask=mask)
        elif HAS_PREFIX:
            kept = gl.load(prefix + at, mask=mask, other=0)
        else:
            kept = gl.load(update + at, mask=mask, other=0)
        tile = gl.where((source == L)[None, :, None], kept[:, None, :], tile)
    wide = tile.to(gl.float32)
    dots, squares = gl.sum(wide * wide_query[:, None, :], axis=2), gl.sum(wide * wide, axis=2)
    dots, squares = gl.inline_asm_elementwise(
        FIRST_SUM, "=f,=f,f,f", [gl.convert_layout(dots, LANES), gl.convert_layout(squares, LANES)],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    dots, squares = gl.convert_layout(dots, SUMS), gl.convert_layout(squares, SUMS)
    count: gl.constexpr = L + 1 if HAS_PREFIX or HAS_UPDATE else L
    score = gl.where((source < count)[None, :], dots * gl.rsqrt(squares / D + eps), float("-inf"))
    weight = gl.exp(score - gl.max(score, axis=1)[:, None])
    weight = weight / gl.sum(weight, axis=1)[:, None]
    mixed = gl.sum(wide * weight[:, :, None], axis=1)
    if HAS_NORM:
        norm = gl.sum(mixed * mixed, axis=1)
        norm = gl.inline_asm_elementwise(LAST_SUM, "=f,f", [norm], dtype=gl.float32, is_pure=False, pack=1)
        mixed = mixed * gl.rsqrt(norm / D + norm_eps)[:, None] * scale
    gl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)
    if not HAS_NORM:
        gl.inline_asm_elementwise("barrier.cluster.arrive.release.aligned; // dummy $0", "=r", [], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
    gl.inline_asm_elementwise(LEAVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
