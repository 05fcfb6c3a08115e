"""Routes: the experts that routers took for each token, replayed in another forward (rollout routing replay, R3).

Two forwards of the same ids sum in different orders, and where the last expert that a router takes and the next one are
equal to rounding, they may take different ones: what comes out then differs by much more than rounding. An engine that
keeps routes (`CacheViews.routes`) tells which it took; a forward that is given them takes the same. Weights are never
replayed: they come from the forward's own logits, with gradient, renormalised over the replayed experts as ever.

In bytes, between rooms and in files, routes are int16, little-endian, row-major [tokens, Y, A]: Y layers of the decoder
that have experts, in order, and the A experts that each took, best first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.model.config import K3Config

MISSING = -1


@dataclass(frozen=True, slots=True)
class Routes:
    """What the routers of T tokens are to take.

    ids      integers [T, Y, A]; rows of MISSING: the router chooses for itself
    changed  int64 [Y], written by the forward: tokens for which the router's own choice was another set
    taken    int16 [T, Y, A], written by the forward: what was taken; None: nobody wants it
    """

    ids: Tensor
    changed: Tensor
    taken: Tensor | None = None

    @staticmethod
    def of(ids: Tensor) -> Routes:
        """With nothing counted yet."""
        return Routes(ids, torch.zeros(ids.shape[1], dtype=torch.int64, device=ids.device))

    @staticmethod
    def recorded(num_tokens: int, config: K3Config, device: torch.device) -> Routes:
        """Nothing to replay; the forward says in `taken` what the routers of so many tokens took."""
        ids = torch.full((num_tokens, *shape_of(config)), MISSING, dtype=torch.int16, device=device)
        return replace(Routes.of(ids), taken=ids.clone())

    def replace(self, index: int, own: Tensor) -> Tensor:
        """int64 [T, A]: what layer `index` of those with experts takes, where it would take `own`. Writes `changed`
        and `taken`."""
        given = self.ids[:, index].to(torch.int64)
        is_given = given[:, 0] != MISSING
        is_other = (given.sort(-1).values != own.sort(-1).values).any(-1)
        self.changed[index] = (is_given & is_other).sum()
        found = torch.where(is_given[:, None], given, own)
        if self.taken is not None:
            self.taken[:, index] = found.to(self.taken.dtype)
        return found


def shape_of(config: K3Config) -> tuple[int, int]:
    """(Y, A) of a model; (0, 0) without experts."""
    layers = config.expert_layers
    return (len(layers), config.num_active_experts) if layers else (0, 0)


def bytes_per_token(config: K3Config) -> int:
    """What the routes of one token take, in bytes."""
    layers, active = shape_of(config)
    return 2 * layers * active


def padded_routes(told: bytes, num_tokens: int, config: K3Config) -> Tensor:
    """int16 [num_tokens, Y, A] of routes in bytes, which may end early: rows of MISSING follow.

    Errors: ShapeError for bytes of another model, of more tokens, for experts that there are not or that a layer takes
    twice.
    """
    layers, active = shape_of(config)
    size = bytes_per_token(config)
    if not size or len(told) % size or len(told) > size * num_tokens:
        raise ShapeError(
            f"{len(told)} bytes are no routes of at most {num_tokens} tokens: a token takes {size} bytes "
            f"({layers} layers with experts, {active} of {config.num_experts} experts)"
        )
    found = np.frombuffer(told, dtype="<i2").reshape(-1, layers, active)
    if found.size:
        ordered = np.sort(found, axis=-1)
        if ordered[..., 0].min() < 0 or ordered[..., -1].max() >= config.num_experts:
            raise ShapeError(f"routes name experts {found.min()} to {found.max()} of {config.num_experts}")
        if (np.diff(ordered, axis=-1) == 0).any():
            raise ShapeError("routes name an expert twice for one token and layer")
    rows = torch.full((num_tokens, layers, active), MISSING, dtype=torch.int16)
    rows[: len(found)] = torch.from_numpy(found.astype(np.int16))
    return rows
