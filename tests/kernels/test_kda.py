"""KDA: chunk form = recurrent form = a float64 recurrence written here, values and gradients; gate; in-place step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.kda import decode, reference
from baltoro.kernels.kda.chunk import chunked
from baltoro.kernels.kda.gate import log_decay
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.spans import Spans

H, K, V = 3, 6, 5
SCALE = 0.41


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def rows(self, first: int, last: int, state: Tensor) -> Inputs:
        """Tokens first..last-1 with another entering state."""
        return Inputs(*(x[first:last] for x in self[:5]), state=state)


def inputs(num_tokens: int, num_spans: int = 1, *, decay: float = 0.1, dtype: torch.dtype = torch.float64) -> Inputs:
    """Normalised q and k, log-decays uniform in (-2 decay, 0), a full entering state."""
    q, k = (l2_norm(torch.randn(num_tokens, H, K, dtype=dtype)) for _ in range(2))
    g = -2 * decay * torch.rand(num_tokens, H, K, dtype=dtype)
    beta = torch.rand(num_tokens, H, dtype=dtype)
    v, state = torch.randn(num_tokens, H, V, dtype=dtype), torch.randn(num_spans, H, V, K, dtype=dtype)
    return Inputs(q, k, v, g, beta, state)


def naive(x: Inputs, spans: Spans) -> tuple[Tensor, Tensor]:
    """The papers' equations, per head and token, S as [K, V], in float64."""
    q, k, v, g, beta, state = (t.double() for t in x)
    outputs, finals = [], []
    for n in range(len(spans)):
        heads = [state[n, h].T for h in range(H)]
        for t in range(spans.offsets[n], spans.offsets[n + 1]):
            row = []
            for h in range(H):
                decayed = torch.diag(torch.exp(g[t, h])) @ heads[h]
                u = beta[t, h] * (v[t, h] - decayed.T @ k[t, h])
                heads[h] = decayed + torch.outer(k[t, h], u)
                row.append(heads[h].T @ q[t, h] * SCALE)
            outputs.append(torch.stack(row))
        finals.append(torch.stack([matrix.T for matrix in heads]))
    return torch.stack(outputs), torch.stack(finals)


def run(x: Inputs, spans: Spans) -> tuple[Tensor, Tensor]:
    return chunked(*x[:5], spans=spans, state=x.state, scale=SCALE)


def close(a: tuple[Tensor, ...], b: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left.double(), right.double(), atol=tolerance, rtol=0)


# lengths, starts: on the grid; off it; several packed, some shorter than a sub-block, some crossing the grid
LAYOUTS = [
    ([64], [0]),
    ([1], [0]),
    ([131], [0]),
    ([90], [37]),
    ([17, 1, 70, 33], [0, 63, 61, 130]),
    ([3, 128, 5], [62, 64, 64]),
]


@pytest.mark.parametrize(("lengths", "starts"), LAYOUTS)
def test_chunk_and_recurrent_equal_the_naive_recurrence(lengths: list[int], starts: list[int]) -> None:
    spans = Spans.build(lengths, starts)
    x = inputs(sum(lengths), len(lengths))
    expected = naive(x, spans)
    close(recurrent(*x[:5], spans=spans, state=x.state, scale=SCALE), expected)
    close(run(x, spans), expected)


@pytest.mark.parametrize(("lengths", "starts"), [([150], [20]), ([17, 1, 70, 33], [0, 63, 61, 130])])
def test_gradients_equal_those_of_the_naive_recurrence(lengths: list[int], starts: list[int]) -> None:
    spans = Spans.build(lengths, starts)
    x = Inputs(*(t.requires_grad_() for t in inputs(sum(lengths), len(lengths))))
    expected = naive(x, spans)
    seeds = [torch.randn_like(t) for t in expected]
    wanted = torch.autograd.grad(expected, x, seeds)
    close(torch.autograd.grad(run(x, spans), x, seeds), wanted)
    close(torch.autograd.grad(recurrent(*x[:5], spans=spans, state=x.state, scale=SCALE), x, seeds), wanted)


