"""Mesh: coordinates and groups."""

from __future__ import annotations

from itertools import product

import pytest

from baltoro.errors import ConfigError
from baltoro.parallel.mesh import AXES, Mesh


def test_one_process_is_the_default() -> None:
    mesh = Mesh()
    assert mesh.num_ranks == 1
    assert [mesh.coordinate(axis) for axis in AXES] == [0] * 6
    assert [mesh.group(axis) for axis in AXES] == [(0,)] * 6


def test_ranks_and_coordinates_are_a_bijection() -> None:
    sizes = {"dp": 2, "pp": 3, "tp": 4}
    meshes = [Mesh(**sizes, rank=rank) for rank in range(24)]
    seen = [tuple(mesh.coordinate(axis) for axis in AXES) for mesh in meshes]
    assert seen == list(product(range(2), range(3), range(1), range(1), range(1), range(4)))


def test_groups_hold_the_ranks_that_differ_along_one_axis() -> None:
    mesh = Mesh(dp=2, pp=3, tp=4, rank=13)
    assert mesh.group("tp") == (12, 13, 14, 15)
    assert mesh.group("pp") == (13, 17, 21)
    assert mesh.group("dp") == (1, 13)


@pytest.mark.parametrize(("sizes", "message"), [({"tp": 0}, "axis tp has size 0"), ({"tp": 2, "rank": 2}, "rank 2")])
def test_an_impossible_mesh_says_why(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh(**sizes)
