"""Tower and projector against mlx-vlm's kimi_k3, on the same tensors under their published names.

mlx-vlm weighs a gigabyte with what it pulls in, so it is in no extra. Its vision module itself needs only mlx:
the extra `peers` and `pip install --no-deps mlx-vlm` (40 MB) are enough for this test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baltoro.model.config import VisionConfig
from baltoro.model.vision import Projector, VisionTower
from tests.model.test_vision import CONFIG, TEXT_WIDTH, features, make, random_pixels

GRIDS = ((1, 4, 6), (3, 2, 4), (1, 6, 7 + 1), (1, 12, 10), (4, 4, 2))
THEIR_EPS = 2.0**-7  # mlx-vlm pins what torch uses for bf16


def mlx_features(tower: VisionTower, projector: Projector, pixels: torch.Tensor) -> torch.Tensor:
    vision = pytest.importorskip("mlx_vlm.models.kimi_k3.vision", reason="mlx-vlm is not installed (see this file)")
    from mlx_vlm.models.kimi_k3 import config as their_config
    from mlx_vlm.models.kimi_k3.kimi_k3 import KimiK3MultiModalProjector

    mx = pytest.importorskip("mlx.core")
    c = tower.config
    theirs = their_config.VisionConfig(
        patch_size=c.patch_size,
        init_pos_emb_height=c.pos_emb_height,
        init_pos_emb_width=c.pos_emb_width,
        init_pos_emb_time=c.pos_emb_time,
        vt_num_attention_heads=c.num_heads,
        vt_num_hidden_layers=c.num_layers,
        vt_hidden_size=c.hidden_size,
        vt_intermediate_size=c.intermediate_size,
        qkv_hidden_size=c.qkv_hidden_size,
        mm_hidden_size=c.hidden_size,
        projector_ln_eps=c.projector_ln_eps,
    )

    class Config:  # the two fields that their projector reads
        vision_config = theirs
        text_config = their_config.TextConfig(hidden_size=TEXT_WIDTH)

    def weights(module: torch.nn.Module) -> list[tuple[str, Any]]:
        arrays = {name: value.numpy() for name, value in module.state_dict().items()}
        if "patch_embed.proj.weight" in arrays:  # mlx puts channels last
            arrays["patch_embed.proj.weight"] = arrays["patch_embed.proj.weight"].transpose(0, 2, 3, 1)
        return [(name, mx.array(array)) for name, array in arrays.items()]

    their_tower, their_projector = vision.VisionModel(theirs), KimiK3MultiModalProjector(Config)
    their_tower.load_weights(weights(tower))
    their_projector.load_weights(weights(projector))
    cells = their_tower(mx.array(pixels.numpy().transpose(0, 2, 3, 1)), grid_thws=[list(grid) for grid in GRIDS])
    return torch.from_numpy(np.array(their_projector(cells)))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_features_equal_mlx_vlm(seed: int) -> None:
    fields = {name: getattr(CONFIG, name) for name in VisionConfig.__dataclass_fields__}
    tower, projector = make(VisionConfig(**(fields | {"norm_eps": THEIR_EPS})), torch.float32, seed)
    pixels = random_pixels(GRIDS, torch.float32)
    want = mlx_features(tower, projector, pixels)
    with torch.no_grad():
        got = features(tower, projector, pixels, GRIDS)
    print(f"largest difference to mlx-vlm: {float((got - want).abs().max()):.2e} (spread {float(want.std()):.2f})")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
