"""The fused KDA forms as Triton kernels: decode, verify of a draft window, fold over all layers in one launch.

In and out: as `fused_reference`, with three differences: rows of slot 0 give zeros, float64 goes to the reference, and
`fold` wants the layers' views at one distance from each other in one block of memory, as the arena has them.
No host reads, no allocation beyond the output: all three can be captured in a CUDA graph. FP32 state and sums.
The kernels are imported at the first call, so this module loads where triton is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.device import HOPPER, has_dependent_launch, machine
from baltoro.kernels.kda import fused_reference as reference
from baltoro.kernels.kda import tiles
from baltoro.kernels.kda.fused_reference import MixerWeights, Window

# tokens a window may have: keys and queries of so many are the 16 rows of the smallest matrix product
MAX_WINDOW = 8
# the largest sum of log-decays whose exponential, and that of its negative, FP32 holds with room for products
MAX_DECAY = 60.0


def decode(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    gate: Tensor,
    weights: MixerWeights,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    record: Window | None = None,
) -> Tensor:
    """As `fused_reference.decode`, in one launch. `record`: a Window of one token to be filled, but for its x."""
    if state.dtype == torch.float64:
        return reference.decode(x, raw, b, gate, weights, history, state, slots)
    from baltoro.kernels.kda.triton_decode import decode_kernel

    reference.check(x, raw, b, gate, weights, history, state)
    num, heads, values = gate.shape
    out = x.new_empty(num, heads, values)
    if num == 0:
        return out
    inputs = [_rows(t, num) for t in (x, raw, b, gate)]
    kept = (out,) * 4 if record is None else (record.k, record.v, record.decay, record.beta)
    size, is_small = _size(state), heads * num <= tiles.SMALL
    tile = tiles.decode(size, heads * num).constants(size, can_be_ahead=_can_fetch(state))
    decode_kernel[(heads, num)](
        *inputs, *_weights(weights), history, state, slots, out, *kept,
        *(t.stride(0) for t in inputs), *_strides(history, state),
        weights.lower_bound or 0.0, weights.scale, weights.norm_eps,
        heads, raw.shape[-1], values, **tile, TAPS=history.shape[1] + 1, IS_BOUNDED=weights.lower_bound is not None,
        RECORDS=record is not None, **tiles.dependent_launch(is_small and has_dependent_launch(x)),
    )  # fmt: skip
    return out


def verify(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    gate: Tensor,
    weights: MixerWeights,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    window: Window,
) -> Tensor:
    """As `fused_reference.verify`, in one launch; it sums in another order than `decode`. Records what it used.

    Errors: ShapeError for more than MAX_WINDOW tokens.
    """
    if state.dtype == torch.float64:
        return reference.verify(x, raw, b, gate, weights, history, state, slots, window)
    from baltoro.kernels.kda.triton_verify import verify_kernel

    reference.check(x, raw, b, gate, weights, history, state)
    num, length, heads, values = gate.shape
    if length > MAX_WINDOW:
        raise ShapeError(f"a window of {length} tokens; verify takes at most {MAX_WINDOW}")
    out = x.new_empty(num, length, heads, values)
    if num == 0 or length == 0:
        return out
    inputs = [_rows(t, num * length) for t in (x, raw, b, gate)]
    size, bound, keys = max(2 * MAX_WINDOW, _size(state)), weights.lower_bound, raw.shape[-1]
    tile = tiles.verify(size, heads * num).constants(size, can_be_ahead=_can_fetch(state) and keys == size)
    verify_kernel[(heads, num)](
        *inputs, *_weights(weights), history, state, slots, out,
        window.x, window.k, window.v, window.decay, window.beta,
        *(t.stride(0) for t in inputs), *_strides(history, state), bound or 0.0, weights.scale, weights.norm_eps,
        length, heads, keys, values, BG=MAX_WINDOW, TAPS=history.shape[1] + 1, **tile, IS_BOUNDED=bound is not None,
        IS_MILD=bound is not None and -bound * length <= MAX_DECAY,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        **tiles.dependent_launch(has_dependent_launch(x)),
    )  # fmt: skip
    return out


def fold(
    window: Window, histories: Sequence[Tensor], states: Sequence[Tensor], slots: Tensor, accepted: Tensor
) -> None:
    """As `fused_reference.fold`, in one launch; equal in every bit to `decode` on the recorded inputs."""
    if states[0].dtype == torch.float64:
        return reference.fold(window, histories, states, slots, accepted)
    from baltoro.kernels.kda.triton_fold import fold_kernel

    layers, num, length, heads, keys = window.k.shape
    if num == 0:
        return None
    layer, strides = layer_stride(states), _strides(histories[0], states[0])
    tensors = (*window_parts(window), histories[0], states[0], slots, accepted)
    places, taps = (layer_stride(histories), *strides[:2], layer, states[0].stride(0)), histories[0].shape[1] + 1
    if layers and length <= MAX_WINDOW and _is_direct(states[0], layer, *window_parts(window)):
        from baltoro.kernels.kda.gluon_fold import direct_fold_kernel

        direct_fold_kernel[(heads * (keys // tiles.DIRECT.rows), num, layers)](
            *tensors, num, length, heads, *places, TAPS=taps, **tiles.DIRECT.options()
        )
        return None
    size, values = _size(states[0]), window.v.shape[-1]
    tile = tiles.fold(size)
    fold_kernel[(heads * -(-values // tile.rows), num, layers)](
        *tensors, num, length, *places, heads, keys, values, **tile.shape(size), TAPS=taps
    )
    return None


def layer_stride(views: Sequence[Tensor]) -> int:
    """Elements from one layer's view to the next. Errors: ShapeError if they do not lie at one distance."""
    size = views[0].element_size()
    places = [view.data_ptr() for view in views]
    steps: set[int] = {after - before for before, after in pairwise(places)}
    is_one_block = len({view.untyped_storage().data_ptr() for view in views}) == 1
    alike = {(view.dtype, view.shape, view.stride()) for view in views}
    if len(steps) > 1 or len(alike) > 1 or not is_one_block or any(step % size for step in steps):
        raise ShapeError("the layers' views are not equally spaced in one block of memory; fold them one by one")
    return steps.pop() // size if steps else 0


