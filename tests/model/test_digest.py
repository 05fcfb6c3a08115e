"""The digest of a model folder: of what it says, not of how it lies in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baltoro.errors import ConfigError, WeightsError
from baltoro.model.build import new_model
from baltoro.model.digest import weights_digest
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3

CONFIG = tiny_k3(vision=None, media_token_id=None, num_layers=2, mla_layers=(1,))


@pytest.fixture
def digest(tmp_path: Path) -> str:
    save_model(new_model(CONFIG, std=0.1, seed=1), tmp_path / "a")
    return weights_digest(tmp_path / "a")


def test_it_is_the_same_however_the_tensors_are_cut_into_files(tmp_path: Path, digest: str) -> None:
    save_model(new_model(CONFIG, std=0.1, seed=1), tmp_path / "b", max_shard_bytes=50_000)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1 and weights_digest(tmp_path / "b") == digest


def test_one_bit_of_a_tensor_and_one_number_of_the_config_are_seen(tmp_path: Path, digest: str) -> None:
    model = new_model(CONFIG, std=0.1, seed=1)
    with torch.no_grad():
        model.lm_head.weight.view(torch.int32)[3, 2] ^= 1
    save_model(model, tmp_path / "b")
    assert weights_digest(tmp_path / "b") != digest
    config = tmp_path / "a" / "config.json"
    said = config.read_text()
    text = json.loads(said)
    inner = text.get("text_config", text)
    inner["rms_norm_eps"] = 2 * inner["rms_norm_eps"]
    config.write_text(json.dumps(text))
    assert weights_digest(tmp_path / "a") != digest
    config.write_text(said)
    assert weights_digest(tmp_path / "a") == digest


def test_what_is_no_model_folder_is_refused(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        weights_digest(tmp_path)
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="model folder"):
        weights_digest(tmp_path / "a")
