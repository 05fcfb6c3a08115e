# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Triton functions that the KDA kernels share: gates, the step of the state, vectors in the state's layout.

A tile of the state is a tuple of NP parts [R, PART], R rows of V and PART neighbouring keys each: a warp then covers
128 / PART rows with 16-byte accesses, and a sum over K is a chain of FMA over the parts, four values in a thread and
log2(PART / 4) shuffles. The more parts, the fewer shuffles and the more registers for vectors over K.
`advance` is the only place where a state moves by a token; decode and fold both call it. Its products and sums are
written as the FMA they are, and a row's order of sums depends on PART alone (on neither R nor the number of warps, as
long as a thread holds four values of a part), so states of both kernels are equal in every bit.
All arithmetic is in FP32: bf16 is converted as it is loaded (Triton's CPU interpreter computes garbage in bf16).
Needs triton; import it where a kernel is launched, not before. Source: spec/k3.md 3.4, spec/kernels.md A.1, H.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# by the program's first thread alone
FETCH = tl.constexpr(
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.u32 $0, 0; "
    "@p cp.async.bulk.prefetch.L2.global [$1], $2; }"
)

LINE = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Where launches are dependent: what comes after may start, and none of what came before is still under way."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(start, BYTES: tl.constexpr):
    """Have BYTES, a multiple of 16, brought into the L2 cache from an address divisible by 16. Not in the interpreter:
    it has no assembly."""
    size = tl.full([], BYTES, tl.int32)
    tl.inline_asm_elementwise(FETCH, "=r,l,r", [start.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_lines(start, stride, count, VALUES: tl.constexpr):
    """As `fetch`, up to 8 rows of up to 128 values at a distance of `stride`: an address every 128 bytes."""
    step: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    row, place = tl.arange(0, 8)[:, None], tl.arange(0, 4)[None, :] * step
    # places past the end repeat the first one
    at = start + tl.minimum(row, count - 1) * stride + tl.where(place < VALUES, place, 0)
    tl.inline_asm_elementwise(LINE, "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sigmoid(x):
    """Right for any finite x: where e^-x overflows the quotient is 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), also where e^x is below the resolution of 1."""
    small = tl.exp(-tl.abs(x))
    wide = 1.0 + small
    rest = tl.where(wide == 1.0, small, tl.log(wide) * small / tl.where(wide == 1.0, 1.0, wide - 1.0))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def log_decay(raw, bias, a_log, bound, IS_BOUNDED: tl.constexpr):
    """As `gate.log_decay`."""
    rate = tl.exp(a_log)
    if IS_BOUNDED:
        g = bound * sigmoid(rate * (raw + bias))
    else:
        g = -rate * softplus(raw + bias)
    return g


@triton.jit
def load_taps(weight, channel, live, TAPS: tl.constexpr, BT: tl.constexpr):
    """Weights [C, TAPS] of a tile of channels [A, B] -> [A, B, BT], a channel's taps in one access.
    BT: the power of two for TAPS."""
    tap = tl.arange(0, BT)[None, None, :]
    mask = live[:, :, None] & (tap < TAPS)
    return tl.load(weight + channel[:, :, None] * TAPS + tap, mask=mask, other=0.0)


@triton.jit
def split_taps(every, TAPS: tl.constexpr):
    """[A, B, BT] -> a tuple of TAPS tiles."""
    tap = tl.arange(0, every.shape[2])[None, None, :]
    taps = ()
    for j in tl.static_range(TAPS):
        taps += (tl.sum(tl.where(tap == j, every, 0.0), axis=2),)
    return taps


@triton.jit
def cut(x, COUNT: tl.constexpr):
    """[N] -> a tuple of COUNT (1, 2, 4, 8) neighbouring pieces."""
    if COUNT == 1:
        pieces = (x,)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2)), (1, 0)))
        pieces = cut(first, COUNT // 2) + cut(second, COUNT // 2)
    return pieces


@triton.jit
def glue(pieces, START: tl.constexpr, COUNT: tl.constexpr):
    """The inverse of `cut` for COUNT pieces from START on."""
    if COUNT == 1:
        whole = pieces[START]
    else:
        first, second = glue(pieces, START, COUNT // 2), glue(pieces, START + COUNT // 2, COUNT // 2)
        whole = tl.reshape(tl.permute(tl.join(first, second), (1, 0)), (2 * first.shape[0],))
    return whole


@triton.jit
def load_state(rows, row_mask, K: tl.constexpr, PART: tl.constexpr, NP: tl.constexpr):
    """rows: pointers [R] to rows of a state -> its tile."""
    key = tl.arange(0, PART)
    parts = ()
    for p in tl.static_range(NP):
        mask = row_mask[:, None] & (key + p * PART < K)[None, :]
        parts += (tl.load(rows[:, None] + (key + p * PART)[None, :], mask=mask, other=0.0),)
    return parts


@triton.jit
def store_state(rows, row_mask, parts, K: tl.constexpr, PART: tl.constexpr, NP: tl.constexpr):
    """Write a tile back."""
    key = tl.arange(0, PART)
    for p in tl.static_range(NP):
        mask = row_mask[:, None] & (key + p * PART < K)[None, :]
        tl.store(rows[:, None] + (key + p * PART)[None, :], parts[p], mask=mask)


@triton.jit
def load_keys(start, K: tl.constexpr, PART: tl.constexpr, NP: tl.constexpr, other):
    """A vector over K in memory -> its parts."""
    key = tl.arange(0, PART)
    parts = ()
    for p in tl.static_range(NP):
        parts += (tl.load(start + p * PART + key, mask=key + p * PART < K, other=other),)
    return parts


@triton.jit
def dot_keys(parts, vector, NP: tl.constexpr):
    """Sum over K of a tile (or vector) times a vector."""
    if len(parts[0].shape) == 1:
        total = parts[0] * vector[0]
        for p in tl.static_range(1, NP):
            total = tl.fma(parts[p], vector[p], total)
        total = tl.sum(total, axis=0)
    else:
        total = parts[0] * vector[0][None, :]
        for p in tl.static_range(1, NP):
            total = tl.fma(parts[p], vector[p][None, :], total)
        total = tl.sum(total, axis=1)
    return total


@triton.jit
def advance(state, k, v, decay, beta, NP: tl.constexpr):
    """One token: a tile -> (decayed tile, correction u [R], new tile). The order of sums is this one."""
    decayed = ()
    for p in tl.static_range(NP):
        decayed += (state[p] * decay[p][None, :],)
    u = beta * (v - dot_keys(decayed, k, NP))
    new = ()
    for p in tl.static_range(NP):
        new += (tl.fma(u[:, None], k[p][None, :], decayed[p]),)
    return decayed, u, new
