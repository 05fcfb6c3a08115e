"""Runs Gluon kernels on a CPU, program after program, as what their operations mean: layouts, barriers and waits are
nothing, a tile in shared memory is a tensor, products of FP16 and BF16 have FP32 sums.

Triton's interpreter does not know Gluon. This one knows what the KDA kernels use of it. What it cannot find: a barrier
or a fence that is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

IMPORTS = re.compile(r"from (?:triton|baltoro)[^\n]*import (\([^)]*\)|[^\n(]*)\n|from __future__[^\n]*\n")
LAYOUTS = (
    "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
    "DotOperandLayout", "DistributedLinearLayout",
)  # fmt: skip


ALL = 0xFFFFFFFF


class Pointer:
    """A contiguous tensor and places in it."""

    def __init__(self, tensor: Tensor, places: Any = 0) -> None:
        assert tensor.is_contiguous()
        self.flat, self.places = tensor.view(-1), torch.as_tensor(places)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.flat, self.places + step)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.flat, self.places[key])


class Tile:
    """Shared memory, or a view of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def store(self, values: Tensor) -> None:
        assert values.dtype == self.dtype and values.shape == self.tensor.shape
        self.tensor.copy_(values)

    def load(self, _: Any = None) -> Tensor:
        return self.tensor.clone()

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.tensor.view(*shape))

    def slice(self, start: int, length: int, dim: int = 0) -> Tile:
        return Tile(self.tensor.narrow(dim, start, length))

    def permute(self, dims: Sequence[int]) -> Tile:
        return Tile(self.tensor.permute(*dims))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], _: Any) -> Tile:
        assert dtype == self.dtype
        return Tile(self.tensor.view(-1)[: prod(shape)].view(*shape))

    def index(self, place: Any) -> Tile:
        return Tile(self.tensor[int(place)])


def load(at: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    places, live = torch.broadcast_tensors(at.places, torch.as_tensor(mask))
    found = at.flat[torch.where(live, places, 0)]
    return torch.where(live, found, torch.as_tensor(other, dtype=found.dtype))


def store(at: Pointer, values: Tensor, mask: Any = True) -> None:
    places, live, values = torch.broadcast_tensors(at.places, torch.as_tensor(mask), values)
    at.flat[places[live]] = values[live].to(at.flat.dtype)


def allocate(dtype: torch.dtype, shape: Sequence[int], _: Any, values: Tensor | None = None) -> Tile:
    if values is not None:
        assert values.dtype == dtype and [*values.shape] == [*shape]
        return Tile(values.clone())
    return Tile(torch.full(tuple(shape), float("nan") if dtype.is_floating_point else 0, dtype=dtype))


def multiply(a: Any, b: Any, total: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    a, b = (x.tensor if isinstance(x, Tile) else x for x in (a, b))
    assert a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    found = a.float() @ b.float()
    assert found.shape == total.shape
    return total + found if use_acc else found


def where(condition: Any, a: Any, b: Any) -> Tensor:
    kind = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), torch.float32)
    return torch.where(torch.as_tensor(condition), *(torch.as_tensor(x, dtype=kind) for x in (a, b)))


def add(at: Pointer, values: Tensor, mask: Tensor) -> None:
    """Atomic: places may repeat."""
    places, live, values = torch.broadcast_tensors(at.places, mask, values)
    at.flat.index_add_(0, places[live], values[live].to(at.flat.dtype))


