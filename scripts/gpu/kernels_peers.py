"""Every kernel's figures beside the peers that are installed, in one run: a line each, and JSON as it grows.

    python -m scripts.gpu.kernels_peers --json OUT.json [--only kda,moe] [--seconds 300]

As `baltoro bench kernels --peers`, without the command line's packages; a module that throws is one line.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from baltoro.bench.kernels import measure, present
from baltoro.bench.record import versions

PACKAGES = ("torch", "triton", "fla-core", "flash-linear-attention", "tokenspeed-flashkda", "humming-kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    began, rows = time.perf_counter(), []
    wanted = [name for name in args.only.split(",") if name] or present()
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "versions": versions(PACKAGES), "figures": rows}
    print(record["versions"], flush=True)
    torch.set_grad_enabled(False)
    for name in wanted:
        ceilings, figures = measure([name], with_peers=True)
        # a card that has just been hot multiplies more slowly: floors are of what it could do at the time
        record.setdefault("ceilings", {})[name] = asdict(ceilings)
        rates = f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
        print(f"--- {name} at {time.perf_counter() - began:.0f} s, {rates}", flush=True)
        try:
            for figure in figures:
                rows.append(asdict(figure))
                args.json.write_text(json.dumps(record))
                peers = "".join(f", {peer} {us:.1f}" for peer, us in figure.peers.items())
                error = "" if figure.error is None else f", error {figure.error:.1e}"
                print(
                    f"{figure.name}: {figure.time_us:.1f} us, {figure.over_floor:.2f} x floor{error}{peers}", flush=True
                )
                if time.perf_counter() - began > args.seconds:
                    print("no time left", flush=True)
                    return
        except Exception as error:  # noqa: BLE001 - a line, and on with the next module
            print(f"{name} STOPPED: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"wrote {args.json} after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