def test_gradients_flow_from_outputs_alone_and_from_states_alone() -> None:
    spans = Spans.build([70], [5])
    x = Inputs(*(t.requires_grad_() for t in inputs(70)))
    for pick in (0, 1):
        seed = torch.randn_like(naive(x, spans)[pick])
        wanted = torch.autograd.grad(naive(x, spans)[pick], x, seed, allow_unused=True)
        found = torch.autograd.grad(run(x, spans)[pick], x, seed, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            assert a is not None or b is None
            if a is not None:
                close((a,), (torch.zeros_like(a) if b is None else b,))


def test_no_state_means_zeros() -> None:
    spans = Spans.build([40, 30])
    x = inputs(70, 2)
    zeros = x._replace(state=torch.zeros_like(x.state))
    close(chunked(*x[:5], spans=spans, state=None, scale=SCALE), run(zeros, spans), 0)


def test_entering_state_is_not_written() -> None:
    x = inputs(70)
    before = x.state.clone()
    run(x, Spans.build([70], [3]))
    assert torch.equal(x.state, before)


@pytest.mark.parametrize("cuts", [[64], [1], [63, 64, 65], [30, 31, 100], [128, 129]])
def test_cutting_a_prompt_anywhere_gives_the_same_result(cuts: list[int]) -> None:
    x = inputs(150)
    o, final = run(x, Spans.build([150]))
    outputs, state = [], x.state
    for first, last in zip([0, *cuts], [*cuts, 150], strict=True):
        part, state = run(x.rows(first, last, state), Spans.build([last - first], [first]))
        outputs.append(part)
    close((torch.cat(outputs), state), (o, final))


def test_packing_with_others_changes_nothing() -> None:
    spans = Spans.build([33, 80, 65], [10, 0, 64])
    x = inputs(178, 3)
    o, final = run(x, spans)
    for n in range(3):
        first, last = spans.offsets[n], spans.offsets[n + 1]
        alone = run(x.rows(first, last, x.state[n : n + 1]), spans.select(n, n + 1))
        close(alone, (o[first:last], final[n : n + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_never_change_earlier_outputs_bitwise(dtype: torch.dtype) -> None:
    x, other = inputs(140, dtype=dtype), inputs(140, decay=3.0, dtype=dtype)
    spans = Spans.build([140], [9])
    o, _ = run(x, spans)
    for cut in (1, 15, 16, 54, 55, 56, 119, 139):
        mixed = Inputs(*(torch.cat([a[:cut], b[cut:]]) for a, b in zip(x[:5], other[:5], strict=True)), state=x.state)
        assert torch.equal(run(mixed, spans)[0][:cut], o[:cut])


def test_full_decay_for_a_chunk_and_none_after_is_finite_and_right() -> None:
    x = inputs(140, dtype=torch.float32)
    g = torch.zeros_like(x.g)
    g[:64] = -5.0
    x = x._replace(g=g)
    spans = Spans.build([140])
    found = run(x, spans)
    assert all(t.isfinite().all() for t in found)
    close(found, naive(x, spans), 1e-5)


@pytest.mark.parametrize("first", [0, 41])
def test_very_strong_softplus_decays_are_finite_and_right_in_float32_with_gradients(first: int) -> None:
    x = inputs(100, dtype=torch.float32)
    g = -30.0 * torch.ones_like(x.g)
    g[40:60] = -0.01
    g[:, 1] = -30.0 * torch.rand(100, K)
    x = Inputs(*(t.requires_grad_() for t in x._replace(g=g)))
    spans = Spans.build([100], [first])
    found, expected = run(x, spans), naive(x, spans)
    assert all(t.isfinite().all() for t in found)
    close(found, expected, 1e-5)
    seeds = [torch.randn_like(t) for t in expected]
    grads = torch.autograd.grad(found, x, [s.float() for s in seeds])
    close(grads, torch.autograd.grad(expected, x, seeds), 1e-4)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_beta_zero_only_decays(form: str) -> None:
    x = inputs(80)
    x = x._replace(beta=torch.zeros_like(x.beta))
    function = chunked if form == "chunk" else recurrent
    o, final = function(*x[:5], spans=Spans.build([80], [30]), state=x.state, scale=SCALE)
    total = x.g.cumsum(0)
    close((final[0],), (x.state[0] * total[-1].exp().unsqueeze(-2),))
    decayed = x.state[0] * total.exp().unsqueeze(-2)
    close((o,), ((decayed @ x.q.unsqueeze(-1)).squeeze(-1) * SCALE,))


def test_slow_decay_remembers_the_entering_state_for_hundreds_of_tokens() -> None:
    x = inputs(300, decay=1e-3)
    spans = Spans.build([300])
    without = run(x._replace(state=torch.zeros_like(x.state), beta=x.beta * 0.01), spans)[0]
    assert (run(x._replace(beta=x.beta * 0.01), spans)[0] - without)[-1].abs().max() > 1e-3


@pytest.fixture(params=[reference.step, decode.step], ids=["reference", "decode"])
def step(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """The forms of the decode step."""
    form: Callable[..., Tensor] = request.param
    return form


def test_step_equals_recurrent_in_place_and_leaves_other_slots_alone(step: Callable[..., Tensor]) -> None:
    x = inputs(3)
    state = torch.randn(7, H, V, K, dtype=torch.float64)
    slots = torch.tensor([5, 0, 2])
    expected, final = recurrent(*x[:5], spans=Spans.build([1] * 3, [4] * 3), state=state[slots], scale=SCALE)
    before = state.clone()
    o = step(*x[:5], state, slots, scale=SCALE)
    close((o, state[slots]), (expected, final), 1e-13)
    untouched = [1, 3, 4, 6]
    assert torch.equal(state[untouched], before[untouched])


def test_steps_continue_where_a_chunk_ended(step: Callable[..., Tensor]) -> None:
    x = inputs(75)
    expected = naive(x, Spans.build([75]))
    o, state = run(x.rows(0, 70, x.state), Spans.build([70]))
    outputs = [o]
    for t in range(70, 75):
        outputs.append(step(*x.rows(t, t + 1, state)[:5], state, torch.tensor([0]), scale=SCALE))
    close((torch.cat(outputs), state), expected)


def test_another_chunk_size_gives_the_same_result() -> None:
    x = inputs(100)
    spans = Spans.build([100], [7])
    close(chunked(*x[:5], spans=spans, state=x.state, scale=SCALE, chunk=32), run(x, spans))


def test_bfloat16_values_are_accumulated_in_float32() -> None:
    x = inputs(70, dtype=torch.float32)
    o, final = run(x._replace(v=x.v.bfloat16()), Spans.build([70]))
    assert o.dtype == final.dtype == torch.float32
    close((o, final), naive(x._replace(v=x.v.bfloat16()), Spans.build([70])), 1e-5)


def test_shapes_that_do_not_fit_are_errors() -> None:
    x = inputs(10)
    with pytest.raises(ShapeError, match="tokens"):
        run(x, Spans.build([9]))
    with pytest.raises(ShapeError, match="state"):
        run(x, Spans.build([5, 5]))
    with pytest.raises(ShapeError, match="power of two"):
        chunked(*x[:5], spans=Spans.build([10]), state=None, scale=1.0, chunk=24)


def test_l2_norm_has_its_eps_inside_the_root() -> None:
    x = torch.randn(4, 3, dtype=torch.float64) * 1e-3
    torch.testing.assert_close(l2_norm(x), x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt(), atol=1e-14, rtol=0)


def test_bounded_gate_is_the_formula_and_stays_inside_its_bound() -> None:
    raw, a_log, bias = (torch.randn(*s, dtype=torch.float64) for s in ((9, H, K), (H,), (H, K)))
    g = log_decay(raw * 3, a_log, bias, lower_bound=-5.0)
    for h in range(H):
        expected = -5.0 / (1 + torch.exp(-torch.exp(a_log[h]) * (3 * raw[:, h] + bias[h])))
        torch.testing.assert_close(g[:, h], expected, atol=1e-13, rtol=0)
    assert ((g > -5) & (g < 0)).all()


def test_softplus_gate_is_the_formula_and_linear_far_out() -> None:
    raw, a_log, bias = (torch.randn(*s, dtype=torch.float64) for s in ((9, H, K), (H,), (H, K)))
    g = log_decay(raw, a_log, bias, lower_bound=None)
    expected = -a_log.exp().view(1, H, 1) * torch.log(1 + torch.exp(raw + bias))
    torch.testing.assert_close(g, expected, atol=1e-13, rtol=0)
    far = log_decay(raw + 1000, a_log, bias, lower_bound=None)
    torch.testing.assert_close(far, -a_log.exp().view(1, H, 1) * (raw + 1000 + bias), atol=1e-9, rtol=0)


def test_gate_of_bfloat16_is_float32_and_checks_shapes() -> None:
    raw = torch.randn(4, H, K).bfloat16()
    assert log_decay(raw, torch.zeros(H), torch.zeros(H, K), lower_bound=-5.0).dtype == torch.float32
    with pytest.raises(ShapeError):
        log_decay(raw, torch.zeros(K), torch.zeros(H, K), lower_bound=-5.0)


def test_heads_worked_on_in_groups_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs(*(t.requires_grad_() for t in inputs(100, 2)))
    spans = Spans.build([30, 70], [40, 0])
    results = []
    for size in (1, 2 * 4, 1000):  # 4 chunks: one, two, all heads at a time
        monkeypatch.setattr("baltoro.kernels.kda.chunk.CPU_GROUP", size)
        outputs = run(x, spans)
        results.append((*outputs, *torch.autograd.grad(outputs, x, [torch.ones_like(t) for t in outputs])))
    close(results[1], results[0], 1e-13)
    close(results[2], results[0], 1e-13)