def _rows(x: Tensor, num: int) -> Tensor:
    """[num, *] with unit stride inside a row: a view of a slice of merged projections, a copy only where it must be."""
    flat = x.reshape(num, -1)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _weights(weights: MixerWeights) -> tuple[Tensor, ...]:
    return weights.conv.contiguous(), weights.A_log, weights.dt_bias.contiguous(), weights.norm


def _strides(history: Tensor, state: Tensor) -> tuple[int, int, int]:
    """Slot and row of the history, slot of the state. Errors: ShapeError where a slot is not laid out as it must be."""
    values, keys = state.shape[-2:]
    if state.stride()[1:] != (values * keys, keys, 1) or history.stride(-1) != 1 or state.dtype != torch.float32:
        raise ShapeError(f"state {state.stride()} {state.dtype}: a slot's [H, V, K] must be contiguous and FP32")
    return history.stride(0), history.stride(1), state.stride(0)


def _can_fetch(state: Tensor) -> bool:
    """Whole heads on a GPU (the interpreter has no assembly), at addresses divisible by 16."""
    is_whole = state.shape[-1] == state.shape[-2] == _size(state)
    return state.is_cuda and is_whole and state.data_ptr() % 16 == 0 and state.stride(0) % 4 == 0


def _is_direct(state: Tensor, layer: int, *rest: Tensor) -> bool:
    """Whether Gluon's fold takes it: whole heads of 128 on Hopper, at addresses divisible by 16, and so the rest."""
    is_hopper = state.is_cuda and machine("cuda", state.device.index or 0).capability in HOPPER
    is_right = is_hopper and _can_fetch(state) and layer % 4 == 0 and state.shape[-1] == 128
    return is_right and not any(t.data_ptr() % 16 for t in rest)


def window_parts(window: Window) -> tuple[Tensor, ...]:
    """What a fold reads of it, one after another."""
    return window.x, window.k, window.v, window.decay, window.beta


def _size(state: Tensor) -> int:
    return tiles.power_of_two(max(state.shape[-2:]))
