"""Humming (package humming-kernels) on the same experts: its two grouped products, compiled at first use.

In: the experts in the published order and the pairs' experts. Out: microseconds of gate+up and down together, replayed
from a graph, rows sorted by expert already. Outside its time: sorting, activation, weighted sum; inside, for W4A8, the
rounding of the inputs, a number a token. Each product is held against the dequantised weights first.
Source: spec/kernels.md F.3.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from baltoro.bench.kernels.timing import graph_us
from baltoro.errors import InvariantError
from baltoro.kernels.moe.products import Packed
from baltoro.kernels.quant import mxfp4

GROUPED = {"gemm_type": "grouped_contiguous"}
BOUNDS = {False: 6e-3, True: 6e-2}


def measure_humming(first: Packed, second: Packed, ids: Tensor, *, is_w4a8: bool) -> float:
    """first [E, 2F, M/2] (gate over up), second [E, M, F/2]; ids [T, A]. Errors: InvariantError for a wrong result, and
    whatever the package raises."""
    experts = torch.sort(ids.flatten()).values
    ends = torch.bincount(experts, minlength=len(first.packed)).cumsum(0)
    layout = torch.cat([ends.new_zeros(1), ends])
    launches = []
    for weight in (first, second):
        layer = _layer(weight, is_w4a8=is_w4a8)
        rows = torch.randn(len(experts), 2 * weight.packed.shape[2], device="cuda", dtype=torch.bfloat16)
        out = layer(rows, expert_layout=layout, compute_config=GROUPED)
        _check(out, rows, experts, weight, is_w4a8=is_w4a8)
        launches.append((layer, rows))

    def launch() -> None:
        for layer, rows in launches:
            layer(rows, expert_layout=layout, compute_config=GROUPED)

    return graph_us(launch)


def _layer(weight: Packed, *, is_w4a8: bool) -> Any:
    count, rows, half = weight.packed.shape
    inputs = {"dtype": "float8e4m3", "quant_mode": "dynamic_token"} if is_w4a8 else None
    layer = import_module("humming.layer").HummingLayer(
        shape_n=rows, shape_k=2 * half, weight_config={"quant_method": "mxfp4"}, input_config=inputs,
        num_experts=count, torch_dtype=torch.bfloat16,
    ).to("cuda")  # fmt: skip
    layer.load_from_tensors({"weight": weight.packed, "weight_scale": weight.scale})
    layer.transform()
    return layer


def _check(out: Tensor, rows: Tensor, experts: Tensor, weight: Packed, *, is_w4a8: bool) -> None:
    expert = int(experts[0])
    mine = experts == expert
    dense = mxfp4.dequantise(weight.packed[expert], weight.scale[expert], torch.float32)
    exact = rows[mine].double() @ dense.double().T
    gap = float((out[: len(rows)][mine].double() - exact).norm() / exact.norm())
    if not gap < BOUNDS[is_w4a8]:
        raise InvariantError(f"Humming's product is off by {gap:.1e}; called wrongly?")
