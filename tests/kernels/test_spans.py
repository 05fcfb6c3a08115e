"""What is derived from spans: made once, right, and taken along to another device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from baltoro.kernels.spans import Spans, map_tensors


class Pair(NamedTuple):
    rows: torch.Tensor
    size: int


def test_positions_and_offsets() -> None:
    spans = Spans.build([3, 1, 2], [0, 7, 4])
    assert spans.positions.tolist() == [0, 1, 2, 7, 4, 5]
    assert spans.offsets_device.tolist() == spans.offsets_wide.tolist() == [0, 3, 4, 6]
    assert (spans.offsets_device.dtype, spans.offsets_wide.dtype) == (torch.int32, torch.int64)
    assert Spans.build([]).positions.shape == (0,)


def test_once_makes_once_for_each_key() -> None:
    spans, made = Spans.build([2]), []

    def make(found: Spans) -> Pair:
        made.append(found)
        return Pair(torch.arange(found.num_tokens), 2)

    assert spans.once("a", make) is spans.once("a", make)
    spans.once(("a", 1), make)
    assert made == [spans, spans]


def test_to_takes_along_what_was_made_and_keeps_its_types() -> None:
    spans = Spans.build([2, 1], [5, 0])
    spans.once("pair", lambda found: Pair(found.positions, 3))
    there = spans.to(torch.device("meta"))

    def never(_: Spans) -> Pair:
        raise AssertionError("it came along")

    found = there.once("pair", never)
    assert isinstance(found, Pair) and found.rows.device.type == "meta" and found.size == 3
    assert there.lengths == spans.lengths and there.starts == spans.starts and there.positions.device.type == "meta"
    assert spans.to(torch.device("cpu")) is spans


def test_map_tensors_reaches_every_tensor() -> None:
    value = {"a": (torch.ones(1), [torch.ones(1), Pair(torch.ones(1), 4)]), "b": 5}
    found = map_tensors(lambda t: t + 1, value)
    assert found["b"] == 5 and found["a"][1][1] == Pair(torch.tensor([2.0]), 4)
    assert float(found["a"][0]) == float(found["a"][1][0]) == 2.0
