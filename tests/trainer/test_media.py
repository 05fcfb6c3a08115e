"""Pictures of documents reach the rows of their media pads; a bf16 run moves float32 masters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baltoro.errors import ConfigError
from baltoro.model.build import new_model
from baltoro.model.context import FakeQuant
from baltoro.trainer.media import media_of
from baltoro.trainer.pack import pack
from baltoro.trainer.pictures import patches
from baltoro.trainer.sample import TrainSample
from baltoro.trainer.step import objective
from tests.tiny import tiny_k3

PAD = 126


def sample(ids: list[int], shades: list[int], size: tuple[int, int] = (12, 12)) -> TrainSample:
    """A document whose pictures are of one shade each; 12 x 12 pixels are one feature of the tiny tower."""
    tokens = torch.tensor(ids)
    pictures = np.stack([np.full(size, shade, np.uint8) for shade in shades]) if shades else None
    return TrainSample(tokens[:-1], tokens[1:], torch.ones(len(ids) - 1), "x", pictures)


def test_features_go_to_the_pads_in_order_across_documents_and_sizes() -> None:
    config = tiny_k3()
    batch = pack([sample([1, PAD, 2, 3], [10]), sample([5, 6, 7], []), sample([PAD, PAD, 4, 9], [200], (12, 24))])
    media = media_of(batch, config)
    assert media is not None
    assert media.rows.tolist() == [1, 5, 6] and media.picks.tolist() == [0, 1, 2]
    assert media.grids == ((1, 2, 2), (1, 2, 4))
    model = new_model(config, std=0.2, decay="slow")
    features = model.features(media.pixels, media.grids)
    alone = model.features(
        *(torch.from_numpy(p) if i == 0 else p for i, p in enumerate(patches(batch.pictures[1], patch=6)))
    )
    torch.testing.assert_close(features[1:], alone)


def test_a_picture_changes_the_loss_of_its_document_only() -> None:
    model = new_model(tiny_k3(), std=0.2, decay="slow", dtype=torch.float64)
    losses = []
    for shade in (10, 250):
        batch = pack([sample([1, PAD, 2, 3], [shade]), sample([5, 6, 7], [])])
        losses.append(objective(model, batch, FakeQuant())[0])
    assert not torch.allclose(losses[0][1:3], losses[1][1:3])
    # tokens of both documents share the experts' products, whose rounding follows their number of rows
    torch.testing.assert_close(losses[0][3:], losses[1][3:], rtol=0, atol=1e-13)


def test_pads_without_pictures_are_an_error() -> None:
    batch = pack([sample([1, PAD, PAD, 3], [10])])
    with pytest.raises(ConfigError, match="2 media pads for 1"):
        media_of(batch, tiny_k3())
    with pytest.raises(ConfigError, match="no vision tower"):
        media_of(batch, tiny_k3(vision=None))
    assert media_of(replace(batch, pictures=()), tiny_k3()) is None
