"""Which implementation of each operation runs on which device: a table, never a try.

In: a device. Out: `Kernels`, the functions the layers call, or `Choice`s with the reasons (`baltoro explain`).
For each operation the first row of TABLE whose device kind and needs fit the machine is taken. A faster implementation
is one more row above the reference row. Every implementation of an operation has the signature of its reference.
BALTORO_REFERENCE (names with commas, or `all`) forces the last row, the reference, of the operations it names; it is
read when a device is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from baltoro.config import environment
from baltoro.errors import ConfigError, InvariantError
from baltoro.kernels.attnres import fast as attnres_fast
from baltoro.kernels.attnres import fused as attnres_fused
from baltoro.kernels.attnres import reference as attnres
from baltoro.kernels.device import Machine, machine
from baltoro.kernels.kda import chunk, enter, fast_enter, fla, fused, fused_reference, prefill
from baltoro.kernels.linear import fast as fast_linear
from baltoro.kernels.linear import reference as linear
from baltoro.kernels.lora import reference as lora
from baltoro.kernels.mla import absorb, expanded, fast_absorb, packed, padded, split_decode
from baltoro.kernels.mla import decode as mla_decode
from baltoro.kernels.mla import reference as mla
from baltoro.kernels.moe import device_grouped, experts, fast_experts, fast_glu, fast_route
from baltoro.kernels.moe import reference as moe
from baltoro.kernels.moe.products import Order
from baltoro.kernels.norm import fast as norm_fast
from baltoro.kernels.norm import reference as norm
from baltoro.kernels.paged import fast as paged_fast
from baltoro.kernels.paged import reference as paged
from baltoro.kernels.sample import fast as sample_fast
from baltoro.kernels.sample import reference as sample

One = Callable[..., Tensor]
Two = Callable[..., tuple[Tensor, Tensor]]
Act = Callable[..., None]
Enter = Callable[..., tuple[enter.Mixed, Tensor]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One function per operation; signatures and shapes are those of the reference named beside it."""

    rms_norm: One  # norm.reference.rms_norm
    gated_rms_norm: One  # norm.reference.gated_rms_norm
    linear: One  # linear.reference.linear
    norm_linear: One  # linear.reference.norm_linear
    router_linear: Two  # linear.reference.router_linear
    kda_enter: Enter  # kda.enter.enter: convolution, L2 norms, gate and beta of prefill
    kda_chunk: Two  # kda.chunk.chunked
    kda_decode: One  # kda.fused_reference.decode
    kda_verify: One  # kda.fused_reference.verify
    kda_fold: Act  # kda.fused_reference.fold
    mla_attend: One  # mla.reference.attend
    mla_attend_expanded: One  # mla.expanded.by_reference
    mla_attend_absorbed: Two  # mla.reference.attend_absorbed
    mla_enter: One  # mla.absorb.enter
    mla_leave: One  # mla.absorb.leave
    attnres_mix: One  # attnres.reference.mix
    attnres_read: Two  # attnres.fused.read: with the addition before and the norm behind
    attnres_scan: Two  # attnres.fused.scan_bank: a bank's part of many mixes
    attnres_fold: Two  # attnres.fused.fold: one of them with the running sum, as attnres_read
    route: Two  # moe.reference.route
    situ_glu: One  # moe.reference.situ_glu
    silu_glu: One  # moe.reference.silu_glu
    expert_product: One  # moe.experts.expert_product
    expert_product_lora: One  # moe.experts.expert_product, with terms of adapters
    lora_delta: One  # lora.reference.add_delta
    lora_absorbed_query: One  # lora.reference.add_absorbed_query
    lora_absorbed_value: One  # lora.reference.add_absorbed_value
    copy_blocks: Act  # paged.reference.copy_blocks
    scatter_rows: Act  # paged.reference.scatter_rows
    sample: One  # sample.reference.sample


