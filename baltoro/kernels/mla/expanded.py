"""Attention of packed spans over keys and values that were expanded from the latent rows, for inference.

In: q [T, H, Dn + Dr]; expanded [S, H, Dn + Dv], a head's key and value side by side as kv_b leaves them; shared
[S, Dr], the key part that all heads have in common. Of span n spans.ends[n] rows, packed in span order; causal at the
end: the last query of a span sees all its keys, the one before all but one. Out: [T, H, Dv] in `out_dtype`.
Source: spec/k3.md 3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.mla import padded, reference
from baltoro.kernels.spans import Spans


def key_and_value(expanded: Tensor, shared: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """[S, H, Dn + Dr], [S, H, Dv]."""
    key, value = torch.split(expanded, [nope, expanded.shape[-1] - nope], dim=-1)
    return torch.cat([key, shared.unsqueeze(1).expand(-1, expanded.shape[1], -1)], dim=-1), value


def by_padding(
    q: Tensor, expanded: Tensor, shared: Tensor, *, spans: Spans, scale: float, out_dtype: torch.dtype
) -> Tensor:
    """Through `padded.attend`."""
    key, value = key_and_value(expanded, shared, q.shape[-1] - shared.shape[-1])
    return padded.attend(q, key, value, spans=spans, scale=scale, out_dtype=out_dtype)


def by_reference(
    q: Tensor, expanded: Tensor, shared: Tensor, *, spans: Spans, scale: float, out_dtype: torch.dtype
) -> Tensor:
    """Through `reference.attend`."""
    key, value = key_and_value(expanded, shared, q.shape[-1] - shared.shape[-1])
    return reference.attend(q, key, value, spans=spans, scale=scale, out_dtype=out_dtype)
