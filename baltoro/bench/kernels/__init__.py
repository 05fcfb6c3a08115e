"""Times of kernels on a GPU, beside floors of the same run and, where installed, peers: `baltoro bench kernels`.

A module of MODULES has `measure(ceilings, *, with_peers) -> Iterator[Figure]`. It checks what it times against the
reference first, and raises InvariantError where that is off: no time without a right result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch

from baltoro.bench.kernels.timing import Ceilings, Figure, ceilings
from baltoro.errors import ConfigError

MODULES = {"kda": "kda_beside", "mla": "mla", "mla_prefill": "mla_prefill", "attnres": "attnres", "moe": "moe"}
"""Name -> module."""


def present() -> list[str]:
    """Names of MODULES that are there."""
    return [name for name, module in MODULES.items() if find_spec(f"{__name__}.{module}") is not None]


def measure(only: Sequence[str] = (), *, with_peers: bool = False) -> tuple[Ceilings, Iterator[Figure]]:
    """Ceilings of this device, then figures one by one. Errors: ConfigError without a CUDA device, or for a name."""
    for name in only:
        if name not in present():
            raise ConfigError(f"no kernels called {name!r} to time; there are: {', '.join(present())}")
    if not torch.cuda.is_available():
        raise ConfigError("kernels are timed on a CUDA device; there is none here")
    found = ceilings()
    return found, _figures(only or present(), found, with_peers)


def _figures(names: Sequence[str], found: Ceilings, with_peers: bool) -> Iterator[Figure]:
    for name in names:
        run: Callable[..., Iterator[Figure]] = import_module(f"{__name__}.{MODULES[name]}").measure
        yield from run(found, with_peers=with_peers)
