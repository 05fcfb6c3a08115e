"""The depth mix of a token in one launch: a cluster of programs shares the row out and sums through its own memory.

Each thread keeps its channels of all sources in registers. Sums cross the cluster twice, written straight into the
shared memory of all its programs: squares and products with the query, which give the weights, then the squares of the
mix. In Gluon, since a tensor is cut over the cluster by hand; what crosses lanes and programs is PTX, since Triton 3.6
fails to build its own conversion between programs. In and out: see `fast.py`, which launches it. Importing this needs
triton. Source: spec/kernels.md D.
"""

# ruff: noqa: RUF005 - Triton adds tuples; it does not unpack them
from __future__ import annotations

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def row_layout(programs: int, warps: int, wide: int) -> gl.BlockedLayout:
    """Of [programs, warps, 32, wide] numbers: `wide` in a thread, the first dimension over the cluster."""
    over_cluster = [[1 << bit, 0, 0, 0] for bit in range(programs.bit_length() - 1)]
    return gl.BlockedLayout([1, 1, 1, wide], [1, 1, 32, 1], [1, warps, 1, 1], [3, 2, 1, 0], cga_layout=over_cluster)


@gluon.constexpr_function
def smaller(a: int, b: int) -> int:
    """Of two constants."""
    return min(a, b)


@gluon.constexpr_function
def shuffle(kind: str, lane: int) -> str:
    """PTX: $0 is the $1 of another lane."""
    return f"shfl.sync.{kind}.b32 $0, $1, {lane}, 31, -1;"


