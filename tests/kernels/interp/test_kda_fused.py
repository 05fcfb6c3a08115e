"""KDA decode, verify and fold: the Triton kernels against the float64 composition, and against each other in bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.kda import fused
from baltoro.kernels.kda import fused_reference as reference
from baltoro.kernels.kda.fused_reference import MixerWeights, Window
from tests.kernels.tolerances import TOLERANCES

U, TAPS = 9, 4
FIELDS = ("x", "k", "v", "decay", "beta")


@dataclass
class Case:
    """Inputs of N requests with G tokens each, all float64 values that the activation dtype can hold."""

    x: Tensor
    raw: Tensor
    b: Tensor
    gate: Tensor
    weights: MixerWeights
    history: Tensor
    state: Tensor
    slots: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        names = ("conv", "A_log", "dt_bias", "norm")
        weights = replace(self.weights, **{name: getattr(self.weights, name).to(acc) for name in names})
        rest = {name: getattr(self, name).to(dtype) for name in ("x", "raw", "b", "gate", "history")}
        return Case(**rest, weights=weights, state=self.state.to(acc), slots=self.slots)

    def token(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x[:, t], self.raw[:, t], self.b[:, t], self.gate[:, t]

    def window(self) -> Window:
        num, length, heads, keys = self.raw.shape
        return Window.empty(
            num, length, heads=heads, keys=keys, values=self.gate.shape[-1], dtype=self.x.dtype, device="cpu"
        )


def case(
    slots: list[int], length: int = 1, *, heads: int = 2, keys: int = 6, values: int = 5, bound: float | None = -5.0,
    strength: float = 1.0, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    width, num = heads * (2 * keys + values), len(slots)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).double()

    weights = MixerWeights(
        draw(width, TAPS) * 0.5, draw(heads) * 0.3, draw(heads, keys) * strength, draw(values), 1e-5, bound, keys**-0.5
    )
    return Case(
        draw(num, length, width), draw(num, length, heads, keys) * strength, draw(num, length, heads),
        draw(num, length, heads, values), weights, draw(U, TAPS - 1, width),
        torch.randn(U, heads, values, keys).double(), torch.tensor(slots),
    )  # fmt: skip


def gap(got: Tensor, expected: Tensor) -> float:
    """Relative distance in the 2-norm; NaN never passes a comparison."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("bound", [-5.0, -0.7, None])
@pytest.mark.parametrize(("heads", "keys", "values"), [(3, 6, 5), (1, 32, 32), (2, 7, 16)])
def test_decode_is_the_composition(bound: float | None, heads: int, keys: int, values: int) -> None:
    exact = case([4, 7, 2], heads=heads, keys=keys, values=values, bound=bound)
    fast = exact.to(torch.float32)
    expected = reference.decode(*exact.token(0), exact.weights, exact.history, exact.state, exact.slots)
    got = fused.decode(*fast.token(0), fast.weights, fast.history, fast.state, fast.slots)
    assert gap(got, expected) < TOLERANCES["kda_decode"]["float32"]
    assert gap(fast.state, exact.state) < TOLERANCES["kda_decode_state"]["float32"]
    assert torch.equal(fast.history, exact.history.float())


def test_decode_in_bfloat16_is_within_one_rounding() -> None:
    exact = case([3, 1], dtype=torch.bfloat16, keys=16, values=16)
    fast = exact.to(torch.bfloat16)
    expected = reference.decode(*exact.token(0), exact.weights, exact.history, exact.state, exact.slots)
    got = fused.decode(*fast.token(0), fast.weights, fast.history, fast.state, fast.slots)
    assert got.dtype == torch.bfloat16 and gap(got, expected) < TOLERANCES["kda_decode"]["bfloat16"]
    assert gap(fast.state, exact.state) < TOLERANCES["kda_decode_state"]["bfloat16"]
    assert torch.equal(fast.history, exact.history.bfloat16())


