"""The KDA recurrence token by token, in plain torch: the oracle of every other form, and the CPU decode step.

Per head, with S the [K, V] matrix of the papers, q and k L2-normalised:

    S <- diag(exp(g)) S;   u = beta (v - S' k);   S <- S + k u';   o = S' (scale q)

States are stored V-first, [.., H, V, K], the transpose of S. All in the accumulate dtype, o too.
Source: spec/k3.md 3.4 steps 4 and 8, spec/kernels.md A.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.norm.reference import l2_norm as l2_norm
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Borders, Spans


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    spans: Spans,
    state: Tensor | None,
    scale: float,
    borders: Borders = (),
) -> tuple[Tensor, Tensor]:
    """Run packed spans one token at a time.

    q, k, g [T, H, K]; v [T, H, V]; beta [T, H]; state [N, H, V, K] or None (zeros), not written.
    Returns o [T, H, V] and states [N + B, H, V, K]: after each span, then at each of the B borders.
    """
    q, k, v, g, beta, state = prepare(q, k, v, g, beta, spans=spans, state=state)
    spans.check_borders(borders)
    outputs, finals, found = [], [], dict.fromkeys(borders, state)
    for n, first in enumerate(spans.offsets[:-1]):
        matrix = state[n]
        for t in range(first, spans.offsets[n + 1]):
            matrix, o = _advance(matrix, q[t] * scale, k[t], v[t], g[t], beta[t])
            outputs.append(o)
            if (n, t + 1 - first) in found:
                found[n, t + 1 - first] = matrix
        finals.append(matrix)
    return torch.stack(outputs), torch.stack(finals + [found[border] for border in borders])


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    scale: float,
) -> Tensor:
    """One token per request: q, k, g [N, H, K], v [N, H, V], beta [N, H], state [U, H, V, K], slots [N] -> o [N, H, V].

    Writes state[slots] in place; other slots are untouched. Two equal slots are the caller's bug.
    """
    acc = state.dtype
    matrix, o = _advance(state[slots], q.to(acc) * scale, k.to(acc), v.to(acc), g.to(acc), beta.to(acc))
    state[slots] = matrix
    return o


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, spans: Spans, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Check shapes, cast to the accumulate dtype, make the zero state. Errors: ShapeError."""
    check_shapes(q, k, v, g, beta, spans=spans, state=state)
    acc = acc_dtype(torch.promote_types(v.dtype, g.dtype))
    if state is None:
        state = torch.zeros(len(spans), *v.shape[1:], k.shape[-1], dtype=acc, device=k.device)
    return q.to(acc), k.to(acc), v.to(acc), g.to(acc), beta.to(acc), state.to(acc)


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, spans: Spans, state: Tensor | None
) -> None:
    """Errors: ShapeError if the arguments of `recurrent` do not fit each other."""
    (num_tokens, heads, keys), values = k.shape, v.shape[-1]
    is_good = q.shape == k.shape == g.shape and v.shape == (num_tokens, heads, values)
    if not is_good or beta.shape != (num_tokens, heads) or num_tokens != spans.num_tokens:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, g, beta))
        raise ShapeError(f"q, k, v, g, beta {shapes} for {spans.num_tokens} tokens")
    if state is not None and state.shape != (len(spans), heads, values, keys):
        raise ShapeError(f"state {tuple(state.shape)} is not [N, H, V, K] = {(len(spans), heads, values, keys)}")


def _advance(matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Decay, read, correct, write, query. matrix [..., H, V, K]; the rest [..., H, *]; q already scaled."""
    matrix = matrix * g.exp().unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v - (matrix @ k.unsqueeze(-1)).squeeze(-1))
    matrix = matrix + u.unsqueeze(-1) * k.unsqueeze(-2)
    return matrix, (matrix @ q.unsqueeze(-1)).squeeze(-1)
