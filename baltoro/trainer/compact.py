"""A run small enough to carry: weights in bf16, the place in the data, and nothing else, in a few files.

In: a Run. Out: `resume.part-K` files in a folder, each under PART_BYTES, together one packed body; and the log. The
exponent of a weight says little, so it is stored apart from the rest and packs well: about 11 bits a weight.
What is lost: the low bits of the masters and the optimizers' moments, whose memory is about 20 steps; after reading,
the moments begin at zero and the rate rises again over `run.RAMP_STEPS` steps. A checkpoint loses nothing: this form is
for where one does not fit.
Invariants: the parts of one run state carry the same digest; parts that do not belong together are refused. Parts are
written beside their places and renamed, so a kill leaves at worst a mixture that is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baltoro.config import dump
from baltoro.errors import ConfigError
from baltoro.trainer.checkpoint import FREE_KEYS
from baltoro.trainer.run import Run
from baltoro.trainer.state_file import check_settings, plain

VERSION = 1
PART_BYTES = 12_000_000
MAGIC = b"BALTORO-RESUME\n"
LOG = "metrics.jsonl.gz"
FULL_KEYS = ("e_score_correction_bias",)  # set by counting, not by gradients; their spacing is below bf16's


def write_compact(run: Run, folder: Path, *, part_bytes: int = PART_BYTES) -> list[Path]:
    """Replace the parts in `folder` by those of `run`. Waits for the device."""
    body = _pack(run)
    digest = hashlib.sha256(body).hexdigest().encode()
    pieces = [body[first : first + part_bytes] for first in range(0, len(body), part_bytes)]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"resume.part-{index}" for index in range(len(pieces))]
    for path, piece, index in zip(paths, pieces, range(len(pieces)), strict=True):
        head = MAGIC + digest + f" {index} {len(pieces)}\n".encode()
        path.with_name(path.name + ".new").write_bytes(head + piece)
    for path in paths:
        path.with_name(path.name + ".new").replace(path)
    for path in set(folder.glob("resume.part-*")) - set(paths):
        path.unlink()
    return paths


def has_compact(folder: Path) -> bool:
    """Whether parts lie there."""
    return (folder / "resume.part-0").is_file()


def read_compact(run: Run, folder: Path) -> None:
    """Put `run` where the parts were written. Errors: ConfigError if one is missing, mixed, or of other settings."""
    head, names, values = _unpack(_join(folder))
    if head["version"] != VERSION:
        raise ConfigError(f"{folder} holds a compact form of version {head['version']}, this code reads {VERSION}")
    check_settings(folder, head["config"], run.config, free=FREE_KEYS)
    run.restart(head["place"], dict(zip(names, values, strict=True)))


def write_log(source: Path, folder: Path) -> None:
    """The log beside the parts, packed."""
    beside = folder / f"{LOG}.new"
    beside.write_bytes(gzip.compress(source.read_bytes(), mtime=0))
    beside.replace(folder / LOG)


def read_log(folder: Path, target: Path) -> None:
    """The log that came with the parts, unless there is one already."""
    if not target.is_file() and (folder / LOG).is_file():
        target.write_bytes(gzip.decompress((folder / LOG).read_bytes()))


def _pack(run: Run) -> bytes:
    """head length, head, then the planes, packed."""
    state = {name: tensor.detach() for name, tensor in run.model.tensors().items()}
    full = [name for name in state if name.endswith(FULL_KEYS)]
    halves = [name for name in state if name not in full]
    flat = torch.cat([state[name].flatten().to(torch.bfloat16) for name in halves]).cpu()
    exact = torch.cat([state[name].flatten().to(torch.float32) for name in full]).cpu().numpy() if full else np.zeros(0)
    high, low = _planes(flat.view(torch.uint16).numpy())
    place = {"step": run.step, "tokens": run.tokens, "data": run.feed.state()}
    sizes = {name: state[name].numel() for name in (*halves, *full)}
    head = {"version": VERSION, "config": plain(dump(run.config)), "place": place, "sizes": sizes, "full": len(full)}
    text = json.dumps(head).encode()
    packer = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)  # exponents have no patterns, only frequencies
    planes = [high.tobytes(), low.tobytes(), exact.astype("<f4").tobytes()]
    packed = b"".join(packer.compress(plane) for plane in planes) + packer.flush()
    return len(text).to_bytes(8, "little") + text + packed


def _unpack(body: bytes) -> tuple[dict[str, Any], list[str], list[Tensor]]:
    """The head, and names and flat values of the tensors."""
    size = int.from_bytes(body[:8], "little")
    head: dict[str, Any] = json.loads(body[8 : 8 + size])
    raw = zlib.decompress(body[8 + size :])
    names, sizes = list(head["sizes"]), list(head["sizes"].values())
    num_halves = len(names) - head["full"]
    count = sum(sizes[:num_halves])
    high, low = (np.frombuffer(raw, np.uint8, count, first) for first in (0, count))
    halves = torch.from_numpy(_joined(high, low)).view(torch.bfloat16).float()
    exact = torch.from_numpy(np.frombuffer(raw, "<f4", offset=2 * count).copy())
    values = [*torch.split(halves, sizes[:num_halves]), *torch.split(exact, sizes[num_halves:])]
    return head, names, values


def _planes(bits: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """bf16 bits -> (exponents, mantissas with the sign below them)."""
    turned = (bits << 1) | (bits >> 15)
    return (turned >> 8).astype(np.uint8), turned.astype(np.uint8)


def _joined(high: NDArray[np.uint8], low: NDArray[np.uint8]) -> NDArray[np.uint16]:
    turned = (high.astype(np.uint16) << 8) | low
    return ((turned >> 1) | (turned << 15)).astype(np.uint16)


def _join(folder: Path) -> bytes:
    """The body of the parts in `folder`."""
    pieces, digests, total = {}, set(), 0
    for path in sorted(folder.glob("resume.part-*")):
        if path.suffix == ".new":
            continue
        data = path.read_bytes()
        end = data.find(b"\n", len(MAGIC))
        if not data.startswith(MAGIC) or end < 0:
            raise ConfigError(f"{path} is no part of a compact run")
        digest, index, count = data[len(MAGIC) : end].split()
        digests.add(digest)
        total, pieces[int(index)] = int(count), data[end + 1 :]
    body = b"".join(pieces.get(index, b"") for index in range(total))
    if digests != {hashlib.sha256(body).hexdigest().encode()}:
        raise ConfigError(f"the parts in {folder} are incomplete or of several moments; bring all of one")
    return body
