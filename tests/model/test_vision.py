"""The vision tower and projector: hand-worked parts, then the whole against transformers' MoonViT3d of Kimi K2.5."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baltoro.errors import ConfigError, ShapeError
from baltoro.model.config import VisionConfig
from baltoro.model.vision import (
    Grid,
    Projector,
    VisionTower,
    merge,
    rope_angles,
    rotate,
    time_waves,
)

TEXT_WIDTH = 20
CONFIG = VisionConfig(
    patch_size=3,
    merge=2,
    hidden_size=10,
    qkv_hidden_size=24,
    intermediate_size=14,
    num_heads=3,
    num_layers=2,
    pos_emb_height=6,
    pos_emb_width=7,
    pos_emb_time=4,
    norm_eps=1e-6,
)
GRIDS = ((1, 4, 6), (3, 2, 4), (1, 6, 7 + 1), (4, 4, 2))


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3)
            if weight.ndim == 1:
                weight.add_(1.0)


def make(
    config: VisionConfig = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[VisionTower, Projector]:
    tower, projector = VisionTower(config, dtype), Projector(config, TEXT_WIDTH, dtype)
    randomise(tower, seed)
    randomise(projector, seed + 1)
    return tower, projector


def random_pixels(grids: tuple[Grid, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    count = sum(math.prod(grid) for grid in grids)
    size = CONFIG.patch_size
    return torch.rand((count, 3, size, size), generator=generator, dtype=torch.float64).mul(2).sub(1).to(dtype)


def features(tower: VisionTower, projector: Projector, pixels: Tensor, grids: tuple[Grid, ...]) -> Tensor:
    out: Tensor = projector(tower(pixels, grids))
    return out


# ---- parts, by hand ----------------------------------------------------------------------------------------------
def test_parameters_have_the_published_names_and_shapes() -> None:
    tower, projector = make()
    shapes = {name: tuple(p.shape) for name, p in tower.state_dict().items()}
    layer = {
        "norm0.weight": (10,),
        "norm1.weight": (10,),
        "wqkv.weight": (72, 10),
        "wo.weight": (10, 24),
        "mlp.fc0.weight": (14, 10),
        "mlp.fc1.weight": (10, 14),
    }
    assert shapes == {
        "patch_embed.proj.weight": (10, 3, 3, 3),
        "patch_embed.pos_emb.weight": (6, 7, 10),
        "encoder.final_layernorm.weight": (10,),
    } | {f"encoder.blocks.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert {name: tuple(p.shape) for name, p in projector.state_dict().items()} == {
        "proj.0.weight": (40, 40),
        "proj.2.weight": (TEXT_WIDTH, 40),
        "post_norm.weight": (TEXT_WIDTH,),
    }


def test_published_config_has_447_million_parameters() -> None:
    published = VisionConfig()
    tower, projector = VisionTower(published, device="meta"), Projector(published, 7168, device="meta")
    total = sum(p.numel() for module in (tower, projector) for p in module.parameters())
    assert round(total / 1e6, 1) == 447.4
    assert len(tower.state_dict()) == 3 + 6 * 27
    assert len(projector.state_dict()) == 3


def test_even_pairs_turn_by_column_and_odd_pairs_by_row() -> None:
    angles = rope_angles((2, 2, 3), 8, dtype=torch.float64, device="cpu")
    slow = 10000.0 ** (-4 / 8)
    one_frame = [[c, r, c * slow, r * slow] for r in range(2) for c in range(3)]
    torch.testing.assert_close(angles, torch.tensor(one_frame * 2, dtype=torch.float64))


def test_rotation_takes_adjacent_channels_as_one_complex_number() -> None:
    x = torch.tensor([[[1.0, 0.0, 3.0, 4.0]]])  # 1 and 3 + 4i
    angle = torch.tensor([[math.pi / 2, math.pi]])
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()), torch.tensor([[[0.0, 1.0, -3.0, -4.0]]]))


def test_time_waves_are_sines_then_cosines() -> None:
    waves = time_waves(3, 4, dtype=torch.float64, device="cpu")
    expected = [[math.sin(f), math.sin(f / 100), math.cos(f), math.cos(f / 100)] for f in range(3)]
    torch.testing.assert_close(waves, torch.tensor(expected, dtype=torch.float64))


def test_merge_averages_frames_and_lists_cells_row_major() -> None:
    # value = 100 * frame + 10 * row + column on a 2-frame grid of 2 x 4 patches
    value = torch.tensor([[100.0 * f + 10 * r + c] for f in range(2) for r in range(2) for c in range(4)])
    cells = merge(value, (2, 2, 4), 2)
    assert cells.shape == (2, 4, 1)
    assert cells[:, :, 0].tolist() == [[50.0, 51.0, 60.0, 61.0], [52.0, 53.0, 62.0, 63.0]]


def test_position_table_is_used_as_it_is_at_its_own_size_and_without_time_for_one_frame() -> None:
    table = make()[0].patch_embed.pos_emb
    assert torch.equal(table((1, 6, 7)), table.weight.flatten(0, 1))


def test_position_table_is_stretched_with_half_pixel_centres() -> None:
    tower = VisionTower(VisionConfig(**{**_fields(), "pos_emb_height": 1, "pos_emb_width": 2}), torch.float64)
    table = tower.patch_embed.pos_emb
    with torch.no_grad():
        table.weight[0, 0], table.weight[0, 1] = 0.0, 1.0
    assert table((1, 2, 4))[:, 0].tolist() == [0.0, 0.25, 0.75, 1.0] * 2


def test_several_frames_add_their_wave_to_every_patch() -> None:
    table = make()[0].patch_embed.pos_emb
    waves = time_waves(3, 10, dtype=torch.float64, device="cpu")
    added = table((3, 4, 2)).view(3, 8, 10) - table((1, 4, 2))
    torch.testing.assert_close(added, waves[:, None].expand(3, 8, 10))


def _fields() -> dict[str, object]:
    return {name: getattr(CONFIG, name) for name in VisionConfig.__dataclass_fields__}


def test_projector_is_exact_gelu_between_two_products_then_a_norm() -> None:
    config = VisionConfig(**{**_fields(), "hidden_size": 1, "merge": 2, "projector_ln_eps": 0.5})
    projector = Projector(config, 2, torch.float64)
    with torch.no_grad():
        projector.proj[0].weight.copy_(torch.eye(4))
        projector.proj[2].weight.copy_(torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]]))
        projector.post_norm.weight.copy_(torch.tensor([3.0, 5.0]))
    gelu = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in (-1.0, 0.5, 2.0, 0.25)]
    first, second = gelu[0] + 2 * gelu[1], gelu[2] - gelu[3]
    root = math.sqrt((first**2 + second**2) / 2 + 0.5)
    got = projector(torch.tensor([[[-1.0], [0.5], [2.0], [0.25]]], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([[3 * first / root, 5 * second / root]], dtype=torch.float64))


# ---- the whole ---------------------------------------------------------------------------------------------------
def test_shapes_follow_grids() -> None:
    tower, projector = make()
    out = tower(random_pixels(GRIDS), GRIDS)
    assert out.shape == (6 + 2 + 12 + 2, 4, 10)
    assert features(tower, projector, random_pixels(GRIDS), GRIDS).shape == (22, TEXT_WIDTH)


@pytest.mark.parametrize("grids", [GRIDS, ((2, 4, 6),) * 3 + ((1, 2, 2),) * 2 + ((2, 4, 6),)], ids=["all", "runs"])
def test_packed_items_equal_items_alone(grids: tuple[Grid, ...]) -> None:
    tower, projector = make()
    pixels = random_pixels(grids)
    packed = features(tower, projector, pixels, grids)
    parts = pixels.split([math.prod(grid) for grid in grids])
    alone = [features(tower, projector, part, (grid,)) for part, grid in zip(parts, grids, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_a_changed_patch_moves_its_own_item_only_and_all_of_it() -> None:
    tower, projector = make()
    grids = ((2, 4, 4), (1, 2, 2))
    pixels = random_pixels(grids)
    before = features(tower, projector, pixels, grids)
    pixels[20] += 0.5  # frame 1 of the first item
    moved = (features(tower, projector, pixels, grids) - before).abs().amax(dim=1) > 1e-9
    assert moved.tolist() == [True] * 4 + [False]


def test_every_parameter_gets_the_gradient_of_finite_differences() -> None:
    tower, projector = make()
    grids = ((1, 2, 4), (2, 2, 2))
    pixels = random_pixels(grids)
    probe = torch.randn((3, TEXT_WIDTH), generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def loss() -> Tensor:
        return (features(tower, projector, pixels, grids) * probe).sum()

    loss().backward()
    step = 1e-6
    for module in (tower, projector):
        for name, weight in module.named_parameters():
            assert weight.grad is not None, name
            place = int(weight.grad.abs().argmax())
            with torch.no_grad():
                flat = weight.view(-1)
                flat[place] += step
                above = loss()
                flat[place] -= 2 * step
                below = loss()
                flat[place] += step
            slope = float(above - below) / (2 * step)
            assert slope == pytest.approx(float(weight.grad.view(-1)[place]), rel=1e-6, abs=1e-7), name


def test_bfloat16_stays_near_float64() -> None:
    exact = make()
    rounded = make(dtype=torch.bfloat16)
    with torch.no_grad():
        want = features(*exact, random_pixels(GRIDS), GRIDS)
        got = features(*rounded, random_pixels(GRIDS, torch.float32), GRIDS)
    assert got.dtype == torch.bfloat16
    assert float(F.cosine_similarity(got.double(), want, dim=1).min()) > 0.99


@pytest.mark.parametrize(
    ("grid", "words"),
    [((1, 3, 4), "multiples of 2"), ((5, 2, 2), "5 frames"), ((0, 2, 2), "pixels"), ((1, 2, 514), "at most 512")],
)
def test_a_grid_that_cannot_be_is_refused(grid: Grid, words: str) -> None:
    tower, _ = make()
    with pytest.raises(ShapeError, match=words):
        tower(random_pixels((grid,)) if 0 not in grid else random_pixels(((1, 2, 2),)), (grid,))


def test_pixels_must_match_the_grids() -> None:
    with pytest.raises(ShapeError, match="pixels"):
        make()[0](random_pixels(((1, 2, 2),)), ((1, 2, 4),))


def test_a_head_width_that_has_no_2d_rotation_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4"):
        VisionTower(VisionConfig(**{**_fields(), "qkv_hidden_size": 18}))


# ---- outside oracle ----------------------------------------------------------------------------------------------
def transformers_tower(tower: VisionTower) -> torch.nn.Module:
    """transformers' Kimi K2.5 tower with K3's weights and K3's differences from it.

    K2.5 has LayerNorm with bias (K3: RMSNorm), biases everywhere (K3: none), bicubic stretching (K3: bilinear), heads
    of hidden_size / heads (K3: of qkv_hidden_size), and stores the channels of a head as all real parts, then all
    imaginary parts (K3: adjacent). Everything else is theirs: patches, time waves, angles, attention, MLP, merge.
    """
    kimi = pytest.importorskip(
        "transformers.models.kimi_k25.modeling_kimi_k25", reason="needs transformers (extra dev)"
    )
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig

    c = tower.config
    side = max(c.pos_emb_height, c.pos_emb_width)
    theirs = kimi.Kimi_K25VisionModel(
        Kimi_K25VisionConfig(
            patch_size=c.patch_size,
            pos_emb_height=side,
            pos_emb_width=side,
            pos_emb_time=c.pos_emb_time,
            num_attention_heads=c.num_heads,
            num_hidden_layers=c.num_layers,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            merge_kernel_size=(c.merge, c.merge),
            rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
            head_dim=c.head_dim,
            attn_implementation="eager",
        )
    )
    theirs.patch_embed.pos_emb.interpolation_mode = "bilinear"
    theirs.final_layernorm = torch.nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
    for layer in theirs.layers:
        layer.norm1 = torch.nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        layer.norm2 = torch.nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.attn, name, torch.nn.Linear(c.hidden_size, c.qkv_hidden_size))
        layer.attn.proj = torch.nn.Linear(c.qkv_hidden_size, c.hidden_size)
        layer.attn.head_dim, layer.attn.scaling = c.head_dim, c.head_dim**-0.5
    for name, weight in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    missing, unexpected = theirs.load_state_dict(_their_weights(tower), strict=False)
    assert not unexpected and all(name.endswith("bias") for name in missing)
    return theirs


def _their_weights(tower: VisionTower) -> dict[str, Tensor]:
    c = tower.config
    weights = {name: value.float() for name, value in tower.state_dict().items()}
    halves = [*range(0, c.head_dim, 2), *range(1, c.head_dim, 2)]

    def real_then_imaginary(rows: Tensor) -> Tensor:
        return rows.view(c.num_heads, c.head_dim, -1)[:, halves].flatten(0, 1)

    out = {
        "patch_embed.proj.weight": weights["patch_embed.proj.weight"],
        "patch_embed.pos_emb.position_embeddings": weights["patch_embed.pos_emb.weight"],
        "final_layernorm.weight": weights["encoder.final_layernorm.weight"],
    }
    for i in range(c.num_layers):
        ours = f"encoder.blocks.{i}."
        q, k, v = weights[ours + "wqkv.weight"].chunk(3)
        out |= {
            f"layers.{i}.attn.q_proj.weight": real_then_imaginary(q),
            f"layers.{i}.attn.k_proj.weight": real_then_imaginary(k),
            f"layers.{i}.attn.v_proj.weight": v,
            f"layers.{i}.attn.proj.weight": weights[ours + "wo.weight"],
            f"layers.{i}.mlp.fc1.weight": weights[ours + "mlp.fc0.weight"],
            f"layers.{i}.mlp.fc2.weight": weights[ours + "mlp.fc1.weight"],
            f"layers.{i}.norm1.weight": weights[ours + "norm0.weight"],
            f"layers.{i}.norm2.weight": weights[ours + "norm1.weight"],
        }
    return out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_tower_equals_transformers(seed: int) -> None:
    config = VisionConfig(**{**_fields(), "pos_emb_height": 6, "pos_emb_width": 6})
    tower, _ = make(config, torch.float32, seed)
    theirs = transformers_tower(tower)
    grids = ((1, 4, 6), (3, 2, 4), (1, 6, 6), (4, 4, 2), (1, 10, 8))
    pixels = random_pixels(grids, torch.float32)
    with torch.no_grad():
        want = theirs(pixels, grid_thw=torch.tensor(grids)).pooler_output
        got = tower(pixels, grids)
    assert float(want.std()) > 0.3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
