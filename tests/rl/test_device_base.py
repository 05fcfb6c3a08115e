"""Engine and trainer on one base of a device: the ways of a GPU, on a CPU with a shared file in the place of CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.engine.base import share_model
from baltoro.engine.engine import Engine
from baltoro.errors import ConfigError, DigestMismatch
from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.weights import load_model
from baltoro.rl.base import open_model
from tests.model.adapters import random_adapter
from tests.rl.engines import CONFIG, RANK, engine_config, make_folder
from tests.transfer.test_device_base import SharedFile


@pytest.mark.parametrize(
    ("dtype", "is_tiled"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_trainers_model_is_the_engines(tmp_path: Path, dtype: torch.dtype, is_tiled: bool) -> None:
    """Same logits, merged alike, every tensor a view of the one allocation; a write by one is found by both."""
    made = load_model(make_folder(tmp_path / "model"), dtype=dtype)
    tokens, lengths = torch.arange(9), (4, 5)
    if is_tiled:
        assert set(made.tile_experts()) == {"tiled"}
    expected = made(train_context(tokens, lengths))
    owned, base = share_model(made, tmp_path / "base", "cpu", SharedFile())
    model, opened = open_model(CONFIG, tmp_path / "base", base.digest, dtype=dtype, sharing=SharedFile())
    for one, its in ((owned, base), (model, opened)):
        found = list(one.state_dict().values())
        merged = [getattr(module, "_merged", None) for module in one.modules()]
        found += [tensor for tensor in merged if tensor is not None]
        assert len(found) > len(one.state_dict())
        assert all(t.untyped_storage().data_ptr() == its.content.data_ptr() for t in found)
        torch.testing.assert_close(one(train_context(tokens, lengths)), expected)
    model.lm_head.weight.data[0, 0] += 1
    for its in (base, opened):
        with pytest.raises(DigestMismatch, match="was written to"):
            its.check()


def test_an_engine_whose_base_was_written_to_takes_no_version(tmp_path: Path) -> None:
    """A byte flipped: the engine stops, with the version before still the one that serves."""
    model, base = share_model(new_model(CONFIG, std=0.1), tmp_path / "base", "cpu", SharedFile())
    engine = Engine(model, engine_config(), dtype=torch.float32, base=base)
    adapter = random_adapter(CONFIG, RANK)
    engine.publish("policy", 1, adapter, adapter.digest(), is_carrying=False)
    base.content[1000] ^= 4
    with pytest.raises(DigestMismatch, match="was written to"):
        engine.publish("policy", 2, random_adapter(CONFIG, RANK, seed=1), "2", is_carrying=False)
    latest = engine.adapters.latest("policy")
    assert latest is not None and latest.number == 1
    engine.close()
    assert not (tmp_path / "base").exists()


def test_a_model_is_shared_from_the_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load it there first"):
        share_model(K3Model(CONFIG, torch.float32, "meta"), tmp_path / "base", "cuda")