@dataclass(frozen=True, slots=True)
class Row:
    """`function` may run `op` on the device kinds named, where `needs` holds."""

    op: str
    kinds: tuple[str, ...]
    implementation: str
    function: Callable[..., Any]
    reason: str
    needs: Callable[[Machine], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Choice:
    """What was picked for one operation, why, and the module that holds it."""

    op: str
    implementation: str
    reason: str
    module: str


SWITCH = "BALTORO_REFERENCE"
ANY = ("cpu", "cuda")
PLAIN = "plain torch: the form that others are compared with"
CHUNKS = "plain torch, vectorised over chunks and heads"
FORMS = "plain torch; gathers per pair for few tokens, groups by expert for many"
LORA = "plain torch, one group of rows per adapter"
FLA = "flash-linear-attention's chunk kernels, forward and backward, for bf16; other dtypes take the reference"
PADDED = "the framework's fused attention on padded groups of like length; spans with a past take the reference"
PACKED_SPANS = "Triton: one launch for spans of any length, with a past or without, nothing padded; bf16, others padded"
SPLIT = "Triton: keys in splits that fill the card, merged by log-sum-exp; float64 takes the reference"
ONE_LAUNCH = "Triton: one launch, two that overlap for few tokens; under autograd and in float64 the reference"
BANK = "Triton: shares, then sums, of all queries; under autograd and in float64 the reference"
ONE = "Triton: one launch; under autograd and in float64 the reference"
ABSORB = "Triton: one launch with kv_b's product, and the norm and write or the gate; float64 takes the reference"
COPIES = "Triton: a batch in one launch, nothing in between"
PLAIN_COPIES = "plain torch: gather, then scatter"
DRAW = "Triton: borders bit by bit, no sort, no word to the host; float64 takes the reference"
PLAIN_DRAW = "plain torch: looks at the likeliest first"
ENTER = "one launch: convolution, L2 norms, log-decay and beta; under autograd and in float64 the reference"
IN_TURN = "plain torch, the operations one by one, gradients written out"
IN_PLACE = "plain torch, the operations one by one; gathered states advance in place, without copies between"
FUSED = "one launch: convolution, gate, norms and recurrence, state in place; float64 takes the composition"
VERIFY = "one launch: a draft window against a state read once and not written"
PREFILL = "two launches, four where long spans are cut into segments; gradients through fla, else the reference"
FOLD = "one launch over all layers, equal in every bit to the decode kernel on what verify recorded"
BY_REQUEST = "each request over its own rows, in cache; nothing is padded to the longest"
FEW_ROWS = "one launch reads each weight once, sums in fp32, for few rows; others take the reference"
SELECT = "one launch: groups find their best without a barrier, then rank; gradients, expert groups take the reference"
PACKED = (
    "MXFP4 dequantised on the way: by pair for few, grouped on the device for many; put into tiles at load in bf16, in "
    "the published order in float32 or with scales beyond 2^33; dense ones: device grouped"
)
GROUPED = "grouped matrix products, no word to the host, for bf16 dense experts; packed ones take the reference"


def is_hopper(here: Machine) -> bool:
    """Grouped matrix products of the framework need compute capability 9.0."""
    return here.capability is not None and here.capability >= (9, 0)


def has_triton(here: Machine) -> bool:
    """Our Triton kernels are made for Hopper."""
    return here.has_triton and is_hopper(here)


# First fitting row wins. The reference row of an operation is its last.
TABLE: tuple[Row, ...] = (
    Row("rms_norm", ("cuda",), "one launch", norm_fast.rms_norm, ONE, has_triton),
    Row("rms_norm", ANY, "reference", norm.rms_norm, PLAIN),
    Row("gated_rms_norm", ("cuda",), "one launch", norm_fast.gated_rms_norm, ONE, has_triton),
    Row("gated_rms_norm", ANY, "reference", norm.gated_rms_norm, PLAIN),
    Row("linear", ("cuda",), "triton", fast_linear.linear, FEW_ROWS, has_triton),
    Row("linear", ANY, "reference", linear.linear, PLAIN),
    Row("norm_linear", ("cuda",), "triton", fast_linear.norm_linear, FEW_ROWS, has_triton),
    Row("norm_linear", ANY, "reference", linear.norm_linear, PLAIN),
    Row("router_linear", ("cuda",), "triton", fast_linear.router_linear, FEW_ROWS, has_triton),
    Row("router_linear", ANY, "reference", linear.router_linear, PLAIN),
    Row("kda_enter", ("cuda",), "one launch", fast_enter.enter, ENTER, has_triton),
    Row("kda_enter", ANY, "reference", enter.enter, IN_TURN),
    Row("kda_chunk", ("cuda",), "triton", prefill.chunked, PREFILL, has_triton),
    Row("kda_chunk", ("cuda",), "fla", fla.chunked, FLA, lambda here: here.has_fla),
    Row("kda_chunk", ANY, "reference", chunk.chunked, CHUNKS),
    Row("kda_decode", ("cuda",), "triton", fused.decode, FUSED, has_triton),
    Row("kda_decode", ANY, "reference", fused_reference.decode, IN_PLACE),
    Row("kda_verify", ("cuda",), "triton", fused.verify, VERIFY, has_triton),
    Row("kda_verify", ANY, "reference", fused_reference.verify, PLAIN),
    Row("kda_fold", ("cuda",), "triton", fused.fold, FOLD, has_triton),
    Row("kda_fold", ANY, "reference", fused_reference.fold, PLAIN),
    Row("mla_attend", ANY, "padded", padded.attend, PADDED),
    Row("mla_attend", ANY, "reference", mla.attend, PLAIN),
    Row("mla_attend_expanded", ("cuda",), "packed", packed.attend, PACKED_SPANS, has_triton),
    Row("mla_attend_expanded", ANY, "padded", expanded.by_padding, PADDED),
    Row("mla_attend_expanded", ANY, "reference", expanded.by_reference, PLAIN),
    Row("mla_attend_absorbed", ("cpu",), "decode", mla_decode.attend_absorbed, BY_REQUEST),
    Row("mla_attend_absorbed", ("cuda",), "split", split_decode.attend_absorbed, SPLIT, has_triton),
    Row("mla_attend_absorbed", ANY, "reference", mla.attend_absorbed, PLAIN),
    Row("mla_enter", ("cuda",), "one launch", fast_absorb.enter, ABSORB, has_triton),
    Row("mla_enter", ANY, "reference", absorb.enter, PLAIN),
    Row("mla_leave", ("cuda",), "one launch", fast_absorb.leave, ABSORB, has_triton),
    Row("mla_leave", ANY, "reference", absorb.leave, PLAIN),
    Row("attnres_mix", ("cuda",), "one launch", attnres_fast.mix, ONE_LAUNCH, has_triton),
    Row("attnres_mix", ANY, "reference", attnres.mix, PLAIN),
    Row("attnres_read", ("cuda",), "one launch", attnres_fast.read, ONE_LAUNCH, has_triton),
    Row("attnres_read", ANY, "reference", attnres_fused.read, PLAIN),
    Row("attnres_scan", ("cuda",), "two launches", attnres_fast.scan_bank, BANK, has_triton),
    Row("attnres_scan", ANY, "reference", attnres_fused.scan_bank, PLAIN),
    Row("attnres_fold", ("cuda",), "one launch", attnres_fast.fold, ONE, has_triton),
    Row("attnres_fold", ANY, "reference", attnres_fused.fold, PLAIN),
    Row("route", ("cuda",), "triton", fast_route.route, SELECT, has_triton),
    Row("route", ANY, "reference", moe.route, PLAIN),
    Row("situ_glu", ("cuda",), "one launch", fast_glu.situ_glu, ONE, has_triton),
    Row("situ_glu", ANY, "reference", moe.situ_glu, PLAIN),
    Row("silu_glu", ("cuda",), "one launch", fast_glu.silu_glu, ONE, has_triton),
    Row("silu_glu", ANY, "reference", moe.silu_glu, PLAIN),
    Row("expert_product", ("cuda",), "triton", fast_experts.expert_product, PACKED, has_triton),
    Row("expert_product", ("cuda",), "device grouped", device_grouped.expert_product, GROUPED, is_hopper),
    Row("expert_product", ANY, "reference", experts.expert_product, FORMS),
    Row("expert_product_lora", ANY, "reference", experts.expert_product, FORMS),
    Row("lora_delta", ANY, "reference", lora.add_delta, LORA),
    Row("lora_absorbed_query", ANY, "reference", lora.add_absorbed_query, LORA),
    Row("lora_absorbed_value", ANY, "reference", lora.add_absorbed_value, LORA),
    Row("copy_blocks", ("cuda",), "one launch", paged_fast.copy_blocks, COPIES, has_triton),
    Row("copy_blocks", ANY, "reference", paged.copy_blocks, PLAIN_COPIES),
    Row("scatter_rows", ("cuda",), "one launch", paged_fast.scatter_rows, COPIES, has_triton),
    Row("scatter_rows", ANY, "reference", paged.scatter_rows, PLAIN_COPIES),
    Row("sample", ("cuda",), "one launch", sample_fast.sample, DRAW, has_triton),
    Row("sample", ANY, "reference", sample.sample, PLAIN_DRAW),
)


@cache
def kernels_for(device: torch.device) -> Kernels:
    """The functions for one device. Errors: ConfigError for an unknown name in BALTORO_REFERENCE."""
    return Kernels(**{row.op: row.function for row in _rows(device)})


def expert_order(device: torch.device, dtype: torch.dtype) -> Order:
    """The order in which the expert product of a device reads packed weights fastest; every form reads both.

    Tiles are for matrix instructions in bf16: in other dtypes, and where a reference is forced, nothing gains.
    """
    is_fast = kernels_for(device).expert_product is fast_experts.expert_product
    return "tiled" if is_fast and dtype == torch.bfloat16 else "published"


def choices(device: torch.device) -> list[Choice]:
    """What `kernels_for` picks, in the order of `Kernels`, for `baltoro explain`."""
    forced = forced_references()
    return [
        Choice(
            row.op,
            row.implementation,
            f"forced by {SWITCH}; {row.reason}" if row.op in forced else row.reason,
            row.function.__module__,
        )
        for row in _rows(device)
    ]


def forced_references() -> frozenset[str]:
    """Operations whose reference BALTORO_REFERENCE forces. Errors: ConfigError with the list of names."""
    known = [field.name for field in fields(Kernels)]
    wanted = [name.strip() for name in (environment(SWITCH) or "").split(",") if name.strip()]
    if wanted == ["all"]:
        return frozenset(known)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{SWITCH} names {name!r}, which is no operation; use all, or of: {', '.join(known)}")
    return frozenset(wanted)


def _rows(device: torch.device) -> list[Row]:
    here, forced = machine(device.type, device.index or 0), forced_references()
    names = [field.name for field in fields(Kernels)]
    return [reference(name) if name in forced else select(name, here) for name in names]


def reference(op: str, table: tuple[Row, ...] = TABLE) -> Row:
    """The last row of `table` for `op`."""
    return [row for row in table if row.op == op][-1]


def select(op: str, here: Machine, table: tuple[Row, ...] = TABLE) -> Row:
    """The first row of `table` for `op` that fits the machine. Errors: InvariantError if none does."""
    for row in table:
        if row.op == op and here.kind in row.kinds and row.needs(here):
            return row
    raise InvariantError(
        f"no implementation of {op} for a {here.kind} device; add a row to baltoro/kernels/dispatch.py"
    )
