"""MoonViT3d vision tower and the projector that turns its output into token embeddings.

In: patches [sum t*h*w, 3, patch, patch] of several items packed on the first axis, and their (t, h, w) in patches.
Out: one row per merge x merge cell of each item (frames averaged), items in order, cells row-major; the projector makes
a text-width feature of each, which replaces the embedding of one media-pad token.
Invariants: items do not see each other; packing them changes no row. Nothing has a bias. Position tables for time and
rotation are computed, never stored.
Not here: resizing, padding and cutting into patches (`chat/media.py`), which token row takes which feature
(`model/context.py`, Media).
Source: spec/k3.md 7.2, 7.3; tensor names 2.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baltoro.errors import ConfigError, ShapeError
from baltoro.kernels.precision import acc_dtype
from baltoro.model.config import VisionConfig
from baltoro.model.linear import Linear, RMSNorm

Grid = tuple[int, int, int]

ROPE_BASE = 10000.0
TIME_BASE = 10000.0
MAX_SIDE = 512  # the published rotation table ends here


class PatchProjection(nn.Module):
    """A convolution whose stride is its size: each patch [3, p, p] times weight [C, 3, p, p]."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        shape = (config.hidden_size, 3, config.patch_size, config.patch_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, 3, p, p] -> [P, C]."""
        return F.linear(pixels.flatten(1), self.weight.flatten(1))


class PositionTable(nn.Module):
    """A learnt table over rows and columns, stretched to each item's grid, plus fixed waves over its frames."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.max_frames = config.pos_emb_time
        shape = (config.pos_emb_height, config.pos_emb_width, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def forward(self, grid: Grid) -> Tensor:
        """What to add to one item's patches: [t*h*w, C] in the accumulate dtype.

        A single frame gets no time term at all, not the term of frame 0 (whose cosines are 1).
        """
        frames, height, width = grid
        table = self.weight.to(acc_dtype(self.weight.dtype))
        if table.shape[:2] != (height, width):
            stretched = F.interpolate(
                table.permute(2, 0, 1)[None], size=(height, width), mode="bilinear", align_corners=False
            )
            table = stretched[0].permute(1, 2, 0)
        if frames == 1:
            return table.flatten(0, 1)
        waves = time_waves(frames, table.shape[-1], dtype=table.dtype, device=table.device)
        return (waves[:, None, None] + table).flatten(0, 2)


class PatchEmbed(nn.Module):
    """Patches to vectors with their positions added."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.proj = PatchProjection(config, dtype=dtype, device=device)
        self.pos_emb = PositionTable(config, dtype=dtype, device=device)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[sum thw, 3, p, p] -> [sum thw, C]."""
        x: Tensor = self.proj(pixels)
        return x + torch.cat([self.pos_emb(grid).repeat(count, 1) for grid, count in runs(grids)]).to(x.dtype)


class VisionMLP(nn.Module):
    """fc1(gelu(fc0(x))), the tanh form of GELU."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.fc0 = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)
        self.fc1 = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc1(F.gelu(self.fc0(x), approximate="tanh"))
        return out