@pytest.mark.parametrize("strength", [40.0, 1e4])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_gates_at_their_bound_and_far_beyond(bound: float | None, strength: float) -> None:
    exact = case([5], 5, heads=1, bound=bound, strength=strength)
    fast, window = exact.to(torch.float32), exact.to(torch.float32).window()
    got = fused.verify(fast.x, fast.raw, fast.b, fast.gate, fast.weights, fast.history, fast.state, fast.slots, window)
    for t in range(5):
        expected = reference.decode(*exact.token(t), exact.weights, exact.history, exact.state, exact.slots)
        one = fused.decode(*fast.token(t), fast.weights, fast.history, fast.state, fast.slots)
        assert gap(one, expected) < 1e-4 and gap(got[:, t], expected) < 1e-4
    assert fast.state.isfinite().all()


def test_free_slots_keep_their_nans_and_the_sink_is_not_touched() -> None:
    fast = case([0, 6, 0], 2).to(torch.float32)
    used = [0, 6]
    free = [slot for slot in range(U) if slot not in used]
    for kept in (fast.history, fast.state):
        kept[free] = torch.nan
        kept[0] = torch.nan
    window = fast.window()
    outputs = [
        fused.decode(*fast.token(0), fast.weights, fast.history, fast.state, fast.slots),
        fused.verify(fast.x, fast.raw, fast.b, fast.gate, fast.weights, fast.history, fast.state, fast.slots, window),
    ]
    for out in outputs:
        assert out.isfinite().all() and (out[[0, 2]] == 0).all() and (out[1] != 0).any()
    for kept in (fast.history, fast.state):
        assert kept[[*free, 0]].isnan().all() and kept[6].isfinite().all()


def test_inputs_may_be_slices_of_one_merged_projection() -> None:
    fast = case([4, 7], heads=2, keys=6, values=6).to(torch.float32)
    x, raw, b, gate = fast.token(0)
    merged = torch.cat([x, raw.flatten(1), b, gate.flatten(1), torch.full((2, 3), torch.nan)], dim=-1)
    parts = torch.split(merged, [x.shape[-1], 12, 2, 12, 3], dim=-1)
    state, history = fast.state.clone(), fast.history.clone()
    expected = fused.decode(x, raw, b, gate, fast.weights, fast.history, fast.state, fast.slots)
    views = (parts[0], parts[1].unflatten(-1, (2, 6)), parts[2], parts[3].unflatten(-1, (2, 6)))
    assert torch.equal(fused.decode(*views, fast.weights, history, state, fast.slots), expected)
    assert torch.equal(state, fast.state) and torch.equal(history, fast.history)


def test_no_requests_and_empty_windows_are_no_work() -> None:
    fast = case([], 3).to(torch.float32)
    assert fused.decode(*fast.token(0), fast.weights, fast.history, fast.state, fast.slots).shape == (0, 2, 5)
    few = case([3], 0).to(torch.float32)
    args = (few.x, few.raw, few.b, few.gate, few.weights, few.history, few.state, few.slots, few.window())
    assert fused.verify(*args).shape == (1, 0, 2, 5)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_verify_is_decode_repeated_and_writes_no_state(length: int, bound: float | None) -> None:
    exact = case([5, 2], length, bound=bound, keys=16, values=20)
    fast = exact.to(torch.float32)
    before, window = (fast.history.clone(), fast.state.clone()), fast.window()
    got = fused.verify(fast.x, fast.raw, fast.b, fast.gate, fast.weights, fast.history, fast.state, fast.slots, window)
    assert torch.equal(fast.history, before[0]) and torch.equal(fast.state, before[1])
    wanted = exact.window()
    expected = reference.verify(
        exact.x, exact.raw, exact.b, exact.gate, exact.weights, exact.history, exact.state, exact.slots, wanted
    )
    assert gap(got, expected) < TOLERANCES["kda_verify"]["float32"]
    for name in FIELDS:
        assert gap(getattr(window, name), getattr(wanted, name)) < TOLERANCES["kda_verify"]["float32"], name


def test_a_window_too_long_is_an_error() -> None:
    fast = case([1], 9).to(torch.float32)
    with pytest.raises(ShapeError, match="at most 8"):
        fused.verify(
            fast.x, fast.raw, fast.b, fast.gate, fast.weights, fast.history, fast.state, fast.slots, fast.window()
        )


