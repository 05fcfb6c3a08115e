"""Times of the KDA kernels on this GPU as a table, and as a record with --json."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from baltoro.bench.kernels.kda import as_dicts, measure
from baltoro.bench.record import write_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the operation's name")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, ceilings = measure(args.only)
    print(f"copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    for row in rows:
        floor = f"{row.seconds / row.floor_seconds:6.2f} x floor" if row.floor_seconds else " " * 14
        print(f"{row.operation:42} {row.implementation:10} {row.seconds * 1e6:10.1f} us {floor}  {row.note}")
    if args.json:
        results = {**ceilings, "device": torch.cuda.get_device_name(), "figures": as_dicts(rows)}
        write_record(args.json, "kernels-kda", {"only": args.only}, results)


if __name__ == "__main__":
    main()