def wait(_: int, deps: list[Tensor]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def copy_pointers(tile: Tile, at: Pointer, mask: Any) -> None:
    tile.store(load(at, mask))


def copy_rows(rows: Tensor, place: Sequence[Any], _: Any, tile: Tile, pred: Any) -> None:
    """A box, zeros beyond the last row."""
    if pred:
        found = rows[tuple(slice(int(n), int(n) + size) for n, size in zip(place, tile.tensor.shape, strict=True))]
        tile.store(torch.nn.functional.pad(found, (0, 0, 0, tile.tensor.shape[-2] - found.shape[-2])))


def widest(a: Any, b: Any) -> Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def narrowest(a: Any, b: Any) -> Tensor:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def nothing(*_: Any, **__: Any) -> None:
    return None


def by_words(text: str, inputs: list[Tensor], num_outputs: int) -> tuple[Tensor, ...]:
    """Words through the few instructions that the conversion uses."""
    names = {f"${num_outputs + i}": x.long() & ALL for i, x in enumerate(inputs)}
    out: dict[str, Tensor] = {}
    for line in text.replace("{", " { ").replace("}", " } ").split(";"):
        words = re.findall(r"[\w.$]+", line)
        if not words or words[0] == ".reg":
            continue
        kind, to, *given = words
        if kind == "mov.b32":
            for name, half in zip((to, given[0]), (0, 16), strict=True):
                out[name] = (names[given[1]] >> half & 0xFFFF).to(torch.int16).view(torch.bfloat16)
            continue
        a, *rest = (names[x] if x in names else torch.tensor(int(x, 0)) for x in given)
        if kind == "and.b32":
            names[to] = a & rest[0]
        elif kind == "shl.b32":
            names[to] = a << rest[0] & ALL
        elif kind == "shf.r.wrap.b32":
            names[to] = (a | rest[0] << 32) >> rest[1] & ALL
        elif kind == "lop3.b32":
            assert int(given[3], 0) == 0xE4
            names[to] = a & rest[1] | rest[0] & ~rest[1] & ALL
        else:
            assert kind == "mul.bf16x2"
            halves = [(x >> s & 0xFFFF).to(torch.int16).view(torch.bfloat16) for x in (a, rest[0]) for s in (0, 16)]
            low, high = (halves[i].double() * halves[i + 2].double() for i in range(2))
            low, high = (x.bfloat16().view(torch.int16).long() & 0xFFFF for x in (low, high))
            names[to] = low | high << 16
    return tuple(out[f"${i}"] for i in range(num_outputs))


def inline(text: str, _: str, inputs: list[Tensor], dtype: Any, **__: Any) -> Any:
    """What the PTX of the depth mix and of routing means: [programs, warps, lanes] or [groups, lanes], 32 lanes."""
    x = inputs[0]
    if isinstance(dtype, tuple):
        return by_words(text, inputs, len(dtype))
    if not text:
        return x
    if found := re.search(r"shfl\.sync\.(bfly|idx)\.b32 \$0, \$1, (\d+)", text):
        lane, step = torch.arange(32), int(found[2])
        return x[..., lane ^ step if found[1] == "bfly" else torch.full_like(lane, step)]
    if "vote.sync.ballot" in text:
        return ((x != 0).long() << torch.arange(32)).sum(-1, keepdim=True).expand(x.shape)
    if "mbarrier.init" in text:
        return torch.zeros(x.shape, dtype=dtype)
    if "[bell+8]" in text:  # a number a warp
        assert torch.equal(x, x[..., :1].expand(x.shape))
    return x.sum((0, 1), keepdim=True).expand(x.shape)


def jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else jit


def language(program: list[int], programs: list[int]) -> SimpleNamespace:
    """What kernels call `gl`."""
    names = ("float16", "float32", "bfloat16", "int32", "int64", "uint8", "exp", "sqrt", "zeros_like", "log2")
    found = {name: getattr(torch, name) for name in names} | dict.fromkeys(LAYOUTS, nothing)
    found |= {
        "constexpr": lambda x: x, "static_range": range, "load": load, "store": store, "where": where,
        "allocate_shared_memory": allocate, "thread_barrier": nothing, "convert_layout": lambda x, _, **__: x,
        "arange": lambda a, b, _: torch.arange(a, b), "sum": lambda x, axis: x.sum(axis),
        "program_id": lambda n: torch.tensor(program[n]), "num_programs": lambda n: torch.tensor(programs[n]),
        "associative_scan": lambda x, axis, _: x.cumsum(axis), "zeros": lambda s, d, _: torch.zeros(s, dtype=d),
        "full": lambda s, x, d, _: torch.full(s, x, dtype=d), "maximum": widest, "minimum": narrowest,
        "split": lambda x: x.unbind(-1), "join": lambda a, b: torch.stack((a, b), -1), "assume": nothing,
        "reshape": torch.reshape, "permute": torch.permute, "multiple_of": lambda x, _: x,
        "max_contiguous": lambda x, _: x, "abs": torch.abs,
        "fma": lambda a, b, c: a * b + c,
        # as the card has it: what would be denormal is 0
        "exp2": lambda x: torch.where(x < -126, 0.0, torch.exp2(x)),
        "inline_asm_elementwise": inline, "expand_dims": torch.unsqueeze, "rsqrt": torch.rsqrt,
        "max": torch.amax, "min": torch.amin, "cast": lambda x, kind, bitcast: x.view(kind), "atomic_add": add,
        "reduce": lambda values, axis, _: tuple(x.sum(axis) for x in values),
    }  # fmt: skip
    return SimpleNamespace(**found)


def kernels(
    file: Path,
    at_start: Callable[[], None] = nothing,
    at_wait: Callable[[], None] = nothing,
    others: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """Name -> launcher of a file's kernels: launcher(grid, *arguments), tensors where they take pointers or rows.

    at_start, at_wait: called as a program starts, and where it waits for the kernel in front. others: files whose
    functions it imports.
    """
    program, programs = [0, 0, 0], [1, 1, 1]
    texts = [
        IMPORTS.sub("", one.read_text(encoding="utf-8")).replace(".type.layout", ".dtype") for one in (*others, file)
    ]
    copies = SimpleNamespace(async_copy_global_to_shared=copy_pointers, commit_group=nothing, wait_group=nothing)
    bells = SimpleNamespace(init=nothing, expect=nothing, wait=nothing, MBarrierLayout=nothing)
    space = {
        "gl": language(program, programs), "gluon": SimpleNamespace(jit=jit, constexpr_function=jit),
        "async_copy": copies, "mbarrier": bells,
        "tma": SimpleNamespace(async_copy_global_to_shared=copy_rows),
        "fence_async_shared": nothing,
        "gdc_wait": at_wait, "gdc_launch_dependents": nothing,
        "range": lambda *ends: map(torch.tensor, range(*ends)),
        "mma_v2": multiply, "warpgroup_mma": multiply, "warpgroup_mma_wait": wait,
    }  # fmt: skip
    for one, text in zip((*others, file), texts, strict=True):
        exec(compile(text, str(one), "exec"), space)

    def launcher(kernel: Callable[..., None]) -> Callable[..., None]:
        names = kernel.__code__.co_varnames

        def launch(grid: tuple[int, ...], *arguments: Any) -> None:
            programs[: len(grid)] = grid
            given = [
                Pointer(x) if isinstance(x, Tensor) and name.endswith("_ptr") else x
                for name, x in zip(names, arguments, strict=False)
            ]
            for place in product(*(range(n) for n in grid)):
                program[: len(grid)] = place
                at_start()
                kernel(*given)

        return launch

    return {name: launcher(found) for name, found in space.items() if name.endswith("_kernel")}
