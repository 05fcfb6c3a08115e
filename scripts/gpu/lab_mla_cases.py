"""Problems of `lab_mla.py` at K3's widths (tiny in a dry run): what is launched, how far off the results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.attnres import fused
from baltoro.kernels.linear import fast as linear
from baltoro.kernels.linear import reference as plain_linear
from baltoro.kernels.linear import stream
from baltoro.kernels.linear.stream import StreamTiles
from baltoro.kernels.mla import reference, split_decode
from baltoro.kernels.mla.split_decode import Tiles
from baltoro.kernels.moe import fast_route
from baltoro.kernels.moe.reference import route

EPS = 1e-5
SMALL = 20
"""Launches of a small operation in one graph: alone, the gap between two graphs would be most of the time."""
PICKS: dict[str, Any] = {"top_k": 16, "activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}


@dataclass(slots=True)
class Problem:
    """launch(setting, turn) -> results; error(results of turn 0); turns: sets of inputs that are timed in a row."""

    launch: Callable[[Any, int], Any]
    error: Callable[[Any], float]
    num_bytes: float
    flops: float = 0.0
    turns: int = 1


@dataclass(slots=True)
class Case:
    name: str
    build: Callable[[bool], Problem]
    settings: Sequence[Any]
    bound: float
    made: Problem | None = None

    def problem(self, is_dry: bool) -> Problem:
        """Built once, until it is forgotten."""
        self.made = self.made or self.build(is_dry)
        return self.made

    def forget(self) -> None:
        self.made = None


def gap(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def device_of(is_dry: bool) -> str:
    return "cpu" if is_dry else "cuda"


def attention(requests: int, keys: int, heads: int, window: int, is_dry: bool) -> Problem:
    """As baltoro/bench/kernels/mla.py: pages in random order, NaN behind each length."""
    device, page = device_of(is_dry), 64
    latent, shared = (64, 16) if is_dry else (512, 64)
    requests, keys = (min(requests, 2), 512) if is_dry else (requests, keys)
    pages = -(-keys // page)
    shape = (requests * pages + 1, page, 3, latent + shared)
    arena = torch.randn(shape, device=device, dtype=torch.bfloat16)
    table = (torch.randperm(requests * pages, device=device) + 1).view(requests, pages)
    lengths = torch.full((requests,), keys - page // 2, device=device)
    arena[table[:, -1], page // 2 :] = float("nan")
    shape = (requests, heads) if window == 1 else (requests, window, heads)
    q, kv = torch.randn(*shape, latent + shared, device=device).bfloat16(), arena[:, :, 1]
    options: dict[str, Any] = {"latent": latent, "scale": 192**-0.5}
    last = slice(requests - 1, requests)
    own = torch.arange(pages, device=device).unsqueeze(0)

    @cache
    def exact() -> tuple[Tensor, Tensor]:
        rows = kv[table[-1]].double()
        return reference.attend_absorbed(q[last].double(), rows, own, lengths[last], **options)

    def launch(setting: tuple[Tiles, int | None, bool], turn: int) -> tuple[Tensor, Tensor]:
        tiles, splits, is_dependent = setting
        if is_dependent:
            return split_decode.attend_absorbed(q, kv, table, lengths, tiles=tiles, splits=splits, **options)
        with mock.patch.object(split_decode, "has_dependent_launch", lambda _: False):
            return split_decode.attend_absorbed(q, kv, table, lengths, tiles=tiles, splits=splits, **options)

    def error(results: tuple[Tensor, Tensor]) -> float:
        return max(gap(got[last], true) for got, true in zip(results, exact(), strict=True))

    flops = 2.0 * requests * keys * heads * window * (2 * latent + shared)
    turns = 1 if is_dry else max(1, min(4, 600_000 // (requests * keys)))
    return Problem(launch, error, requests * keys * (latent + shared) * 2, flops, turns)


def product_alone(setting: str, x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [T, O]: the framework's product with fp32 results in one of its forms, nothing cut or rounded."""
    before = torch.backends.cuda.preferred_blas_library()
    if "Lt" in setting:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    if "turned" in setting:
        sums = torch.mm(weight, x.T, out_dtype=torch.float32).T
    else:
        sums = torch.mm(x, weight.T, out_dtype=torch.float32)
    torch.backends.cuda.preferred_blas_library(before)
    return sums


