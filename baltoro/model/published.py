"""The tensors of a model whose experts lie in tiles, under the names and with the bytes that files have.

In: what is stored, and the tiled experts by path. Out: a read-only mapping; tiles are turned back one layer at a time,
on access, and kept until another layer is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from baltoro.model.moe import MATRICES, TILES, Experts


class Published(Mapping[str, Tensor]):
    """Tensors by published name."""

    def __init__(self, stored: Mapping[str, Tensor], tiled: Mapping[str, Experts]) -> None:
        hidden = {f"{path}.{name}" for path in tiled for name in TILES}
        self._rest = {name: tensor for name, tensor in stored.items() if name not in hidden}
        self._tiled = {
            f"{path}.{name}_{part}": (path, experts, name)
            for path, experts in tiled.items() for name in MATRICES for part in ("packed", "scale")
        }  # fmt: skip
        self._path, self._kept = "", dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._rest:
            return self._rest[name]
        path, experts, matrix = self._tiled[name]
        if path != self._path:
            self._path, self._kept = path, {}
        if name not in self._kept:
            found = experts.published(matrix)
            self._kept[f"{path}.{matrix}_packed"], self._kept[f"{path}.{matrix}_scale"] = found.packed, found.scale
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._rest, *self._tiled))

    def __len__(self) -> int:
        return len(self._rest) + len(self._tiled)
