"""Carry what Triton found out from one machine to the next: chosen configurations and compiled kernels.

    python3 scripts/gpu/tuning.py pack /tmp/triton FILE
    python3 scripts/gpu/tuning.py unpack FILE /tmp/triton

`flash-linear-attention` times each of its kernels in up to dozens of configurations, which took 118 s of a first step.
Triton keeps the times (`*.autotune.json`) and the binaries in its cache folder, by a key of its own version, the GPU
and the sources. The folder must have the same absolute path on both machines: Triton writes paths into it.
Only the times and what a launch needs travel; if that is too much, the times alone (then winners are compiled anew).
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

NEEDED = (".json", ".cubin", ".so")
LIMIT_BYTES = 5_500_000


def pack(folder: Path, target: Path, *, limit: int = LIMIT_BYTES) -> str:
    """Write `target`, whole or not at all; returns what was packed."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in NEEDED and not _is_unfinished(p, folder))
    choices = [p for p in files if p.name.endswith(".autotune.json")]
    what, data = "times and kernels", _archive(folder, files)
    if len(data) > limit:
        what, data = "times", _archive(folder, choices)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".new")
    beside.write_bytes(data)
    beside.replace(target)
    return f"{len(choices)} tuned kernels, {len(files)} files; carried: {what}, {len(data) / 1e6:.2f} MB"


def unpack(source: Path, folder: Path) -> str:
    """Fill `folder`; files that are there stay."""
    count = 0
    with tarfile.open(source, "r:xz") as tar:
        for member in tar.getmembers():
            path = folder / member.name
            if member.isfile() and not path.exists() and folder.resolve() in path.resolve().parents:
                tar.extract(member, folder, filter="data")
                count += 1
    return f"{count} files of {source} in {folder}"


def _archive(folder: Path, files: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=3) as tar:
        for path in files:
            if path.suffix == ".json" and not _is_whole(path):
                continue  # another process is at it
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            data = path.read_bytes()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _is_unfinished(path: Path, folder: Path) -> bool:
    """Triton writes into tmp.* folders and renames from there."""
    return any(part.startswith("tmp") for part in path.relative_to(folder).parts)


def _is_whole(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args(argv)
    print((pack if args.verb == "pack" else unpack)(args.source, args.target))


if __name__ == "__main__":
    main()