def router(tokens: int, is_dry: bool) -> Problem:
    """Router + latent down; the weights of several layers in turn."""
    device, turns = device_of(is_dry), 1 if is_dry else 8
    logits, rest, width = (24, 40, 160) if is_dry else (896, 3584, 7168)
    weights = [torch.randn(logits + rest, width, device=device).mul_(0.02).bfloat16() for _ in range(min(turns, 4))]
    x = torch.randn(tokens, width, device=device).bfloat16()
    exact = cache(lambda: plain_linear.router_linear(x.double(), weights[0].double(), logits))

    def launch(setting: Any, turn: int) -> tuple[Tensor, Tensor]:
        weight = weights[turn % len(weights)]
        if setting == "one product":
            return linear.one_product(x, weight, logits)
        if setting == "torch.mm, bf16":
            return torch.mm(x, weight.T).split([logits, rest], 1)
        if isinstance(setting, str):
            return product_alone(setting, x, weight).split([logits, rest], 1)
        first = torch.empty(tokens, logits, dtype=torch.float32, device=device)
        other = x.new_empty(tokens, rest)
        if isinstance(setting, StreamTiles):
            stream.product(x, weight, first, other, logits, tiles=setting)
        else:
            product = linear.few_rows if setting.rows == 1 else linear.many_rows
            product(x, weight, first, other, logits, tiles=setting)
        return first, other

    def error(results: tuple[Tensor, Tensor]) -> float:
        if results[0].dtype == torch.float32 and gap(results[0], exact()[0]) > 1e-5:
            return float("nan")
        return gap(results[1], exact()[1])

    return Problem(launch, error, 2 * weights[0].numel(), 2 * tokens * weights[0].numel(), turns)


def select(tokens: int, is_dry: bool) -> Problem:
    logits, bias = (torch.randn(*shape, device=device_of(is_dry)) for shape in ((tokens, 896), (896,)))
    ids, exact = route(logits.double(), bias.double() * 0.1, **PICKS)

    def launch(setting: tuple[int, int], turn: int) -> tuple[Tensor, Tensor]:
        with mock.patch.multiple(fast_route, WIDTH=setting[0], MAX_WARPS=setting[1]):
            return fast_route.route(logits, small, **PICKS)

    small = bias * 0.1

    def error(results: tuple[Tensor, Tensor]) -> float:
        return gap(results[1], exact) if torch.equal(results[0], ids) else float("nan")

    return Problem(launch, error, tokens * (896 * 4 + 16 * 12), turns=1 if is_dry else SMALL)


def router_and_select(tokens: int, is_dry: bool) -> Problem:
    """What selecting adds to the product in front of it."""
    product, bias = router(tokens, is_dry), torch.randn(24 if is_dry else 896, device=device_of(is_dry)) * 0.1
    tiles = linear.choose_tiles(tokens)

    def launch(setting: str, turn: int) -> tuple[Tensor, Tensor]:
        logits, rest = product.launch(tiles, turn)
        return (logits, rest) if setting == "product" else fast_route.route(logits, bias, **PICKS)

    def error(results: tuple[Tensor, Tensor]) -> float:
        return product.error(results) if results[0].dtype == torch.float32 else 0.0

    return Problem(launch, error, product.num_bytes, product.flops, product.turns)


def depth_mix(tokens: int, is_dry: bool) -> Problem:
    """Pending add, mix of 9 sources, norm. A setting is the module's constants."""
    device, width, tokens = device_of(is_dry), 300 if is_dry else 7168, min(tokens, 3) if is_dry else tokens
    bank = torch.randn(8, tokens, width, device=device).bfloat16()
    prefix, update = (torch.randn(tokens, width, device=device).bfloat16() for _ in range(2))
    query, gain = torch.randn(width, device=device) * 0.02, (torch.rand(width, device=device) + 0.5).bfloat16()
    some = slice(0, 64)
    wide = [one.double() for one in (bank[:, some], prefix[some], update[some], query, gain)]
    exact = fused.read(*wide, EPS, EPS)[1]

    def launch(setting: dict[str, Any], turn: int) -> tuple[Tensor, Tensor]:
        constants = dict(setting)
        if "dependent" in constants:
            constants["has_dependent_launch"] = partial(_constant, constants.pop("dependent"))
        with mock.patch.multiple(attnres, **constants):
            return attnres.read(bank, prefix, update, query, gain, EPS, EPS)

    def error(results: tuple[Tensor, Tensor]) -> float:
        is_sum = is_dry or torch.equal(results[0], prefix + update)  # the interpreter truncates
        return gap(results[1][some], exact) if is_sum else float("nan")

    return Problem(launch, error, 12 * width * 2 * tokens, turns=1 if is_dry or tokens > 64 else SMALL)


def bank_pass(tokens: int, is_dry: bool) -> Problem:
    device, width, tokens = device_of(is_dry), 300 if is_dry else 7168, 3 if is_dry else tokens
    bank = torch.randn(8, tokens, width, device=device).bfloat16()
    queries = torch.randn(24, width, device=device) * 0.02
    exact = cache(lambda: fused.scan_bank(bank[:, :64].double(), queries.double(), EPS))

    def launch(setting: dict[str, Any], turn: int) -> tuple[Tensor, Tensor]:
        with mock.patch.multiple(attnres, **setting):
            return attnres.scan_bank(bank, queries, EPS)

    def error(results: tuple[Tensor, Tensor]) -> float:
        # sums of 448 products of a warp group are rounded towards zero, each by up to 2^-23
        off = float((results[1][:, :64].double() - exact()[1]).abs().max())
        return gap(results[0][:, :64], exact()[0]) if off < 1e-3 else 1e3 + off

    return Problem(launch, error, (8 + 24) * width * 2 * tokens)


def _constant(value: Any, _: Any) -> Any:
    return value
