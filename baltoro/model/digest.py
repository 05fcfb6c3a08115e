"""What a model folder says, as one digest: for two hosts that cannot share bytes and must have the same. No torch.

In: a folder. Out: SHA-256 over the config and over name, dtype, shape and bytes of every tensor, by name: however the
tensors are cut into files. Nothing is converted: the same values in another dtype are other weights here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from baltoro.model.config import K3Config
from baltoro.model.tensor_file import Entry
from baltoro.model.weight_files import WeightFiles

READ_BYTES = 16 << 20


def weights_digest(folder: str | Path) -> str:
    """Reads every file once. Errors: ConfigError, WeightsError for what is no model folder."""
    config = json.dumps(asdict(K3Config.load(folder)), sort_keys=True)
    entries = WeightFiles.open(folder).entries.values()
    lines = sorted(f"{e.name}\0{e.dtype}\0{list(e.shape)}\0{_tensor_digest(e)}\n" for e in entries)
    return hashlib.sha256("".join([config, "\n", *lines]).encode()).hexdigest()


def _tensor_digest(entry: Entry) -> str:
    found, left = hashlib.sha256(), entry.num_bytes
    with entry.path.open("rb") as file:
        file.seek(entry.begin)
        while left:
            piece = file.read(min(left, READ_BYTES))
            if not piece:
                break  # cut while it was read: another digest
            found.update(piece)
            left -= len(piece)
    return found.hexdigest()
