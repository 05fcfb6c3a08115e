"""KDA on one GPU: decode, verify, fold and prefill beside their floors, and the peers that are installed.

Floors are the bytes that must move over this run's own copy bandwidth. Peers do less than our fused decode (fla's step
has neither convolution nor gate nor output norm) and get normalised inputs in prefill, as ours do.
Source: spec/kernels.md F.1 (shapes and earlier figures).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from baltoro.bench.kernels.replays import copy_bytes_per_second, eager_seconds, replay_seconds
from baltoro.bench.kernels.timing import PEER_FAULTS
from baltoro.kernels.kda import fused, prefill
from baltoro.kernels.kda.fused_reference import MixerWeights, Window
from baltoro.kernels.norm.reference import l2_norm
from baltoro.kernels.spans import Spans

K = V = 128
TAPS, WINDOW = 4, 8
STATE_BYTES = K * V * 4
# a set of inputs larger than the L2 cache of any card, so that replays do not read from it
CACHE_BYTES = 256 << 20
# names that builds of FlashKDA are imported by
FLASH_KDA = ("flash_kda", "tokenspeed_flashkda")
DECODES = ((12, 1), (12, 32), (12, 256), (96, 1), (96, 32), (96, 256))
VERIFIES = ((12, 1), (12, 32))
FOLD = (12, 32, 8)
PREFILLS = ((8192, 1, 96), (1024, 8, 96), (8192, 1, 12), (65536, 1, 12))


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured row. `floor_seconds` 0: a peer's row, held against ours."""

    operation: str
    implementation: str
    seconds: float
    floor_seconds: float
    note: str = ""


def measure(only: str = "") -> tuple[list[Figure], dict[str, float]]:
    """All rows whose operation contains `only`, and this run's ceilings. Needs a CUDA device with triton."""
    bandwidth = copy_bytes_per_second()
    torch.manual_seed(0)
    rows = [figure for name, make in _benches() if only in name for figure in make(name, bandwidth)]
    return rows, {"copy_bytes_per_second": bandwidth}


def as_dicts(rows: list[Figure]) -> list[dict[str, Any]]:
    """For the record."""
    return [asdict(row) for row in rows]


def _benches() -> Iterator[tuple[str, Callable[[str, float], list[Figure]]]]:
    for heads, num in DECODES:
        yield f"kda decode {num} x {heads} heads", partial(_decode, heads, num)
    for heads, num in VERIFIES:
        yield f"kda verify {WINDOW} tokens {num} x {heads} heads", partial(_verify, heads, num)
    yield "kda fold {1} x {0} heads, {2} layers".format(*FOLD), partial(_fold, *FOLD)
    for length, num, heads in PREFILLS:
        yield f"kda prefill {num} x {length} tokens, {heads} heads", partial(_prefill, length, num, heads)


def _weights(heads: int) -> MixerWeights:
    draw = partial(torch.randn, device="cuda")
    conv, norm = draw(heads * (2 * K + V), TAPS) * 0.5, draw(V)
    return MixerWeights(conv, draw(heads) * 0.3, draw(heads, K) - 3, norm, 1e-5, -5.0, K**-0.5)


def _inputs(heads: int, lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    return draw(*lead, heads * (2 * K + V)), draw(*lead, heads, K), draw(*lead, heads), draw(*lead, heads, V)


def _slots(heads: int, num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    history = torch.randn(num + 1, TAPS - 1, heads * (2 * K + V), device="cuda", dtype=torch.bfloat16)
    state = torch.randn(num + 1, heads, V, K, device="cuda") * 0.1
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)) + 1
    return history, state, order.to("cuda")


