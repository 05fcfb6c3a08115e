# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment, misc"
"""Triton kernel of what stands before KDA's chunk form: convolution, SiLU, L2 norm, log-decay and beta.

A program has a job (tokens of one span, or a point whose history is kept) of one unit: a head of q, k or v, or of the
gate. No two programs write one place, and history is another tensor than the inputs, so none waits for another.
All arithmetic is in FP32 and rounds where the reference does.
Launched by `fast_enter`; needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_token import log_decay, sigmoid


@triton.jit
def keep(
    x, history, after, x_row, row, point, place, span, channel, live, C, TAPS: tl.constexpr, HAS_HISTORY: tl.constexpr
):
    """The inputs before a point of a span, of one head's channels: older ones from the span's history."""
    for j in tl.static_range(TAPS - 1):
        token = j - (TAPS - 1)
        at, is_here = (row + token).to(tl.int64) * x_row + channel, place + token >= 0
        value = tl.load(x + at, mask=live & is_here, other=0.0).to(tl.float32)
        if HAS_HISTORY:
            line = span.to(tl.int64) * (TAPS - 1) + place + j
            value += tl.load(history + line * C + channel, mask=live & (place + token < 0), other=0.0).to(tl.float32)
        line = point.to(tl.int64) * (TAPS - 1) + j
        tl.store(after + line * C + channel, value.to(after.dtype.element_ty), mask=live)


@triton.jit
def mix(
    x, history, weight, planes, x_row, row, count, place, span, channel, live, start, is_normed, eps, C,
    STEP: tl.constexpr, TAPS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, HAS_HISTORY: tl.constexpr,
):  # fmt: skip
    """Convolution, SiLU and (q, k) L2 norm of a head's channels. planes + start: the head of token 0, STEP apart."""
    kind = planes.dtype.element_ty
    first, d = tl.arange(0, GROUPS) * ROWS, tl.arange(0, channel.shape[0])
    taps, inputs = (), ()
    for j in tl.static_range(TAPS):
        taps += (tl.load(weight + channel * TAPS + j, mask=live, other=0.0).to(tl.float32)[None, :],)
    for o in tl.static_range(ROWS + TAPS - 1):
        token = first + (o - (TAPS - 1))
        at = (row + token).to(tl.int64)[:, None] * x_row + channel[None, :]
        is_here = ((place + token >= 0) & (token < count))[:, None] & live[None, :]
        value = tl.load(x + at, mask=is_here, other=0.0).to(tl.float32)
        # only a job's first inputs can be older than its span
        if HAS_HISTORY and o < TAPS - 1:
            line = (span.to(tl.int64) * (TAPS - 1) + place + token + (TAPS - 1)) * C
            is_old = (place + token < 0)[:, None] & live[None, :]
            value += tl.load(history + line[:, None] + channel[None, :], mask=is_old, other=0.0).to(tl.float32)
        inputs += (value,)
    for r in tl.static_range(ROWS):
        mixed = inputs[r] * taps[0]
        for j in tl.static_range(1, TAPS):
            mixed = tl.fma(inputs[r + j], taps[j], mixed)
        y = (mixed * sigmoid(mixed)).to(kind).to(tl.float32)
        inverse = tl.where(is_normed, tl.rsqrt(tl.sum(y * y, axis=1) + eps), 1.0)
        token = first + r
        at = start + (row + token).to(tl.int64)[:, None] * STEP + d[None, :]
        tl.store(planes + at, (y * inverse[:, None]).to(kind), mask=(token < count)[:, None] & live[None, :])


@triton.jit
def gate(
    raw, logits, a_log, bias, decay, beta, raw_row, logits_row, row, count, head, live, bound,
    H: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """Log-decay and beta of a head."""
    d = tl.arange(0, live.shape[0])
    rate = tl.load(a_log + head).to(tl.float32)
    shift = tl.load(bias + head * K + d, mask=live, other=0.0).to(tl.float32)[None, :]
    for r in tl.static_range(ROWS):
        token = tl.arange(0, GROUPS) * ROWS + r
        line, is_here = (row + token).to(tl.int64), token < count
        mask = is_here[:, None] & live[None, :]
        value = tl.load(raw + line[:, None] * raw_row + head * K + d[None, :], mask=mask, other=0.0).to(tl.float32)
        g = log_decay(value, shift, rate, bound, IS_BOUNDED)
        tl.store(decay + (line[:, None] * H + head) * K + d[None, :], g, mask=mask)
        logit = tl.load(logits + line * logits_row + head, mask=is_here, other=0.0).to(tl.float32)
        tl.store(beta + line * H + head, sigmoid(logit), mask=is_here)


@triton.jit(do_not_specialize=["num_tokens"])
def enter_kernel(
    x, history, weight, raw, logits, a_log, bias, jobs, planes, after, decay, beta,
    x_row, raw_row, logits_row, num_tokens, bound, eps,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, HAS_HISTORY: tl.constexpr, IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """Program (job, unit), the units of a job after each other: heads of q, k, v, then those of the gate."""
    C: tl.constexpr = 3 * H * K
    job, unit = tl.program_id(0) // (4 * H), tl.program_id(0) % (4 * H)
    row, count = tl.load(jobs + job * 4), tl.load(jobs + job * 4 + 1)
    place, span = tl.load(jobs + job * 4 + 2), tl.load(jobs + job * 4 + 3)
    kind, head = unit // H, unit % H
    d = tl.arange(0, BLOCK)
    live, channel = d < K, unit * K + d
    if count < 0:
        if kind < 3:
            keep(x, history, after, x_row, row, -1 - count, place, span, channel, live, C, TAPS, HAS_HISTORY)
    elif kind < 3:
        start = (kind.to(tl.int64) * num_tokens * H + head) * K
        mix(
            x, history, weight, planes, x_row, row, count, place, span, channel, live, start, kind < 2, eps, C,
            H * K, TAPS, GROUPS, ROWS, HAS_HISTORY,
        )  # fmt: skip
    else:
        gate(
            raw, logits, a_log, bias, decay, beta, raw_row, logits_row, row, count, head, live, bound,
            H, K, GROUPS, ROWS, IS_BOUNDED,
        )  # fmt: skip
