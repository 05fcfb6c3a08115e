"""One launch of each kernel at K3's shapes, for a profiler: python -m scripts.gpu.counters NAME."""

from __future__ import annotations

import sys

import torch

from baltoro.bench.kernels import attnres, kda, mla, moe


def main() -> None:
    torch.manual_seed(0)
    name = sys.argv[1]
    works = []
    kda.replay_seconds = lambda found, *a, **k: (works.extend(found[:1]), 1.0)[1]  # type: ignore[assignment]
    kda.find_spec = lambda _: None  # type: ignore[assignment]
    if name == "decode":
        kda._decode(96, 256, name, 1.0)
    elif name == "decode1":
        kda._decode(12, 1, name, 1.0)
    elif name == "verify":
        kda._verify(12, 32, name, 1.0)
    elif name == "fold":
        kda._fold(12, 32, 8, name, 1.0)
    elif name == "prefill":
        kda._prefill(8192, 1, 96, name, 1.0)
    else:
        module = {"mla": mla, "moe": moe, "attnres": attnres}[name]
        module.graph_us = lambda work, **k: (works.append(work), 1.0)[1]  # type: ignore[attr-defined]
        ceilings = type("C", (), {"floor_us": lambda self, *a: 1.0})()
        list(module.measure(ceilings, with_peers=False))
    for work in works:
        work()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for work in works:
        work()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