def _sets(bytes_each: int) -> int:
    return max(1, min(64, CACHE_BYTES // bytes_each))


def _decode(heads: int, num: int, name: str, bandwidth: float) -> list[Figure]:
    moved = 2 * num * heads * STATE_BYTES
    weights, works, peers = _weights(heads), [], []
    for seed in range(_sets(moved // 2)):
        inputs, (history, state, slots) = _inputs(heads, (num,)), _slots(heads, num, seed)
        works.append(partial(fused.decode, *inputs, weights, history, state, slots))
        peers.append(partial(_fla_step, heads, num, state[1:]))
    rows = [Figure(name, "baltoro", replay_seconds(works), moved / bandwidth, "conv, gate and norms included")]
    if find_spec("fla"):
        rows += _peer(
            "fla", lambda: Figure(name, "fla", replay_seconds([peer() for peer in peers]), 0.0, "recurrence alone")
        )
    return rows


def _peer(peer: str, make: Callable[[], Figure]) -> list[Figure]:
    """Its row; a peer that cannot run here says why and has none."""
    try:
        return [make()]
    except PEER_FAULTS as error:
        warnings.warn(f"{peer} did not run: {type(error).__name__}: {str(error)[:300]}", stacklevel=2)
        return []


def _fla_step(heads: int, num: int, state: Tensor) -> Callable[[], object]:
    from fla.ops.kda import fused_recurrent_kda

    shape = (num, 1, heads, K)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(shape, device="cuda"), torch.rand(num, 1, heads, device="cuda")
    return partial(
        fused_recurrent_kda, q=q, k=k, v=v, g=g, beta=beta, scale=K**-0.5, initial_state=state, output_final_state=True
    )


def _verify(heads: int, num: int, name: str, bandwidth: float) -> list[Figure]:
    moved, works, weights = num * heads * STATE_BYTES, [], _weights(heads)
    for seed in range(_sets(moved)):
        history, state, slots = _slots(heads, num, seed)
        window = Window.empty(num, WINDOW, heads=heads, keys=K, values=V, dtype=torch.bfloat16, device="cuda")
        works.append(partial(fused.verify, *_inputs(heads, (num, WINDOW)), weights, history, state, slots, window))
    return [Figure(name, "baltoro", replay_seconds(works), moved / bandwidth, "writes no state; inputs recorded")]


def _fold(heads: int, num: int, layers: int, name: str, bandwidth: float) -> list[Figure]:
    states = torch.randn(num + 1, layers, heads, V, K, device="cuda") * 0.1
    histories = torch.randn(num + 1, layers, TAPS - 1, heads * (2 * K + V), device="cuda", dtype=torch.bfloat16)
    window = Window.empty(
        num, WINDOW, heads=heads, keys=K, values=V, dtype=torch.bfloat16, device="cuda", layers=layers
    )
    for kept in (window.x, window.k, window.v):
        kept.normal_().mul_(0.1)
    window.decay.uniform_(0.5, 1.0)
    window.beta.uniform_()
    views = [histories[:, i] for i in range(layers)], [states[:, i] for i in range(layers)]
    slots = torch.arange(1, num + 1, device="cuda")
    rows = []
    for count in (1, WINDOW):
        accepted = torch.full((num,), count, dtype=torch.int32, device="cuda")
        seconds = replay_seconds([partial(fused.fold, window, *views, slots, accepted)])
        record = num * layers * heads * count * (4 * K + 2 * V + 4 * K + 4)
        floor = (2 * num * layers * heads * STATE_BYTES + record) / bandwidth
        rows.append(Figure(name, "baltoro", seconds, floor, f"{count} accepted"))
    return rows


def _prefill(length: int, num: int, heads: int, name: str, bandwidth: float) -> list[Figure]:
    tokens, spans = length * num, Spans.build([length] * num, device="cuda")
    q, k = (l2_norm(torch.randn(tokens, heads, K, device="cuda")).bfloat16() for _ in range(2))
    v = torch.randn(tokens, heads, V, device="cuda", dtype=torch.bfloat16)
    g = -0.1 * torch.rand(tokens, heads, K, device="cuda")
    beta, state = torch.rand(tokens, heads, device="cuda"), torch.randn(num, heads, V, K, device="cuda") * 0.1
    moved = tokens * heads * 1282 + 2 * num * heads * STATE_BYTES
    ours = partial(prefill.chunked, q, k, v, g, beta, spans=spans, state=state, scale=K**-0.5, is_bounded=True)
    rows = [Figure(name, "baltoro", replay_seconds([ours]), moved / bandwidth, "fp32 g; state in and out")]
    if find_spec("fla"):
        from baltoro.kernels.kda import fla

        peer = partial(fla.chunked, q, k, v, g, beta, spans=spans, state=state, scale=K**-0.5, is_bounded=True)
        rows += _peer("fla", lambda: Figure(name, "fla", eager_seconds(peer), 0.0, "plain calls"))
    return rows + _flash_kda(name, q, k, v, beta, state, spans)


def _flash_kda(name: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, spans: Spans) -> list[Figure]:
    """tokenspeed-flashkda norms and gates inside: it gets raw gates of a like strength."""
    found = [peer for peer in FLASH_KDA if find_spec(peer)]
    if not found:
        return []
    return _peer(
        "flash_kda",
        lambda: Figure(name, "flash_kda", _flash_kda_seconds(found[0], q, k, v, beta, state, spans), 0.0, "norm, gate"),
    )


def _flash_kda_seconds(
    module: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, spans: Spans
) -> float:
    flash_kda, heads = import_module(module), q.shape[1]
    raw, out = torch.randn_like(q), torch.empty_like(v)
    a_log, bias = torch.zeros(heads, device="cuda"), torch.full((heads, K), -4.0, device="cuda")
    offsets, final = spans.offsets_device.long(), torch.empty_like(state)
    one = tuple(x.unsqueeze(0) for x in (q, k, v, raw, beta.bfloat16()))
    call = partial(
        flash_kda.fwd, *one, K**-0.5, out.unsqueeze(0), A_log=a_log, dt_bias=bias, lower_bound=-5.0,
        initial_state=state, final_state=final, cu_seqlens=offsets,
    )  # fmt: skip
    return replay_seconds([call])
