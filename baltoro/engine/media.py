"""Pictures of a request: which prompt positions take which features, and the Media of one step.

In: media items and the pad ids of a prompt; the spans of a plan. Out: MediaRuns; a Media, or None for a step without.
A span may cut through a picture: the tower then runs on the whole picture in both steps, and each takes its features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baltoro.engine.batch import Span
from baltoro.engine.request import MediaRun
from baltoro.errors import RequestError
from baltoro.model.config import K3Config
from baltoro.model.context import Media
from baltoro.protocol.worker import MediaItem


def media_runs(token_ids: Sequence[int], items: Sequence[MediaItem], config: K3Config) -> tuple[MediaRun, ...]:
    """Which positions each item fills. Errors: RequestError when pads and pictures do not match."""
    pad = config.media_token_id
    if items and (config.vision is None or pad is None):
        raise RequestError("this model has no vision tower: send no pictures")
    pads = [] if pad is None else [at for at, token in enumerate(token_ids) if token == pad]
    runs, done = [], 0
    for item in items:
        count = num_features(item, config)
        own = pads[done : done + count]
        if len(own) != count or own[-1] - own[0] != count - 1:
            raise RequestError(f"a picture of {item.grid} patches needs {count} media pads in a row")
        runs.append(MediaRun(item, own[0], own[-1] + 1))
        done += count
    if done != len(pads):
        raise RequestError(f"the prompt has {len(pads)} media pads, its pictures fill {done}")
    return tuple(runs)


def num_features(item: MediaItem, config: K3Config) -> int:
    """Rows that one item fills: its frames are pooled, its patches merged. Errors: RequestError for a bad item."""
    assert config.vision is not None
    frames, height, width = item.grid
    merge, patch = config.vision.merge, config.vision.patch_size
    if min(item.grid) < 1 or height % merge or width % merge or item.patch_size != patch:
        raise RequestError(
            f"a picture of {item.grid} patches of {item.patch_size} pixels does not fit: patches must have {patch} "
            f"pixels, height and width must be multiples of {merge} patches"
        )
    if len(item.pixels) != frames * height * width * 3 * patch * patch * 4:
        raise RequestError(f"a picture of {item.grid} patches has {len(item.pixels)} bytes of pixels")
    return (height // merge) * (width // merge)


def build_media(spans: Sequence[Span], config: K3Config, device: torch.device) -> Media | None:
    """What the spans of one step see of pictures."""
    if not any(span.media for span in spans):
        return None
    assert config.vision is not None
    patch = config.vision.patch_size
    pixels, grids, rows, picks = [], [], [], []
    row, feature = 0, 0  # of the span, in the step; of the item, among all items' features
    for span in spans:
        for run in span.media:
            first, last = max(run.first, span.start), min(run.last, span.end)
            rows.append(torch.arange(first, last) - span.start + row)
            picks.append(torch.arange(first, last) - run.first + feature)
            feature += run.last - run.first
            values = torch.frombuffer(bytearray(run.item.pixels), dtype=torch.float32)
            pixels.append(values.view(-1, 3, patch, patch))
            grids.append(run.item.grid)
        row += len(span.tokens)
    return Media(torch.cat(pixels).to(device), tuple(grids), torch.cat(rows).to(device), torch.cat(picks).to(device))
