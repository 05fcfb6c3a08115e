"""Which part of the KDA prefill is wrong on a device: each intermediate of the preparation against float64."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from baltoro.kernels.kda import prefill, triton_chunk
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.spans import Spans

H, K, C = 2, 128, 64
WIDEN = '''
@triton.jit
def widen(g, before, after, C: tl.constexpr, SIZE: tl.constexpr, BK: tl.constexpr):
    grouped = tl.reshape(g, [C // SIZE, SIZE, BK])
    second = (tl.arange(0, SIZE) >= SIZE // 2)[None, :, None]
    first_sum = tl.sum(tl.where(second, 0.0, grouped), axis=1)[:, None, :]
    second_sum = tl.sum(tl.where(second, grouped, 0.0), axis=1)[:, None, :]
    before += tl.reshape(tl.where(second, first_sum, 0.0), [C, BK])
    after += tl.reshape(tl.where(second, 0.0, second_sum), [C, BK])
    return before, after


@triton.jit
def decays(g, C: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr):
    before, after = g, tl.zeros([C, BK], tl.float32)
    for level in tl.static_range(7):
        if (1 << level) < HALF:
            before, after = widen(g, before, after, C, 2 << level, BK)
    return before, after


@triton.jit
def corners('''
FORWARD = '''
@triton.jit
def decays(g, C: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr):
    """Forward scan alone."""
    grouped = tl.reshape(g, [C // HALF, HALF, BK])
    before = tl.cumsum(grouped, axis=1)
    after = tl.sum(grouped, axis=1)[:, None, :] - before
    return tl.reshape(before, [C, BK]), tl.reshape(after, [C, BK])


@triton.jit
def corners('''


def variant(name: str, text: str | None) -> Any:
    if text is None:
        return triton_chunk
    source = Path(triton_chunk.__file__).read_text()
    start, end = source.index("@triton.jit\ndef decays"), source.index("@triton.jit\ndef corners")
    place = Path(f"/tmp/diag_{name}.py")
    place.write_text(source[:start] + text.strip() + source[end + len("@triton.jit\ndef corners(") :])
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module
    spec.loader.exec_module(module)
    return module


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def truth(q, k, v, g, beta, rows, scale):
    found = {n: [] for n in ("w", "u", "k_out", "q_in", "a", "gamma")}
    for first, length in rows:
        part = slice(first, first + length)
        qs, ks, vs, gs, bs = (t[part].double().transpose(0, 1) for t in (q, k, v, g, beta.unsqueeze(-1)))
        pad = lambda t: torch.nn.functional.pad(t, (0, 0, 0, C - length))  # noqa: E731
        qs, ks, vs, gs, bs = map(pad, (qs, ks, vs, gs, bs))
        cum = gs.cumsum(1)
        ratio = (cum[:, :, None] - cum[:, None]).clamp_max(0).exp()
        kk = torch.einsum("hik,hjk,hijk->hij", ks, ks, ratio).tril(-1) * bs
        qk = torch.einsum("hik,hjk,hijk->hij", qs, ks, ratio).tril() * scale
        inverse = torch.linalg.inv(torch.eye(C, device=q.device, dtype=torch.float64) + kk)
        found["w"].append(inverse @ (ks * bs * cum.exp()))
        found["u"].append(inverse @ (vs * bs))
        found["k_out"].append(ks * (cum[:, -1:] - cum).exp())
        found["q_in"].append(qs * cum.exp() * scale)
        found["a"].append(qk)
        found["gamma"].append(cum[:, -1].exp())
    return {n: torch.stack(x) for n, x in found.items()}


def main() -> None:
    torch.manual_seed(0)
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    lengths, starts, borders = (1, 63, 130, 300, 17), (0, 64, 5, 0, 60), ((3, 128), (2, 59))
    num, scale = sum(lengths), K**-0.5
    q, k = (l2_norm(torch.randn(num, H, K, device=device)) for _ in range(2))
    v, beta = torch.randn(num, H, K, device=device), torch.rand(num, H, device=device)
    g = -5 * torch.sigmoid(torch.randn(num, H, K, device=device) - 3)
    state = torch.randn(len(lengths), H, K, K, device=device)
    layout = (lengths, starts, borders)
    spans = Spans.build(lengths, starts, device=device)
    doubles = [t.double() for t in (q, k, v, g, beta)]
    expected, wanted = recurrent(*doubles, spans=spans, state=state.double(), scale=scale, borders=borders)
    by_cpu, _ = recurrent(
        *(t.cpu() for t in doubles), spans=Spans.build(lengths, starts), state=state.double().cpu(), scale=scale, borders=borders
    )
    print("oracle against itself on the CPU", gap(expected.cpu(), by_cpu))
    plan, _ = prefill._tables(layout, C, None, torch.device(device))
    good = truth(*doubles, [c[:2] for c in plan.chunks], scale)
    for name, text in (("as it is", None), ("doubling", WIDEN), ("forward", FORWARD)):
        module = variant(name.replace(" ", "_"), text)
        caught: list[Any] = []

        class Spy:
            def __init__(self, kernel: Any) -> None:
                self.kernel = kernel

            def __getitem__(self, grid: Any) -> Any:
                def call(*args: Any, **kwargs: Any) -> None:
                    self.kernel[grid](*args, **kwargs)
                    caught.append(args)

                return call

        for is_bounded in (True, False):
            for dtype in (torch.float32, torch.bfloat16):
                caught.clear()
                with (
                    mock.patch.dict(sys.modules, {"baltoro.kernels.kda.triton_chunk": module}),
                    mock.patch.object(module, "prepare_kernel", Spy(module.prepare_kernel)),
                ):
                    o, after = prefill.run(q, k, v.to(dtype), g, beta, state, layout, scale=scale, is_bounded=is_bounded)
                made = dict(zip(("w", "u", "k_out", "q_in", "a", "gamma"), caught[0][6:12], strict=True))
                gaps = " ".join(f"{n} {gap(made[n], good[n]):.1e}" for n in made)
                print(f"{name:9} bounded {is_bounded} {dtype}: o {gap(o, expected):.1e} state {gap(after, wanted):.1e} | {gaps}", flush=True)
        rows = (o.double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
        edges = [0, 1, 64, 194, 494, 511]
        print("   by span", [f"{float(rows[a:b].max()):.1e}" for a, b in zip(edges, edges[1:])], "states", [f"{gap(a, b):.1e}" for a, b in zip(after, wanted)])


if __name__ == "__main__":
    main()
