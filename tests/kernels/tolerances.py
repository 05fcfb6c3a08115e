"""How far a fast kernel may be from its float64 reference: relative distance in the 2-norm, by operation and dtype."""

from __future__ import annotations

# A bf16 result rounds to 2^-9 of its value; the interpreter truncates to 2^-8.
TOLERANCES: dict[str, dict[str, float]] = {
    "mla_attend_expanded": {"bfloat16": 6e-3},
    "mla_attend_absorbed": {"float32": 1e-6, "bfloat16": 6e-3},
    # against float64, which rounds nowhere: the norm rounds before its gain
    "rms_norm": {"float32": 1e-6, "bfloat16": 1e-2},
    "gated_rms_norm": {"float32": 1e-6, "bfloat16": 6e-3},
    # rounds after the convolution and after the norm
    "kda_enter": {"float32": 1e-6, "bfloat16": 1.2e-2},
    "glu": {"float32": 1e-6, "bfloat16": 6e-3},
    "mla_enter": {"float32": 1e-6, "bfloat16": 6e-3},
    "mla_leave": {"float32": 1e-6, "bfloat16": 1e-2},
    "attnres_mix": {"float32": 1e-6, "bfloat16": 6e-3},
    "attnres_read": {"float32": 1e-6, "bfloat16": 1e-2},
    # the bank's part is kept in the activation dtype between the phases
    "attnres_fold": {"float32": 1e-6, "bfloat16": 1.2e-2},
    "route": {"float32": 1e-6},
    "linear": {"float32": 1e-6, "bfloat16": 5e-3},
    "norm_linear": {"float32": 1e-6, "bfloat16": 5e-3},
    "router_linear": {"float32": 1e-6, "bfloat16": 5e-3},
    "router_linear_logits": {"float32": 1e-6, "bfloat16": 1e-6},
    "expert_product": {"float32": 1e-6, "bfloat16": 6e-3},
    # rounds three times: between the products, each expert's part, the sum
    "expert_product_grouped": {"float32": 1e-6, "bfloat16": 1.2e-2},
    # against unquantised inputs, 3 bits behind the leading one in both products; most of it through the activation
    "expert_product_w4a8": {"float32": 0.12, "bfloat16": 0.12},
    "kda_decode": {"float32": 1e-6, "bfloat16": 8e-3},
    "kda_decode_state": {"float32": 1e-6, "bfloat16": 8e-3},
    "kda_verify": {"float32": 1e-6, "bfloat16": 8e-3},
    "kda_chunk": {"float32": 1e-6, "bfloat16": 1.2e-2},  # on a GPU, where bf16 is rounded, 4e-3: spec/kernels.md A.5
    "kda_chunk_state": {"float32": 1e-6, "bfloat16": 8e-3},
}
