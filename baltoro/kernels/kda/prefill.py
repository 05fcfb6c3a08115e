"""The KDA chunk form as Triton kernels, forward only: two launches, four where a long span is cut into segments.

In and out: as `chunk.chunked`; same chunk borders, states at borders inside spans at no extra pass. `v` in bf16 gives
bf16 products with FP32 sums and state, FP32 values give FP32 products.
No host reads: all is laid out from host integers, once for all layers of a step. Calls that need gradients, and shapes
or dtypes that the kernels do not take, go to `flash-linear-attention` where it is installed, else to the reference.
Limit: the workspace of a group of heads is about 1.2 kB a token and head in bf16; groups are cut to WORKSPACE_BYTES.
Source: spec/kernels.md A.6 to A.8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from baltoro.kernels.copies import to_device
from baltoro.kernels.device import HOPPER, machine
from baltoro.kernels.kda import chunk as plain
from baltoro.kernels.kda import fla
from baltoro.kernels.kda.grid import CHUNK
from baltoro.kernels.kda.launch import (
    BOUNDED_GROUP,
    MERGE_ROWS,
    Config,
    Copies,
    Launch,
    Products,
    bounded_matrices,
    choose,
    products,
    sum_matrices,
)
from baltoro.kernels.kda.plan import ChunkPlan, choose_segment_chunks, chunk_counts, plan_chunks
from baltoro.kernels.kda.reference import check_shapes
from baltoro.kernels.spans import Borders, Spans

WORKSPACE_BYTES = 1 << 30
SIZES = (16, 32, 64, 128)
# compute capabilities that Gluon's kernels are for


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
    """Arguments and results as `chunk.chunked`; o in v.dtype. `is_bounded` promises g >= -5 and is believed."""
    tensors = (q, k, v, g, beta) if state is None else (q, k, v, g, beta, state)
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_fit = v.dtype in (torch.bfloat16, torch.float32) and k.shape[-1] in SIZES and v.shape[-1] in SIZES
    if has_gradient or not is_fit or chunk not in SIZES:
        other = fla.chunked if machine(v.device.type).has_fla else plain.chunked
        return other(
            q, k, v, g, beta, spans=spans, state=state, scale=scale, chunk=chunk, is_bounded=is_bounded, borders=borders
        )
    check_shapes(q, k, v, g, beta, spans=spans, state=state)
    if state is None:
        state = v.new_zeros(len(spans), *v.shape[1:], k.shape[-1], dtype=torch.float32)
    layout = (spans.lengths, spans.starts, tuple(borders))
    return run(q, k, v, g, beta, state, layout, scale=scale, chunk=chunk, is_bounded=is_bounded)


# lengths, starts, borders of the spans; here a length may be 0
Layout = tuple[tuple[int, ...], tuple[int, ...], Borders]
# w, u, k R, q P, A_qk, P_C of all chunks: [chunks, heads, C, *], [chunks, heads, K]; the first two in the direct form:
# k P, inverse times beta
Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    layout: Layout,
    *,
    scale: float,
    chunk: int = CHUNK,
    is_bounded: bool = False,
    segment_chunks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The launches. `segment_chunks`: cut spans so; None leaves it to the planner. State [N, H, V, K], not written."""
    heads, (values, keys) = v.shape[1], state.shape[-2:]
    group = _group(layout, chunk, heads, (3 * keys + values + chunk) * v.element_size() + 4 * keys // chunk)
    config = choose(v.dtype, keys=keys, values=values)
    if segment_chunks is None:
        units = machine(v.device.type, v.device.index or 0).num_units
        # measured best with the halves of a state after each other: a processor has one at a time
        segment_chunks = _segments(layout, chunk, group, units)
    call = plan_call(v, state, layout, config, chunk=chunk, is_bounded=is_bounded, segment_chunks=segment_chunks)
    inputs = (*(_rows(t) for t in (q, k, v, g)), beta)
    for first in range(0, heads, group):
        call.run(inputs, first, min(group, heads - first), scale)
    plan, after = call.plan, call.after
    if plan.num_borders < len(plan.borders):
        rows = [*range(len(plan.spans)), *(len(plan.spans) + border for border in plan.borders)]
        after = torch.stack([after[row] for row in rows])
    return call.out, after


def plan_call(
    v: Tensor,
    state: Tensor,
    layout: Layout,
    config: Config,
    *,
    chunk: int,
    is_bounded: bool,
    segment_chunks: int | None,
) -> Call:
    """What the launches share. v [T, H, V], state [N, H, V, K]."""
    if machine(v.device.type, v.device.index or 0).capability not in HOPPER:
        config = replace(config, columns=None, copies=None)
    plan, tables = _tables(layout, chunk, segment_chunks, v.device)
    state, kinds = state.to(torch.float32).contiguous(), products(v.dtype)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    after = state.new_empty(len(plan.spans) + plan.num_borders, *state.shape[1:])
    shape = {"K": state.shape[-1], "V": state.shape[-2], "C": chunk}
    smallest = BOUNDED_GROUP if is_bounded else 1
    bounded = config.prepares_bounded(chunk=chunk, is_bounded=is_bounded)
    if bounded is None:
        matrices = sum_matrices(chunk, smallest, kinds.sums, v.device)
    else:
        matrices = bounded_matrices(chunk, kinds.sums, v.device)
    return Call(plan, tables, matrices, out, after, state, shape, smallest, config, kinds, bounded)


@dataclass(frozen=True, slots=True)
class Call:
    """What is the same for all groups of heads. smallest: tokens whose pairs have one reference; bounded: how
    `triton_bounded` prepares, None: `triton_prepare` does."""

    plan: ChunkPlan
    tables: dict[str, Tensor]
    matrices: Tensor
    out: Tensor
    after: Tensor
    state: Tensor
    shape: dict[str, Any]
    smallest: int
    config: Config
    kinds: Products
    bounded: Launch | None

    def run(self, inputs: tuple[Tensor, ...], first: int, heads: int, scale: float) -> None:
        """Heads first .. first + heads - 1 into `out` and `after`."""
        made = self.prepare(inputs, first, heads, scale)
        entering = self.enter(made, inputs[2], first, heads) if self.plan.fragments else self.state
        self.scan(made, inputs[2], entering, first, heads)

    def prepare(self, inputs: tuple[Tensor, ...], first: int, heads: int, scale: float) -> Made:
        """All chunks on their own; inputs q, k, v, g, beta of all heads."""
        from baltoro.kernels.kda.triton_bounded import bounded_kernel
        from baltoro.kernels.kda.triton_prepare import prepare_kernel

        num, shape, kinds, v = len(self.plan.chunks), self.shape, self.kinds, inputs[2]
        w, k_out, q_in = (v.new_empty(num, heads, shape["C"], shape["K"]) for _ in range(3))
        width = "C" if self.config.is_direct else "V"
        u, a = (v.new_empty(num, heads, shape["C"], shape[size]) for size in (width, "C"))
        gamma = self.state.new_empty(num, heads, shape["K"])
        arguments = (
            *inputs, self.matrices, self.tables["chunks"], w, u, k_out, q_in, a, gamma,
            *(t.stride(0) for t in inputs), first, scale,
        )  # fmt: skip
        options = shape | {"KIND": kinds.pairs, "INVERSE_KIND": kinds.inverse, "SUMS": kinds.sums}
        options["IS_DIRECT"] = self.config.is_direct
        columns = self.config.prepares_columns(inputs[:4], chunk=shape["C"], is_bounded=self.smallest > 1)
        if num and columns is not None:
            from baltoro.kernels.kda.gluon_prepare import column_kernel

            column_kernel[columns.grid(num, heads)](*arguments, **columns.options())
        elif num and self.bounded is not None:
            options |= {"BLOCK": self.bounded.block, "HAS_BLOCKS": self.config.has_blocks} | self.bounded.options()
            bounded_kernel[(num, heads)](*arguments, **options)
        elif num:
            options |= {"BLOCK": self.config.prepare.block, "FIRST": self.smallest} | self.config.prepare.options()
            prepare_kernel[(num, heads)](*arguments, **options)
        return w, u, k_out, q_in, a, gamma

    @property
    def copies(self) -> Copies | None:
        """How `gluon_scan` has the serial part."""
        is_fit = self.out.dtype == torch.bfloat16 and self.shape["C"] == 64 and not self.config.is_direct
        return self.config.copies if is_fit else None

    def enter(self, made: Made, v: Tensor, first: int, heads: int) -> Tensor:
        """States entering all segments [segments, heads, V, K]; v [T, H, V]."""
        from baltoro.kernels.kda.triton_chunk import fragment_kernel, merge_kernel

        plan, tables, shape, config = self.plan, self.tables, self.shape, self.config.fragment
        keys, values, num = shape["K"], shape["V"], len(plan.segments)
        fragments = self.state.new_empty(num, heads, values + keys, keys)
        entering = self.state.new_empty(num, heads, values, keys)
        w, u, k_out, _, _, gamma = made
        fragment_kernel[((values + keys) // config.block, heads, len(plan.fragments))](
            w, u, k_out, gamma, v, tables["chunks"], tables["segments"], tables["fragments"], fragments,
            v.stride(0), first, **shape, BV=config.block, KIND=self.kinds.fragment, IS_DIRECT=self.config.is_direct,
            **config.options(),
        )  # fmt: skip
        merge_kernel[(len(plan.spans), heads, values // MERGE_ROWS)](
            self.state, tables["spans"], fragments, entering, self.out.shape[1], first,
            K=keys, V=values, BV=MERGE_ROWS, KIND=self.kinds.merge, num_warps=8,
        )  # fmt: skip
        return entering

    def scan(self, made: Made, v: Tensor, entering: Tensor, first: int, heads: int) -> None:
        """Outputs and states. entering: of segments, or of spans where none is cut."""
        from baltoro.kernels.kda.triton_chunk import scan_kernel

        plan, tables, shape, config = self.plan, self.tables, self.shape, self.config.scan
        if plan.chunks and self.copies is not None:
            from baltoro.kernels.kda.gluon_scan import column_scan_kernel

            *rows, gamma = made
            column_scan_kernel[(heads, len(plan.segments))](
                *(descriptors(*rows)), gamma, tables["chunks"], tables["segments"], tables["order"], entering,
                self.out, self.after, len(plan.spans), self.out.shape[1], first,
                IS_CUT=bool(plan.fragments), IS_EARLY=self.copies.is_early, num_warps=8,
            )  # fmt: skip
        elif plan.segments:
            scan_kernel[(shape["V"] // config.block, heads, len(plan.segments))](
                *made, v, tables["chunks"], tables["segments"], tables["order"], entering,
                self.out, self.after, v.stride(0), len(plan.spans), self.out.shape[1], first,
                **shape, BV=config.block, IS_CUT=bool(plan.fragments), KIND=self.kinds.scan,
                IS_DIRECT=self.config.is_direct, **config.options(),
            )  # fmt: skip


def descriptors(*tensors: Tensor) -> list[Any]:
    """For the copy engine: [chunks, heads, 64, n] as rows, 64 at a time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 16, 2)
    rows = [t.view(-1, t.shape[-1]) for t in tensors]
    return [TensorDescriptor(t, [*t.shape], [t.shape[1], 1], [64, t.shape[1]], layout) for t in rows]


def _group(layout: Layout, chunk: int, heads: int, row_bytes: int) -> int:
    """Heads at a time, so that the workspace stays in its bound."""
    rows = sum(chunk_counts(layout[0], layout[1], chunk)) * chunk
    most = max(1, min(heads, WORKSPACE_BYTES // max(1, rows * row_bytes)))
    return -(-heads // -(-heads // most))  # of nearly one size


@lru_cache(maxsize=16)
def _segments(layout: Layout, chunk: int, programs: int, units: int) -> int | None:
    counts = chunk_counts(layout[0], layout[1], chunk)
    return choose_segment_chunks(counts, programs_per_segment=programs, num_units=units)


@lru_cache(maxsize=16)
def _tables(
    layout: Layout, chunk: int, segment_chunks: int | None, device: torch.device
) -> tuple[ChunkPlan, dict[str, Tensor]]:
    """The plan, and its tables int32 on the device: made once for all layers of a step."""
    lengths, starts, borders = layout
    plan = plan_chunks(lengths, starts, chunk=chunk, borders=borders, segment_chunks=segment_chunks)
    lists = {name: getattr(plan, name) for name in ("chunks", "segments", "order", "spans", "fragments")}
    flat = {
        name: [x for row in rows for x in (row if isinstance(row, tuple) else (row,))] for name, rows in lists.items()
    }
    joined = to_device(torch.tensor([x for values in flat.values() for x in values], dtype=torch.int32), device)
    parts = torch.split(joined, [len(values) for values in flat.values()])
    return plan, dict(zip(flat, parts, strict=True))


def _rows(x: Tensor) -> Tensor:
    """[T, H, *] with rows of contiguous heads: itself, or a copy."""
    is_packed = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    return x if is_packed else x.contiguous()
