"""Quantisation-aware training: which fake quantisation a step's forward runs with.

In: the step's stage. Out: the FakeQuant switches of the ForwardContext; the MoE layers do the rest. Expert weights pass
through MXFP4 and expert inputs through MXFP8, with straight-through gradients, so the float weights go on learning
while the loss is that of the packed model.
Invariants: evaluation of a quantised stage sees the same switches; export packs with the same quantiser, so the last
evaluation is that of the exported weights up to bf16.
Source: spec/k3.md section 5.
"""

from __future__ import annotations

from baltoro.model.context import FakeQuant
from baltoro.trainer.config import StageConfig


def fake_quant(stage: StageConfig) -> FakeQuant:
    """The switches of a stage."""
    return FakeQuant(weights=stage.quantise_weights, activations=stage.quantise_inputs)