class VisionLayer(nn.Module):
    """Pre-norm attention over one item, all frames together, then the MLP."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.qkv_hidden_size
        self.num_heads = config.num_heads
        self.norm0 = RMSNorm(width, config.norm_eps, dtype=dtype, device=device)
        self.norm1 = RMSNorm(width, config.norm_eps, dtype=dtype, device=device)
        self.wqkv = Linear(width, 3 * inner, dtype=dtype, device=device)
        self.wo = Linear(inner, width, dtype=dtype, device=device)
        self.mlp = VisionMLP(config, dtype=dtype, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """x [P, C]; cos, sin [P, K/2] in the accumulate dtype; shapes: (items, patches of each) of each run."""
        x = x + self.wo(self._attend(self.norm0(x), cos, sin, shapes))
        out: Tensor = x + self.mlp(self.norm1(x))
        return out

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # an item may have 65,536 patches: the fused call never holds the square of scores
        sizes = [count * length for count, length in shapes]
        outs = []
        for shape, *parts in zip(shapes, *(part.split(sizes) for part in (q, k, v)), strict=True):
            items = (part.unflatten(0, shape).transpose(1, 2) for part in parts)  # [items, heads, patches, K]
            outs.append(F.scaled_dot_product_attention(*items).transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).flatten(1)


class Encoder(nn.Module):
    """The layers (`blocks` is the published name) and the last norm."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        layers = (VisionLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(layers)
        self.final_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, device=device)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[sum thw, C] -> the same shape."""
        acc = acc_dtype(x.dtype)
        tables = [(rope_angles(grid, self.head_dim, dtype=acc, device=x.device), n) for grid, n in runs(grids)]
        angles = torch.cat([table.repeat(count, 1) for table, count in tables])
        cos, sin = angles.cos(), angles.sin()
        shapes = [(count, len(table)) for table, count in tables]
        for layer in self.blocks:
            x = layer(x, cos, sin, shapes)
        out: Tensor = self.final_layernorm(x)
        return out


class VisionTower(nn.Module):
    """Patches in, merged cells out. Parameter names are the published ones below `vision_tower.`."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        if config.head_dim % 4:
            raise ConfigError(
                f"qkv_hidden_size / vt_num_attention_heads is {config.head_dim}; 2-D rotation needs a multiple of 4"
            )
        if config.hidden_size % 2:
            raise ConfigError(f"vt_hidden_size {config.hidden_size} must be even: half sines, half cosines over time")
        self.config = config
        self.patch_embed = PatchEmbed(config, dtype=dtype, device=device)
        self.encoder = Encoder(config, dtype=dtype, device=device)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Pixels [sum thw, 3, p, p], any float dtype -> [sum (h/m)(w/m), m*m, C] with m = config.merge.

        Errors: ShapeError if the grids do not fit the pixels, the merge, the frame limit or the rotation table.
        """
        self._check(pixels, grids)
        x = self.patch_embed(pixels.to(self.patch_embed.proj.weight.dtype), grids)
        x = self.encoder(x, grids)
        of_runs = runs(grids)
        parts = x.split([count * t * h * w for (t, h, w), count in of_runs])
        return torch.cat([merge(part, grid, self.config.merge) for part, (grid, _) in zip(parts, of_runs, strict=True)])

    def _check(self, pixels: Tensor, grids: Sequence[Grid]) -> None:
        size, cell = self.config.patch_size, self.config.merge
        num_patches = sum(t * h * w for t, h, w in grids)
        if not grids or tuple(pixels.shape) != (num_patches, 3, size, size):
            raise ShapeError(f"pixels {tuple(pixels.shape)} for grids {list(grids)} of {size}-pixel patches")
        for t, h, w in grids:
            if not 1 <= t <= self.config.pos_emb_time:
                raise ShapeError(f"an item of {t} frames; this tower takes 1 to {self.config.pos_emb_time}")
            if h < 1 or w < 1 or h % cell or w % cell or max(h, w) > MAX_SIDE:
                raise ShapeError(f"a grid of {h} x {w} patches; sides must be multiples of {cell}, at most {MAX_SIDE}")


class Projector(nn.Module):
    """Merged cells to text width: proj.0, exact GELU, proj.2, RMSNorm. Names as published below `mm_projector.`."""

    def __init__(
        self,
        config: VisionConfig,
        text_hidden_size: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        width = config.hidden_size * config.merge**2
        self.proj = nn.Sequential(
            Linear(width, width, dtype=dtype, device=device),
            nn.GELU(),
            Linear(width, text_hidden_size, dtype=dtype, device=device),
        )
        self.post_norm = RMSNorm(text_hidden_size, config.projector_ln_eps, dtype=dtype, device=device)

    def forward(self, cells: Tensor) -> Tensor:
        """[X, m*m, C] -> [X, D]; a cell is flattened as (row in cell, column in cell, channel)."""
        out: Tensor = self.post_norm(self.proj(cells.flatten(1)))
        return out


def time_waves(frames: int, width: int, *, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """[t, C]: sin(f * w_k) for k < C/2, then cos of the same, with w_k = 10000^(-k / (C/2))."""
    half = width // 2
    frequency = TIME_BASE ** (-torch.arange(half, dtype=dtype, device=device) / half)
    angle = torch.arange(frames, dtype=dtype, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def rope_angles(grid: Grid, head_dim: int, *, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """[t*h*w, K/2]: by how much each pair of channels turns.

    Pair 2m turns by column * theta_m, pair 2m + 1 by row * theta_m, theta_m = 10000^(-4m / K); every frame alike.
    """
    frames, height, width = grid
    theta = ROPE_BASE ** (-torch.arange(0, head_dim, 4, dtype=dtype, device=device) / head_dim)
    rows, columns = (torch.arange(side, dtype=dtype, device=device)[:, None] * theta for side in (height, width))
    shape = (height, width, theta.shape[0])
    plane = torch.stack([columns[None].expand(shape), rows[:, None].expand(shape)], dim=-1)
    return plane.reshape(height * width, -1).repeat(frames, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent channel pairs of x [P, heads, K] by angles [P, K/2]; products in the accumulate dtype."""
    even, odd = x.to(cos.dtype).reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def merge(x: Tensor, grid: Grid, cell: int) -> Tensor:
    """Items of one grid [n*t*h*w, C] -> [n(h/m)(w/m), m*m, C]: neighbours of a cell side by side, mean over frames."""
    frames, height, width = grid
    cells = x.view(-1, frames, height // cell, cell, width // cell, cell, x.shape[-1]).mean(1)
    return cells.transpose(2, 3).reshape(-1, cell * cell, x.shape[-1])


def runs(grids: Sequence[Grid]) -> list[tuple[Grid, int]]:
    """Neighbouring items of one grid, which go through everything together: (grid, how many)."""
    return [(grid, len(list(group))) for grid, group in groupby(grids)]
