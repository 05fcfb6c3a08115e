"""Tensors of the vision tower and of its projector: names below their prefix, and shapes. No torch.

Source: spec/k3.md section 2 (names).
"""

from __future__ import annotations

from baltoro.model.config import VisionConfig

Shape = tuple[str, tuple[int, ...]]  # of a named tensor


def tower_shapes(v: VisionConfig) -> list[Shape]:
    """The tower: patch embedding, blocks, final norm."""
    tower: list[Shape] = [
        ("patch_embed.proj.weight", (v.hidden_size, 3, v.patch_size, v.patch_size)),
        ("patch_embed.pos_emb.weight", (v.pos_emb_height, v.pos_emb_width, v.hidden_size)),
    ]
    for block in range(v.num_layers):
        at = f"encoder.blocks.{block}."
        tower += [
            (f"{at}norm0.weight", (v.hidden_size,)),
            (f"{at}norm1.weight", (v.hidden_size,)),
            (f"{at}wqkv.weight", (3 * v.qkv_hidden_size, v.hidden_size)),
            (f"{at}wo.weight", (v.hidden_size, v.qkv_hidden_size)),
            (f"{at}mlp.fc0.weight", (v.intermediate_size, v.hidden_size)),
            (f"{at}mlp.fc1.weight", (v.hidden_size, v.intermediate_size)),
        ]
    tower.append(("encoder.final_layernorm.weight", (v.hidden_size,)))
    return tower


def projector_shapes(v: VisionConfig, hidden_size: int) -> list[Shape]:
    """Merged patches to the language model's width."""
    merged = v.hidden_size * v.merge**2
    return [
        ("proj.0.weight", (merged, merged)),
        ("proj.2.weight", (hidden_size, merged)),
        ("post_norm.weight", (hidden_size,)),
    ]