def arena(fast: Case, layers: int) -> tuple[list[Tensor], list[Tensor]]:
    """Histories and states of several layers, slot by slot in one block each, as the cache lays them out."""
    states = torch.randn(U, layers, *fast.state.shape[1:])
    histories = torch.randn(U, layers, *fast.history.shape[1:])
    return [histories[:, i] for i in range(layers)], [states[:, i] for i in range(layers)]


def decode_window(fast: Case, layers: int) -> tuple[Window, list[list[tuple[Tensor, Tensor]]]]:
    """The window that the decode kernel itself records, and per layer (history, state) after 0, 1, .. G tokens."""
    num, length, heads, keys = fast.raw.shape
    sizes = {"heads": heads, "keys": keys, "values": fast.gate.shape[-1]}
    window = Window.empty(num, length, **sizes, dtype=torch.float32, device="cpu", layers=layers)
    histories, states = arena(fast, layers)
    after = []
    for layer, (history, state) in enumerate(zip(histories, states, strict=True)):
        kept, steps = window.layer(layer), [(history.clone(), state.clone())]
        kept.x.copy_(fast.x)
        for t in range(length):
            one = Window(*(getattr(kept, name)[:, t : t + 1].clone() for name in FIELDS))
            fused.decode(*fast.token(t), fast.weights, history, state, fast.slots, record=one)
            steps.append((history.clone(), state.clone()))
            for name in FIELDS[1:]:
                getattr(kept, name)[:, t : t + 1] = getattr(one, name)
        after.append(steps)
    return window, after


def test_fold_equals_repeated_decode_in_every_bit_for_every_accepted_length() -> None:
    layers, fast = 2, case([6, 0, 3], 8, heads=1, keys=8, values=6).to(torch.float32)
    window, after = decode_window(fast, layers)
    for accepted in range(9):
        histories, states = arena(fast, layers)
        for layer in range(layers):
            histories[layer].copy_(after[layer][0][0])
            states[layer].copy_(after[layer][0][1])
        counts = {6: accepted, 3: 8 - accepted}
        fused.fold(window, histories, states, fast.slots, torch.tensor([accepted, 8, 8 - accepted]))
        for layer, steps in enumerate(after):
            for slot in range(U):
                history, state = steps[counts.get(slot, 0)]
                assert torch.equal(histories[layer][slot], history[slot]), (accepted, slot)
                assert torch.equal(states[layer][slot], state[slot]), (accepted, slot)


def test_fold_after_verify_goes_on_as_if_each_token_had_been_decoded() -> None:
    fast = case([6, 3], 8, keys=8, values=6).to(torch.float32)
    (history,), (state,) = arena(fast, 1)
    window = fast.window()
    fused.verify(fast.x, fast.raw, fast.b, fast.gate, fast.weights, history, state, fast.slots, window)
    wanted_history, wanted = history.clone(), state.clone()
    for t in range(5):
        fused.decode(*fast.token(t), fast.weights, wanted_history, wanted, fast.slots)
    layered = Window(*(getattr(window, name).unsqueeze(0) for name in FIELDS))
    fused.fold(layered, [history], [state], fast.slots, torch.tensor([5, 5]))
    assert torch.equal(history, wanted_history)
    assert gap(state, wanted) < TOLERANCES["kda_decode_state"]["float32"]


def test_the_plain_fold_agrees() -> None:
    fast = case([6, 0, 3], 8).to(torch.float32)
    histories, states = arena(fast, 1)
    window = fast.window()
    reference.verify(fast.x, fast.raw, fast.b, fast.gate, fast.weights, histories[0], states[0], fast.slots, window)
    layered = Window(*(getattr(window, name).unsqueeze(0) for name in FIELDS))
    others = [[t.clone() for t in histories], [t.clone() for t in states]]
    counts = torch.tensor([3, 4, 0])
    reference.fold(layered, *others, fast.slots, counts)
    fused.fold(layered, histories, states, fast.slots, counts)
    assert torch.equal(histories[0], others[0][0]) and gap(states[0], others[1][0]) < 1e-6
