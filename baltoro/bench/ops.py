"""What a piece of work asks of the host: aten operations dispatched, and waits for the device.

In: code run under `OpCounter`. Out: counts by the part of the step that was open, waits by kind and part.
On a GPU each operation costs the host some microseconds, whatever its size, and each wait drains the queue of launched
work. Both can be counted on a CPU: an operation that must read a tensor's values to know its own result would wait
on a GPU. `tensor from host` is a tensor made of Python numbers: a copy to the device.
Limit: a `foreach` or fused operation counts as one here, as on a GPU; composite ones count as what they are made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# operations whose result's shape, or whose host value, depends on the values of a tensor
READS_VALUES = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "equal", "is_nonzero", "histc", "unique_dim_consecutive", "linalg_solve_ex_check",
})  # fmt: skip
FROM_HOST = "tensor from host"
# methods that hand values to Python without an operation of their own
READING_METHODS: Mapping[Callable[..., Any], str] = {
    Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu",
}  # fmt: skip
# operations that make views or nothing at all, and launch nothing
FREE = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "t", "permute", "slice", "select", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "expand", "detach", "alias", "unbind", "_reshape_alias", "as_strided", "empty", "chunk",
    "empty_like", "new_empty", "lift_fresh", "diagonal", "unfold", "empty_strided", "set_", "is_same_size",
    "new_empty_strided", "_has_compatible_shallow_copy_type", "result_type",
})  # fmt: skip


class OpCounter:
    """Counts while `counting()` is open. `kernels` are operations that launch something on a GPU."""

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.names: Counter[tuple[str, str]] = Counter()
        self._parts: list[str] = ["other"]

    @property
    def part(self) -> str:
        """The innermost open part."""
        return self._parts[-1]

    @contextmanager
    def counting_for(self, name: str) -> Iterator[None]:
        """What is dispatched within counts for `name`."""
        self._parts.append(name)
        try:
            yield
        finally:
            self._parts.pop()

    @contextmanager
    def counting(self) -> Iterator[OpCounter]:
        """Open both modes."""
        with _Functions(self), _Dispatches(self):
            yield self

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, counted as part `name`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.counting_for(name):
                return function(*args, **kwargs)

        return counted

    def see(self, name: str, args: Sequence[Any]) -> None:
        """One dispatched operation."""
        self.ops[self.part] += 1
        self.names[self.part, name] += 1
        if name not in FREE:
            self.kernels[self.part] += 1
        kind = _wait(name, args)
        if kind is not None:
            self.waits[self.part, kind] += 1

    def waits_in(self, *parts: str, kinds: Sequence[str] | None = None) -> dict[tuple[str, str], int]:
        """Waits of these parts (all if none is named), of these kinds (all but tensors from the host)."""
        found = {}
        for (part, kind), count in self.waits.items():
            wanted = kind != FROM_HOST if kinds is None else kind in kinds
            if wanted and (not parts or part in parts):
                found[part, kind] = count
        return found


def _wait(name: str, args: Sequence[Any]) -> str | None:
    """The kind of wait that an operation is on a GPU; None if it is none."""
    if name in READS_VALUES:
        return name
    if name == "lift_fresh":
        return FROM_HOST
    if name == "repeat_interleave":  # the overload that makes an index; with output_size it knows its shape
        return name
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = args[1] if len(args) > 1 else ()
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return "index by mask"
    return None


class _Dispatches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counter: OpCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            self.counter.see(name, args)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = READING_METHODS.get(func) if callable(func) else None
        if kind is not None:
            self.counter.waits[self.counter.part, kind] += 1
        return func(*args, **(kwargs or {}))
