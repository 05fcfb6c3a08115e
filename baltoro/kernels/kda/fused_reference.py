"""All of a KDA layer between its projections, for decode and for a draft window, in plain torch.

    decode   short conv -> gate -> L2 norm -> recurrence -> gated RMSNorm; one token a request, in place
    verify   the same for a window of G tokens a request; writes no state, records what `fold` needs
    fold     advances states and histories by the first n recorded tokens of each window, all layers

`decode` is the composition of the operations' own forms and the CPU row of the table; `verify` and `fold` are `decode`
repeated, and the oracles of the kernels. Channels of x, weight and history are q | k | v.
Source: spec/k3.md 3.4, spec/kernels.md B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.conv.reference import short_conv_step
from baltoro.kernels.kda.decode import step
from baltoro.kernels.kda.gate import log_decay
from baltoro.kernels.norm.reference import gated_rms_norm, l2_norm
from baltoro.kernels.precision import acc_dtype


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """What the fused forms need of a KDA layer.

    conv [2HK + HV, W], A_log [H], dt_bias [H, K], norm [V], all in the accumulate dtype. `lower_bound` None: softplus.
    """

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    norm_eps: float
    lower_bound: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class Window:
    """What `verify` records of G tokens of N requests, for one layer; with a leading L for all layers.

    x      [N, G, 2HK + HV]  inputs of the convolution, in the activation dtype
    k      [N, G, H, K]      normalised keys, accumulate dtype
    v      [N, G, H, V]      after the convolution, activation dtype
    decay  [N, G, H, K]      exp of the log-decay, as the kernel used it
    beta   [N, G, H]
    """

    x: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @staticmethod
    def empty(
        num_requests: int, window: int, *, heads: int, keys: int, values: int, dtype: torch.dtype,
        device: str | torch.device, layers: int | None = None,
    ) -> Window:  # fmt: skip
        """Uninitialised, for one layer or (with `layers`) for all."""
        lead = (num_requests, window) if layers is None else (layers, num_requests, window)
        acc, width = acc_dtype(dtype), heads * (2 * keys + values)
        shapes = ((width,), (heads, keys), (heads, values), (heads, keys), (heads,))
        kinds = (dtype, acc, dtype, acc, acc)
        return Window(
            *(torch.empty(*lead, *shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True))
        )

    def layer(self, index: int) -> Window:
        """One layer of a window of all layers: views."""
        return Window(self.x[index], self.k[index], self.v[index], self.decay[index], self.beta[index])


def split_heads(x: Tensor, heads: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [.., H, K] and v [.., H, V] of channels q | k | v."""
    q, k, v = torch.split(x, [heads * keys, heads * keys, x.shape[-1] - 2 * heads * keys], dim=-1)
    q, k, v = (torch.unflatten(part, -1, (heads, -1)) for part in (q, k, v))
    return q, k, v


def decode(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    gate: Tensor,
    weights: MixerWeights,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """One token per request.

    x [N, 2HK + HV] projections; raw [N, H, K] gate before bias; b [N, H] logits of beta; gate [N, H, V] output gate
    (of full or low rank: the product itself); history [U, W-1, 2HK + HV]; state [U, H, V, K]; slots [N].
    Returns [N, H, V] in x.dtype. Writes history[slots] and state[slots] in place; other slots are untouched. Rows
    of slot 0, the sink, may repeat, and what they return means nothing.
    """
    check(x, raw, b, gate, weights, history, state)
    heads, keys = raw.shape[1:]
    q, k, v = split_heads(short_conv_step(x, weights.conv, history, slots), heads, keys)
    decay = log_decay(raw, weights.A_log, weights.dt_bias, lower_bound=weights.lower_bound)
    beta = torch.sigmoid(b.to(decay.dtype))
    out = step(l2_norm(q), l2_norm(k), v, decay, beta, state, slots, scale=weights.scale)
    return gated_rms_norm(out, gate, weights.norm, weights.norm_eps, x.dtype)


def verify(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    gate: Tensor,
    weights: MixerWeights,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    window: Window,
) -> Tensor:
    """G tokens per request, in order: `decode`'s arguments with a dimension G after N -> [N, G, H, V] in x.dtype.

    Reads history and state, writes neither; fills `window`.
    """
    heads, keys = raw.shape[2:]
    past, matrix = history[slots], state[slots]
    rows = torch.arange(len(slots), device=slots.device)
    outputs = []
    for t in range(x.shape[1]):
        _, k, v = split_heads(short_conv_step(x[:, t], weights.conv, past.clone(), rows), heads, keys)
        decay = log_decay(raw[:, t], weights.A_log, weights.dt_bias, lower_bound=weights.lower_bound)
        recorded = (x[:, t], l2_norm(k), v, decay.exp(), torch.sigmoid(b[:, t].to(decay.dtype)))
        for kept, value in zip((window.x, window.k, window.v, window.decay, window.beta), recorded, strict=True):
            kept[:, t] = value
        outputs.append(decode(x[:, t], raw[:, t], b[:, t], gate[:, t], weights, past, matrix, rows))
    return torch.stack(outputs, dim=1)


def fold(
    window: Window, histories: Sequence[Tensor], states: Sequence[Tensor], slots: Tensor, accepted: Tensor
) -> None:
    """Advance every layer by the first accepted[n] (0 .. G) tokens of request n; `window` has a leading L.

    histories, states: one per layer, as in `decode`. Writes [slots] of both in place; a request with none accepted,
    and slot 0, are not written.
    """
    for index, (history, state) in enumerate(zip(histories, states, strict=True)):
        layer = window.layer(index)
        for n, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
            if slot == 0:
                continue
            keep, matrix = history.shape[1], state[slot]
            for t in range(count):
                matrix = matrix * layer.decay[n, t].unsqueeze(-2)
                read = (matrix @ layer.k[n, t].unsqueeze(-1)).squeeze(-1)
                update = layer.beta[n, t].unsqueeze(-1) * (layer.v[n, t].to(matrix.dtype) - read)
                matrix = matrix + update.unsqueeze(-1) * layer.k[n, t].unsqueeze(-2)
            state[slot] = matrix
            history[slot] = torch.cat([history[slot], layer.x[n, :count]])[count : count + keep]


def check(
    x: Tensor, raw: Tensor, b: Tensor, gate: Tensor, weights: MixerWeights, history: Tensor, state: Tensor
) -> None:
    """Errors: ShapeError where shapes of `decode` (or, with a G after N, of `verify`) disagree."""
    (heads, keys), values, lead = raw.shape[-2:], gate.shape[-1], x.shape[:-1]
    width, taps = weights.conv.shape
    is_good = raw.shape[:-2] == gate.shape[:-2] == b.shape[:-1] == lead and gate.shape[-2] == b.shape[-1] == heads
    is_good = is_good and x.shape[-1] == width == history.shape[-1] == heads * (2 * keys + values)
    if not is_good or history.shape[1] != taps - 1 or state.shape[1:] != (heads, values, keys):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, raw, b, gate, weights.conv, history, state))
        raise ShapeError(f"x, raw, b, gate, conv weight, history, state {shapes} do not fit each other")
