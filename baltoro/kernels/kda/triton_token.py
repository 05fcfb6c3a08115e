# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton functions that the KDA kernels share: one token's convolution, norm, gate, step of the state, output norm.

`advance` is the only place where a state moves by a token; decode and fold both call it on tiles of one shape with the
same number of warps, so that they sum in the same order and their states are equal in every bit.
All arithmetic is in FP32: bf16 is converted as it is loaded (Triton's CPU interpreter computes garbage in bf16).
Needs triton; import it where a kernel is launched, not before. Source: spec/k3.md 3.4, spec/kernels.md A.1, H.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def conv_token(x, weight, history, channel, live, history_row, TAPS: tl.constexpr):
    """SiLU of the convolution at the token whose inputs `x` points to (per channel); rounded to its dtype, as FP32."""
    value = tl.load(x, mask=live, other=0.0)
    total = value.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=live, other=0.0)
    for j in tl.static_range(TAPS - 1):
        past = tl.load(history + j * history_row + channel, mask=live, other=0.0).to(tl.float32)
        total += past * tl.load(weight + channel * TAPS + j, mask=live, other=0.0)
    return (total * sigmoid(total)).to(value.dtype).to(tl.float32)


@triton.jit
def shifted_history(x, history, channel, live, count, history_row, x_row, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """What the history holds after `count` more inputs (x points to the first of them, per channel): [ROWS, channels],
    of which the first TAPS - 1 rows count. Load all of it, pass a barrier, and only then store it in place."""
    place = tl.arange(0, ROWS)[:, None] + count
    is_row = tl.arange(0, ROWS)[:, None] < TAPS - 1
    is_old = place < TAPS - 1
    old = tl.load(history + place * history_row + channel[None, :], mask=is_row & is_old & live[None, :], other=0.0)
    new_place = tl.where(is_old, 0, place - (TAPS - 1))
    new = tl.load(x[None, :] + new_place * x_row, mask=is_row & (place >= TAPS - 1) & live[None, :], other=0.0)
    return tl.where(is_old, old, new.to(old.dtype))


@triton.jit
def store_history(tile, history, channel, live, history_row, TAPS: tl.constexpr, ROWS: tl.constexpr):
    """Write what `shifted_history` made."""
    row = tl.arange(0, ROWS)[:, None]
    mask = (row < TAPS - 1) & live[None, :]
    tl.store(history + row * history_row + channel[None, :], tile, mask=mask)


@triton.jit
def advance(state, k, v, decay, beta):
    """One token: state [V, K] -> (decayed state, correction u [V], new state). The order of sums is this one."""
    decayed = state * decay[None, :]
    u = beta * (v - tl.sum(decayed * k[None, :], axis=1))
    return decayed, u, decayed + u[:, None] * k[None, :]


@triton.jit
def gated_norm(o, gate, weight, values, eps):
    """RMSNorm over the last dimension times weight and sigmoid(gate); o, gate [.., V], padding of o zero."""
    mean = tl.sum(o * o, axis=-1, keep_dims=True) / values
    return o * (1.0 / tl.sqrt(mean + eps)) * weight * sigmoid(gate)
