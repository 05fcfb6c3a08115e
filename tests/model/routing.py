"""Which experts the routers of a model take, from a forward of its own: what routes of an engine are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from baltoro.model.config import K3Config
from baltoro.model.context import ForwardContext, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.moe import Router
from baltoro.model.routes import shape_of


def routers_of(model: K3Model) -> list[Router]:
    """Those of the decoder, in order."""
    layers = [model.model.layers[i] for i in model.config.expert_layers]
    return [layer.block_sparse_moe.gate for layer in layers]


@contextmanager
def watched(model: K3Model) -> Iterator[list[Tensor]]:
    """Ids [T, A] that each router takes while the body runs a training forward, in the order of the layers."""
    found: list[Tensor] = []
    for router in routers_of(model):
        router.observer = lambda _, ids: found.append(ids)
    try:
        yield found
    finally:
        for router in routers_of(model):
            router.observer = None


@torch.no_grad()
def own_routes(model: K3Model, tokens: Sequence[int], adapter: int = 0) -> Tensor:
    """int64 [T, Y, A] of one forward of all `tokens`, alone; `adapter`: a slot of its bank."""
    with watched(model) as found:
        model(context(model, tokens, adapter))
    return torch.stack(found, 1)


def context(model: K3Model, tokens: Sequence[int], adapter: int = 0) -> ForwardContext:
    ids = torch.tensor(tokens, device=model.device)
    return train_context(ids, (len(ids),), adapters=(adapter,) if adapter else None)


def read(told: bytes | None, config: K3Config) -> Tensor:
    """int64 [T, Y, A] of bytes."""
    assert told is not None
    return torch.from_numpy(np.frombuffer(told, "<i2").astype(np.int64)).view(-1, *shape_of(config))


def written(routes: Tensor) -> bytes:
    """Bytes of [T, Y, A]."""
    return routes.cpu().numpy().astype("<i2").tobytes()


@torch.no_grad()
def make_near_ties(model: K3Model, *, size: float = 1e-7, seed: int = 0) -> None:
    """Experts in pairs whose rows of the router differ in their last bits, by `size` of each value: with an odd number
    taken, the last one taken and the next one are nearly always of one pair."""
    generator = torch.Generator().manual_seed(seed)
    for router in routers_of(model):
        assert router.config.num_active_experts % 2 == 1
        for first in range(0, router.config.num_experts - 1, 2):
            noise = 1.0 + size * torch.randn(router.weight.shape[1], generator=generator, dtype=torch.float64)
            router.weight[first + 1] = router.weight[first].double() * noise
            router.e_score_correction_bias[first + 1] = router.e_score_correction_bias[first]
