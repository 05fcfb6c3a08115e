"""Pictures of a micro-batch -> Media of its ForwardContext.

In: a MicroBatch whose spans are whole documents, so that every picture has all its media pads in the batch. Out:
patches on the batch's device, and the token rows that take their features.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch

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
    parts = [
        patches(np.concatenate(list(group)), patch=size)
        for _, group in groupby(batch.pictures, key=lambda picture: picture.shape[1:])
    ]
    grids = tuple(grid for _, found in parts for grid in found)
    rows = (batch.tokens == config.media_token_id).nonzero().squeeze(1)
    num_features = sum(h * w // merge**2 for _, h, w in grids)
    if len(rows) != num_features:
        raise ConfigError(
            f"a batch has {len(rows)} media pads for {num_features} picture features; build the data again"
        )
    device = batch.tokens.device
    pixels = torch.from_numpy(np.concatenate([found for found, _ in parts])).to(device)
    return Media(pixels, grids, rows, torch.arange(num_features, device=device))
