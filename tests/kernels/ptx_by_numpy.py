"""Runs the PTX of `slab_text` on a CPU, a program's threads in step: what its instructions mean, registers by thread.

Copies and wgmma are done at once; barriers count, and one that would wait for ever raises. Every byte that is read,
written, copied or prefetched lies in its tensor, only the last of which is written, or in the part of shared memory
that is for such instructions. What it cannot find: a wait or a fence that is missing, and what registers a matrix
instruction in flight still reads.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

KINDS = {"pred": np.bool_, "b32": np.uint32, "b64": np.uint64, "f32": np.float32}
START = 16  # as little aligned as can be
TOKEN = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")


def bf16(bits: Any) -> Any:
    """uint16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Any) -> Any:
    """float32 -> uint32 that holds its 16 bits, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded)


class Memory:
    """Tensors as bytes, each from a multiple of 2^32 on; shared memory, which begins at `START`, below the first.

    pieces of shared memory: which accesses it is for ("copy", "product", "matrix", "run", "word", "bell"), its end.
    """

    def __init__(self, tensors: list[Any], pieces: list[tuple[set[str], int]]) -> None:
        self.parts = [np.full(pieces[-1][1], 0xFF, np.uint8)] + [t.reshape(-1).view(np.uint8) for t in tensors]
        self.pieces = pieces

    def at(self, address: int, size: int, access: str, *, is_written: bool = False) -> Any:
        part, start = int(address) >> 32, int(address) & 0xFFFFFFFF
        assert start + size <= len(self.parts[part]) and start % min(size, 16) == 0, (part, start, size)
        if part == 0:
            uses, end = next(piece for piece in self.pieces if start < piece[1])
            assert access in uses and start + size <= end, (access, start, size)
        assert part in (0, len(self.parts) - 1) or not is_written, (access, part)
        return self.parts[part][start : start + size]


class Program:
    """One program of `threads` threads."""

    def __init__(self, memory: Memory, ids: tuple[int, int], grid: tuple[int, int], threads: int) -> None:
        self.memory, self.threads, self.bells = memory, threads, {}
        self.kinds: dict[str, Any] = {}
        self.registers: dict[str, Any] = {}
        tid = np.arange(threads, dtype=np.uint32)
        same = lambda x: np.full(threads, x, np.uint32)  # noqa: E731
        self.special = {
            "%tid.x": tid, "%ctaid.x": same(ids[0]), "%ctaid.y": same(ids[1]), "%nctaid.y": same(grid[1]),
            "global_smem": same(START),
        }  # fmt: skip
        self.active = np.ones(threads, np.bool_)

    def value(self, name: str, kind: str) -> Any:
        """An operand as a kind, all threads."""
        if name in self.special:
            found = self.special[name]
        elif name in self.registers:
            found = self.registers[name]
        elif name.startswith("0f"):
            found = np.full(self.threads, np.uint32(int(name[2:], 16)).view(np.float32))
        else:
            found = np.full(self.threads, int(name, 0) & (2**64 - 1), np.uint64)
        wide = {"u32": np.uint32, "b32": np.uint32, "s32": np.int32, "u64": np.uint64, "b64": np.uint64}
        if kind == "s32":
            return found.astype(np.uint32).view(np.int32)
        return found if kind in ("f32", "pred") else found.astype(wide[kind])

    def keep(self, name: str, value: Any, where: Any) -> None:
        if name == "_":
            return
        kind = self.kinds[name]
        old = self.registers.get(name, np.zeros(self.threads, kind))
        if value.dtype == np.int32:
            value = value.view(np.uint32)
        self.registers[name] = np.where(where, value.astype(kind), old)

    def place(self, text: str) -> Any:
        name, _, step = text.strip("[]").partition("+")
        return self.value(name, "u64") + np.uint64(int(step or 0))

    def declare(self, words: list[str]) -> None:
        for name in words[1:]:
            kind = KINDS[words[0].removeprefix(".")]
            if found := re.fullmatch(r"(\w+)<(\d+)>", name):
                self.kinds |= {f"{found[1]}{i}": kind for i in range(int(found[2]))}
            else:
                self.kinds[name] = kind


def run(
    text: str, memory: Memory, inputs: list[Any], ids: tuple[int, int], grid: tuple[int, int], threads: int,
    given: dict[str, Any] | None = None,
) -> Program:  # fmt: skip
    """A program of the text, whose operands are $0 and, from $1 on, `inputs`; given: registers that have a value."""
    one = Program(memory, ids, grid, threads)
    one.kinds["$0"] = np.uint32
    one.registers |= given or {}
    for i, x in enumerate(inputs):
        kind = np.float32 if isinstance(x, float) else np.uint64
        one.registers[f"${i + 1}"] = np.full(one.threads, x, kind)
    parts = [x.strip() for x in re.split(r"(?<=[;:])\n|(?<=;)|\n", text)]
    code = [x.rstrip(";") for x in parts if x and x not in "{}"]
    labels = {x[:-1]: i for i, x in enumerate(code) if x.endswith(":")}
    place, waiting, turns = 0, {}, 0
    while place < len(code):
        line = code[place]
        place += 1
        if line.endswith(":"):
            if line[:-1] in waiting:
                one.active = one.active | waiting.pop(line[:-1])
            continue
        where = one.active
        if line.startswith("@"):
            guard, line = line.split(" ", 1)
            held = one.registers[guard.strip("@!")]
            where = where & (~held if guard[1] == "!" else held)
        kind, *words = [line.split(" ", 1)[0], *TOKEN.findall(line.partition(" ")[2])]
        if kind == ".reg":
            one.declare(words)
        elif kind == "bra":
            if not where.any():
                continue
            to, turns = labels[words[0]], turns + (labels[words[0]] == place - 3)
            assert turns < 9, f"waits for ever at {words[0]}"
            if (where == one.active).all():
                place = to
            else:
                assert to >= place, "a turn back that not all take"
                waiting[words[0]] = waiting.get(words[0], False) | where
                one.active = one.active & ~where
        else:
            step(one, kind, words, where)
    return one


def step(one: Program, kind: str, words: list[str], where: Any) -> None:
    """An instruction that goes on to the next."""
    first, *rest = kind.split(".")
    if first in ("fence", "bar"):
        assert first != "bar" or where.all()
    elif first == "prefetch":
        for address in one.place(words[0])[where]:
            one.memory.at(address, 1, "prefetch")
    elif first == "wgmma":
        if rest[0] == "mma_async":
            multiply(one, kind, words)
    elif first == "mbarrier":
        barrier(one, rest, words, where)
    elif first == "cp":
        copy(one, rest, words, where)
    elif first in ("ld", "st", "stmatrix", "movmatrix"):
        move(one, first, rest, words, where)
    else:
        with np.errstate(all="ignore"):
            one.keep(words[0], plain(one, first, rest, words[1:]), where)


def plain(one: Program, name: str, rest: list[str], words: list[str]) -> Any:
    """Arithmetic of each thread."""
    kind = rest[-1]
    if name == "setp":
        a, b = (one.value(w, kind) for w in words[:2])
        found = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[rest[0]]
        return found & one.value(words[2], "pred") if rest[1] == "and" else found
    if name == "selp":
        return np.where(one.value(words[2], "pred"), one.value(words[0], kind), one.value(words[1], kind))
    if name == "shfl":
        return one.value(words[0], "u32").reshape(-1, 32)[:, int(words[1])].repeat(32)
    if name == "cvt":
        if kind == "u32":
            return one.value(words[0], "u32").astype(np.uint64)
        high, low = (to_bf16(one.value(w, "f32")) for w in words)
        return high << np.uint32(16) | low
    if name in ("mul", "mad") and rest[0] == "wide":
        found = one.value(words[0], "u32").astype(np.uint64) * one.value(words[1], "u32").astype(np.uint64)
        return found + one.value(words[2], "u64") if name == "mad" else found
    if kind == "bf16x2":
        a, b = (one.value(w, "u32") for w in words)
        low, high = (to_bf16(bf16(a >> s & 0xFFFF) * bf16(b >> s & 0xFFFF)) for s in (np.uint32(0), np.uint32(16)))
        return high << np.uint32(16) | low
    if name == "mov":
        if words[0].startswith("{"):
            low, high = (one.value(w, "u64") for w in words[0].strip("{}").split(", "))
            return high << np.uint64(32) | low
        return one.value(words[0], kind).astype(np.bool_) if kind == "pred" else one.value(words[0], kind)
    given = [one.value(w, kind) for w in words]
    a, b, c = (*given, None, None)[:3]
    found = {
        "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "mad": lambda: a * b + c,
        "and": lambda: a & b, "xor": lambda: a ^ b, "shl": lambda: a << b, "shr": lambda: a >> b,
        "div": lambda: a / b, "ex2": lambda: np.exp2(a), "rcp": lambda: np.float32(1) / a,
        "min": lambda: np.minimum(a, b), "max": lambda: np.maximum(a, b),
        "shf": lambda: ((a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)) >> c.astype(np.uint64)),
        "lop3": lambda: a & c | b & ~c,
    }  # fmt: skip
    return found[name]()


def barrier(one: Program, rest: list[str], words: list[str], where: Any) -> None:
    """count, arrived, bytes to come, phases that are over."""
    if rest[0] == "try_wait":
        bell, parity = int(one.place(words[1])[0]), one.value(words[2], "u32")[0]
        one.keep(words[0], np.full(one.threads, (one.bells[bell][3] + 1) % 2 == parity), where)
        return
    for thread in np.flatnonzero(where):
        bell = int(one.place(words[0 if rest[0] == "init" else 1])[thread])
        one.memory.at(bell, 8, "bell")
        if rest[0] == "init":
            one.bells[bell] = [int(words[1]), 0, 0, 0]
            continue
        one.bells[bell][1] += 1
        if rest[1] == "expect_tx":
            one.bells[bell][2] += int(one.value(words[2], "u32")[thread])
        over(one.bells[bell])


def over(bell: list[int]) -> None:
    assert bell[1] <= bell[0]
    if bell[1] == bell[0] and bell[2] == 0:
        bell[1], bell[3] = 0, bell[3] + 1


def copy(one: Program, rest: list[str], words: list[str], where: Any) -> None:
    if len(words) < 3:
        return
    for thread in np.flatnonzero(where):
        to, source = (int(one.place(w)[thread]) for w in words[:2])
        size = int(one.value(words[2], "u32")[thread])
        assert size % 16 == 0 and to % 16 == 0 and source % 16 == 0 and size > 0
        one.memory.at(to, size, "copy", is_written=True)[:] = one.memory.at(source, size, "copy")
        if len(words) > 3:
            bell = one.bells[int(one.place(words[3])[thread])]
            bell[2] -= size
            over(bell)


def move(one: Program, name: str, rest: list[str], words: list[str], where: Any) -> None:
    """To and from memory, and between the threads of a warp."""
    if name == "movmatrix":
        halves = one.value(words[1], "u32").view(np.uint16).reshape(-1, 8, 8)
        one.keep(words[0], np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1).view(np.uint32), where)
        return
    at, listed = (words[0], words[1]) if name.startswith("st") else (words[1], words[0])
    places, names = one.place(at), listed.strip("{}").split(", ")
    if name == "stmatrix":
        for n, register in enumerate(names):
            halves = one.value(register, "u32").view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
            for warp, matrix in enumerate(halves):
                for row in range(8):
                    to = one.memory.at(places[32 * warp + 8 * n + row], 16, "matrix", is_written=True)
                    to[:] = np.ascontiguousarray(matrix[row]).view(np.uint8)
        return
    size = {"u8": 1}.get(rest[-1], 4)
    values = [one.value(n, "u32").copy() if n in one.registers else np.zeros(one.threads, np.uint32) for n in names]
    access, is_written = "run" if len(names) > 1 else "word", name == "st"
    for thread in np.flatnonzero(where):
        held = one.memory.at(places[thread], size * len(names), access, is_written=is_written).reshape(-1, size)
        for n, value in enumerate(values):
            if name == "st":
                held[n] = np.frombuffer(value[thread].tobytes(), np.uint8)[:size]
            else:
                value[thread] = int.from_bytes(held[n].tobytes(), "little")
    if name == "ld":
        for register, value in zip(names, values, strict=True):
            one.keep(register, value, where)


def multiply(one: Program, kind: str, words: list[str]) -> None:
    """m64nNk16 of each warpgroup: A in registers, B in rows of 128 bytes with their runs of 16 swapped."""
    n = int(re.search(r"m64n(\d+)k16", kind)[1])  # type: ignore[index]
    sums, operand = (w.strip("{}").split(", ") for w in words[:2])
    desc, scale = int(one.value(words[2], "u64")[0]), one.value(words[3], "pred")
    assert desc >> 62 == 1 and len(sums) == n // 2 and scale.all()
    row, column = np.arange(n)[:, None], np.arange(16)[None, :]
    at = ((desc & 0x3FFF) << 4) + row // 8 * ((desc >> 32 & 0x3FFF) << 4) + row % 8 * 128 + column * 2
    at ^= (at >> 7 & 7) << 4
    for address in (at.min(), at.max() - 14):
        one.memory.at(address, 16, "product")
    b = bf16(one.memory.parts[0].view(np.uint16)[at // 2])
    # [group, warp, row of eight, four lanes]
    a = np.zeros((one.threads // 128, 4, 16, 16), np.float32)
    for i, register in enumerate(operand):
        pairs = bf16(one.value(register, "u32").view(np.uint16)).reshape(-1, 4, 8, 8)
        a[:, :, i % 2 * 8 : i % 2 * 8 + 8, i // 2 * 8 : i // 2 * 8 + 8] = pairs
    with np.errstate(all="ignore"):
        found = a @ b.T  # [group, warp, 16, n]
    for i, register in enumerate(sums):
        part = found[:, :, i // 2 % 2 * 8 : i // 2 % 2 * 8 + 8, i // 4 * 8 + i % 2 : i // 4 * 8 + 8 : 2]
        one.keep(register, one.value(register, "f32") + part.reshape(-1), one.active)