@gluon.jit
def from_lane(x, KIND: gl.constexpr, LANE: gl.constexpr):
    """x of lane LANE ("idx"), or of the one whose number differs in bit LANE ("bfly")."""
    return gl.inline_asm_elementwise(shuffle(KIND, LANE), "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def halved(a, b, lane, STEP: gl.constexpr):
    """Half of a sum over lanes: of a where bit STEP of the lane is clear, of b where it is set."""
    is_set = (lane & STEP) != 0
    return gl.where(is_set, b, a) + from_lane(gl.where(is_set, a, b), "bfly", STEP)


@gluon.jit
def dealt(rows, query, lane, COUNT: gl.constexpr):
    """Sums over the channels of a warp: in lane i of the squares of rows[i], in 16 + i of its product with the query.

    Each step sums two numbers at a time and leaves half as many: 24 exchanges for 18 numbers, where sums one by one
    take 90. A lane past COUNT has something else.
    """
    left = ()
    for i in gl.static_range(COUNT):
        x = rows[i].to(gl.float32)
        left = left + (halved(gl.sum(x * x, 3), gl.sum(x * query, 3), lane, 16),)
    for step in gl.static_range(4):
        left = paired(left, lane, 8 >> step, COUNT)
    return left[0]


@gluon.jit
def paired(sums, lane, HALF: gl.constexpr, COUNT: gl.constexpr):
    """Of at most 2 HALF sums, the i-th and the (HALF + i)-th in one, by bit HALF of the lane."""
    fewer = ()
    for i in gl.static_range(smaller(HALF, COUNT)):
        if i + HALF < smaller(2 * HALF, COUNT):
            fewer = fewer + (halved(sums[i], sums[i + HALF], lane, HALF),)
        else:
            fewer = fewer + (sums[i] + from_lane(sums[i], "bfly", HALF),)
    return fewer


@gluon.jit
def sources(
    bank, bank_source, prefix_ptr, update_ptr, at, mask,
    L: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_UPDATE: gl.constexpr,
):  # fmt: skip
    """The rows that are mixed, as a tuple: the bank's and, if there is one, the running sum as it is kept."""
    rows = ()
    for _ in gl.static_range(L):
        rows = rows + (gl.load(bank, mask=mask, other=0),)
        bank += bank_source
    if HAS_PREFIX and HAS_UPDATE:
        kept = gl.load(prefix_ptr + at, mask=mask, other=0)
        total = kept.to(gl.float32) + gl.load(update_ptr + at, mask=mask, other=0).to(gl.float32)
        rows = rows + (total.to(kept.dtype),)
    elif HAS_PREFIX:
        rows = rows + (gl.load(prefix_ptr + at, mask=mask, other=0),)
    elif HAS_UPDATE:
        rows = rows + (gl.load(update_ptr + at, mask=mask, other=0),)
    return rows


@gluon.jit
def blended(rows, score, mixed, COUNT: gl.constexpr):
    """Softmax of the scores in lanes 0 to COUNT - 1, and the sum of the rows by it, on top of `mixed`, which is 0."""
    scores = ()
    peak = from_lane(score, "idx", 0)
    for i in gl.static_range(COUNT):
        one = from_lane(score, "idx", i)
        peak = gl.maximum(peak, one)
        scores = scores + (one,)
    whole = peak * 0.0
    for i in gl.static_range(COUNT):
        weight = gl.exp(scores[i] - peak)
        whole += weight
        mixed += gl.expand_dims(weight, 3) * rows[i].to(gl.float32)
    return mixed * gl.expand_dims(1.0 / whole, 3)


@gluon.jit
def cluster_mix_kernel(
    bank_ptr, prefix_ptr, update_ptr, query_ptr, gain_ptr, total_ptr, out_ptr, bank_source, bank_token, eps, norm_eps,
    L: gl.constexpr, D: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr, WIDE: gl.constexpr,
    ROW: gl.constexpr, OPENING: gl.constexpr, LANE_SUMS: gl.constexpr, WARP_SUMS: gl.constexpr,
    HAS_PREFIX: gl.constexpr, HAS_UPDATE: gl.constexpr, HAS_NORM: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A cluster a token. Channels [PROGRAMS, WARPS, 32, WIDE], the first dimension over the cluster: layout ROW.

    L sources in the bank and, if there is a prefix or an update, their sum: 16 at most.
    """
    THREAD: gl.constexpr = gl.SliceLayout(3, ROW)  # a number a thread
    program = gl.arange(0, PROGRAMS, gl.SliceLayout(1, gl.SliceLayout(2, THREAD)))[:, None, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, THREAD)))[None, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, THREAD)))[None, None, :]
    lane = lane + 0 * program + 0 * warp
    space = gl.inline_asm_elementwise(OPENING, "=&r,r", [lane], gl.int32, is_pure=False, pack=1)
    wide = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ROW))))
    d = gl.expand_dims(((program * WARPS + warp) * 32 + lane) * WIDE, 3) + wide[None, None, None, :]
    mask = d < D
    token = gl.program_id(0).to(gl.int64)
    query = gl.load(query_ptr + d, mask=mask, other=0).to(gl.float32)  # weights: the kernel in front may still run
    scale = query
    if HAS_NORM:
        scale = gl.load(gain_ptr + d, mask=mask, other=0).to(gl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    at = token * D + d
    rows = sources(bank_ptr + token * bank_token + d, bank_source, prefix_ptr, update_ptr, at, mask,
                   L, HAS_PREFIX, HAS_UPDATE)  # fmt: skip
    COUNT: gl.constexpr = L + 1 if HAS_PREFIX or HAS_UPDATE else L

    shares = dealt(rows, query, lane, COUNT)
    sums = gl.inline_asm_elementwise(LANE_SUMS, "=&f,f,r", [shares, space], gl.float32, is_pure=False, pack=1)
    is_dot = lane >= 16
    other = from_lane(sums, "bfly", 16)
    score = gl.where(is_dot, sums, other) * gl.rsqrt(gl.where(is_dot, other, sums) / D + eps)

    mixed = blended(rows, score, gl.zeros([PROGRAMS, WARPS, 32, WIDE], gl.float32, ROW), COUNT)
    if HAS_NORM:
        share = gl.sum(mixed * mixed, 3)
        for step in gl.static_range(5):
            share += from_lane(share, "bfly", 16 >> step)
        norm = gl.inline_asm_elementwise(WARP_SUMS, "=&f,f,r", [share, space], gl.float32, is_pure=False, pack=1)
        mixed = mixed * gl.expand_dims(gl.rsqrt(norm / D + norm_eps), 3) * scale
    gl.store(out_ptr + at, mixed.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_PREFIX and HAS_UPDATE:
        gl.store(total_ptr + at, rows[L], mask=mask)
