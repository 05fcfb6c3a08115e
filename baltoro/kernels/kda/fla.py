"""The chunk form through `flash-linear-attention`, forward and backward, for bf16 on a GPU where it is installed.

In and out: as `chunk.chunked`. Its chunks start at the span's first token instead of the absolute grid: equal up to
rounding, so a result may move in the last bits with the cut. Computes in bf16 with an fp32 state; other dtypes, and
heads narrower than a tile of its products, go to the reference. A border inside a span costs a call more (`segments`).
Source: fla ops/kda (MIT), called, not copied; measured figures in spec/kernels.md A.5, F.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baltoro.kernels.kda import chunk as plain
from baltoro.kernels.kda.grid import CHUNK
from baltoro.kernels.kda.segments import run_in_segments
from baltoro.kernels.spans import Borders, Spans

WIDTHS = range(16, 257)
"""Of keys and of values: its kernels multiply tiles as wide as a head, of which a product takes no narrower ones."""


def takes(k: Tensor, v: Tensor) -> bool:
    """Whether the library has kernels for these: else it ends in an error of its compiler."""
    return v.dtype == torch.bfloat16 and k.shape[-1] in WIDTHS and v.shape[-1] in WIDTHS


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    spans: Spans,
    state: Tensor | None,
    scale: float,
    chunk: int = CHUNK,
    is_bounded: bool = False,
    borders: Borders = (),
) -> tuple[Tensor, Tensor]:
    """Arguments and results as `chunk.chunked`; `v` in bf16 selects this path. `is_bounded` promises g >= -5."""
    if not takes(k, v):
        return plain.chunked(q, k, v, g, beta, spans=spans, state=state, scale=scale, chunk=chunk, borders=borders)
    call = partial(_call, scale=scale, is_bounded=is_bounded)
    if not borders:
        return call(q, k, v, g, beta, spans, state)
    if state is None:
        state = torch.zeros(len(spans), *v.shape[1:], k.shape[-1], dtype=torch.float32, device=v.device)
    return run_in_segments(call, (q, k, v, g, beta), spans=spans, state=state, borders=borders)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spans: Spans,
    state: Tensor | None,
    *,
    scale: float,
    is_bounded: bool,
) -> tuple[Tensor, Tensor]:
    """All spans whole, in one call of the library."""
    from fla.ops.kda import chunk_kda  # an extra of the GPU machine; the row needs it

    if spans.device.type == "cuda":
        spans.once("fla chunks", tabulate)
    out, final = chunk_kda(
        q=q.to(v.dtype).unsqueeze(0),
        k=k.to(v.dtype).unsqueeze(0),
        v=v.unsqueeze(0),
        g=g.float().unsqueeze(0),
        beta=beta.float().unsqueeze(0),
        scale=scale,
        initial_state=state,
        output_final_state=True,
        safe_gate=is_bounded,
        state_v_first=True,
        # the same tensor in every layer: the library keeps what it derives from it; the host's copy spares a wait
        cu_seqlens=spans.offsets_wide,
        cu_seqlens_cpu=spans.offsets_host,
    )
    return out.squeeze(0), final


def tabulate(spans: Spans) -> Tensor:
    """The library's table of chunks (it keeps the last few by the identity of the offsets), int64 [chunks, 2].

    Making it copies a few numbers to the device and waits for the stream it is on: on one of its own, which is empty,
    nothing waits for the step that is under way.
    """
    from fla.ops.utils.index import prepare_chunk_indices

    offsets = spans.offsets_wide
    current, side = torch.cuda.current_stream(spans.device), torch.cuda.Stream(spans.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        table: Tensor = prepare_chunk_indices(cu_seqlens=offsets, chunk_size=CHUNK, cu_seqlens_cpu=spans.offsets_host)
    table.record_stream(current)
    return table
