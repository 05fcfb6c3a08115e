"""Pictures of a micro-batch -> Media of its ForwardContext.

In: a MicroBatch whose spans are whole documents, so that every picture has all its media pads in the batch. Out, on the
host: patches, pictures of one size together, and which feature each media pad takes.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from baltoro.errors import ConfigError
from baltoro.model.config import K3Config
from baltoro.model.context import Media
from baltoro.trainer.pictures import patches
from baltoro.trainer.sample import MicroBatch


def media_of(batch: MicroBatch, config: K3Config) -> Media | None:
    """None where the batch has no picture. Errors: ConfigError where pads and features do not agree."""
    if not batch.pictures:
        return None
    if config.vision is None or config.media_token_id is None:
        raise ConfigError("the corpora have pictures but the model has no vision tower; drop them from the stage's mix")
    size, merge = config.vision.patch_size, config.vision.merge
    # by size, so that the tower takes all of one size together
    order = sorted(range(len(batch.pictures)), key=lambda n: batch.pictures[n].shape[1:])
    pixels: list[NDArray[np.float32]] = []
    grids: list[tuple[int, int, int]] = []
    firsts, counts = [0] * len(order), [0] * len(order)
    num_features = 0
    for (height, width), group in groupby(order, key=lambda n: batch.pictures[n].shape[1:]):
        members = list(group)
        found, of_group = patches(np.concatenate([batch.pictures[n] for n in members]), patch=size)
        pixels.append(found)
        grids += of_group
        cells = (height // size) * (width // size) // merge**2
        for n in members:
            firsts[n], counts[n] = num_features, len(batch.pictures[n]) * cells
            num_features += counts[n]
    rows = (batch.tokens == config.media_token_id).nonzero().squeeze(1)
    if len(rows) != num_features:
        raise ConfigError(
            f"a batch has {len(rows)} media pads for {num_features} picture features; build the data again"
        )
    picks = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])
    return Media(torch.from_numpy(np.concatenate(pixels)), tuple(grids), rows, torch.from_numpy(picks))
