"""Which optimizer moves which parameter, and in how many blocks Muon sees it.

In: a K3Model. Out: Muon groups (by number of blocks and shape) and AdamW groups (with and without weight decay).
Rules: projections that make heads are cut by head; output projections, router, latent, shared and dense matrices are
whole; stacked experts are one block each; embeddings, heads, convolutions, the beta projection, depth queries, norms
and all vectors go to AdamW, the last four without decay.
Invariants: every trainable parameter is in exactly one group, or building fails.
Source: spec/training.md C.7. Whether the published model cut kv_b further into keys and values is unknown; here a
head's rows of kv_b are one block.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from baltoro.errors import InvariantError
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.kda import KDA
from baltoro.model.mla import MLA
from baltoro.model.moe import Experts
from baltoro.trainer.config import OptimConfig
from baltoro.trainer.optim.muon import Muon

KDA_BY_HEAD = ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_proj", "g_b_proj")
MLA_BY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "g_proj")
# by the name of the module that owns the weight, whole
ADAM_DECAYED = ("embed_tokens", "lm_head", "head", "proj")  # `proj`: the tower's patch embedding
ADAM_PLAIN = (
    "b_proj", "q_conv1d", "k_conv1d", "v_conv1d", "pos_emb",
    "self_attention_res_proj", "mlp_res_proj", "output_attn_res_proj",
)  # fmt: skip


def muon_blocks(model: K3Model) -> dict[str, int]:
    """Parameter name -> number of blocks, for every parameter that Muon moves."""
    by_head: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, KDA | MLA):
            names = KDA_BY_HEAD if isinstance(module, KDA) else MLA_BY_HEAD
            by_head |= {f"{path}.{name}.weight": module.num_heads for name in names}
        elif isinstance(module, Experts):
            by_head |= {f"{path}.{name}": model.config.num_experts for name in ("w1", "w2", "w3")}
    blocks = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.dim() < 2 or _owner(name) in (*ADAM_DECAYED, *ADAM_PLAIN):
            continue
        blocks[name] = by_head.get(name) or _vision_blocks(name, model.config)
    return blocks


def _owner(name: str) -> str:
    """The last module name on the path of a parameter."""
    return name.split(".")[-2]


def _vision_blocks(name: str, config: K3Config) -> int:
    """The tower's fused q | k | v by head; any other matrix whole."""
    is_fused = name.startswith("vision_tower") and name.endswith("wqkv.weight")
    return 3 * config.vision.num_heads if is_fused and config.vision is not None else 1


def build_optimizers(model: K3Model, optim: OptimConfig) -> tuple[Muon, torch.optim.AdamW]:
    """Muon and AdamW over all trainable parameters. Errors: InvariantError if one is in no group."""
    blocks = muon_blocks(model)
    stacks: dict[tuple[int, tuple[int, ...]], list[nn.Parameter]] = defaultdict(list)
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in blocks:
            stacks[blocks[name], tuple(parameter.shape)].append(parameter)
        elif parameter.dim() >= 2 and _owner(name) not in ADAM_PLAIN:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    total = sum(len(stack) for stack in stacks.values()) + len(decayed) + len(plain)
    if total != sum(p.requires_grad for p in model.parameters()):
        raise InvariantError("a trainable parameter is in no optimizer group")
    muon_groups: list[dict[str, Any]] = [{"params": stack, "blocks": n} for (n, _), stack in stacks.items()]
    muon = Muon(
        muon_groups,
        lr=optim.lr,
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
        steps=optim.newton_schulz_steps,
    )
    adam_groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(
        adam_groups,
        lr=optim.adam_lr or optim.lr,
        betas=(optim.adam_betas[0], optim.adam_betas[1]),
        eps=optim.adam_eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    return muon, adam
