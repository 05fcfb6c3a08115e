"""Several files and their index; new weights over old ones; what is left when a save fails or dies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from baltoro.errors import WeightsError
from baltoro.model import weights
from baltoro.model.build import new_model
from baltoro.model.names import tensor_specs
from baltoro.model.weight_files import INDEX_NAME, SINGLE_NAME, WeightFiles, WeightsWriter
from baltoro.model.weights import load_model, save_model
from tests.model.folders import NORM, assert_equal, saved
from tests.tiny import tiny_k3


# ---- several files --------------------------------------------------------------------------------------------------
def other_file(index: dict[str, Any]) -> str:
    """A file of the index that does not hold NORM."""
    files: dict[str, str] = index["weight_map"]
    return next(file for file in files.values() if file != files[NORM])


def break_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_the_index_names_every_tensor_and_their_bytes(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_bytes=100_000)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    specs = {spec.name: spec for spec in tensor_specs(tiny_k3())}
    assert index["weight_map"].keys() == specs.keys()
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in specs.values())
    sizes = dict.fromkeys(index["weight_map"].values(), 0)
    for name, file in index["weight_map"].items():
        sizes[file] += specs[name].num_bytes
    assert max(sizes.values()) <= 100_000
    assert sorted(sizes) == [f"model-{i:05d}-of-{len(sizes):05d}.safetensors" for i in range(1, len(sizes) + 1)]


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_bytes=1)
    assert len(list(tmp_path.glob("model-*"))) == len(list(tensor_specs(tiny_k3())))
    load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "has no weight_map"),
        (lambda index: index["weight_map"].update(ghost="model-00001-of-00003.safetensors"), "no file holds: ghost"),
        (lambda index: index["weight_map"].pop(NORM), f"holds {NORM}, which .* does not look for there"),
        (lambda index: index["weight_map"].update({NORM: other_file(index)}), f"holds {NORM}, which .* does not look"),
        (lambda index: index["weight_map"].update({NORM: "gone.safetensors"}), "gone.safetensors is named by .* fetch"),
        (lambda index: index["weight_map"].update({NORM: "../x.safetensors"}), f"{NORM} lies in '../x.safetensors'"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    saved(tmp_path, max_shard_bytes=1_000_000)
    assert len(list(tmp_path.glob("model-*"))) == 3
    break_index(tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path)


def test_an_index_that_is_no_json_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{")
    with pytest.raises(WeightsError, match=f"{INDEX_NAME} is not valid JSON"):
        load_model(tmp_path)


# ---- writing over what is there -------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(60_000, 10**9), (10**9, 60_000), (60_000, 90_000)])
def test_new_weights_replace_old_ones_and_nothing_else(tmp_path: Path, sizes: tuple[int, int]) -> None:
    saved(tmp_path, max_shard_bytes=sizes[0])
    others = ["tiktoken.model", "draft.safetensors", "model_card.md"]
    for other in others:
        (tmp_path / other).write_text("mine")
    (tmp_path / ".model-00001-of-00009.safetensors.partial").write_text("of a writer that died")
    model = new_model(tiny_k3(), seed=9)
    save_model(model, tmp_path, max_shard_bytes=sizes[1])
    assert_equal(load_model(tmp_path).state_dict(), model.state_dict())
    weight_files = set(WeightFiles.open(tmp_path).entries[NORM].path.parent.glob("model*.safetensors"))
    assert weight_files == {entry.path for entry in WeightFiles.open(tmp_path).entries.values()}
    index = {INDEX_NAME} if len(weight_files) > 1 else set()
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in weight_files} | {"config.json", *others} | index


@pytest.mark.parametrize("max_shard_bytes", [60_000, 10**9])
def test_a_save_that_fails_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_shard_bytes: int
) -> None:
    old = new_model(tiny_k3(), seed=1)
    save_model(old, tmp_path, max_shard_bytes=max_shard_bytes)
    before = {p.name for p in tmp_path.iterdir()}
    calls = []

    def fails_late(tensor: Tensor) -> memoryview:
        calls.append(1)
        if len(calls) == 150:
            raise OSError("no space left")
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().data

    monkeypatch.setattr(weights, "buffer_of", fails_late)
    with pytest.raises(OSError, match="no space"):
        save_model(new_model(tiny_k3(), seed=2), tmp_path, max_shard_bytes=max_shard_bytes)
    monkeypatch.undo()
    assert {p.name for p in tmp_path.iterdir()} == before
    assert_equal(load_model(tmp_path).state_dict(), old.state_dict())


def test_a_crash_between_two_names_leaves_a_folder_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, max_shard_bytes=1_000_000)
    renamed = []
    replace = Path.replace

    def crashes(self: Path, target: Path) -> Path:
        if target.suffix == ".safetensors":
            renamed.append(target)
            if len(renamed) == 2:
                raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", crashes)
    with pytest.raises(KeyboardInterrupt):
        save_model(new_model(tiny_k3(), seed=2), tmp_path, max_shard_bytes=1_000_000)
    monkeypatch.undo()
    with pytest.raises(WeightsError, match=f"neither {SINGLE_NAME} nor {INDEX_NAME}"):
        load_model(tmp_path)
    save_model(new_model(tiny_k3(), seed=2), tmp_path, max_shard_bytes=1_000_000)
    load_model(tmp_path)


def test_a_writer_left_early_leaves_nothing(tmp_path: Path) -> None:
    stored = WeightFiles.open(saved(tmp_path / "a")).entries[NORM]
    with (
        pytest.raises(WeightsError, match=f"not all tensors .* were written: {NORM}"),
        WeightsWriter(tmp_path / "b", [stored]),
    ):
        pass
    with WeightsWriter(tmp_path / "b", [stored]) as writer:
        writer.write(NORM, memoryview(bytes(160)))
        with pytest.raises(WeightsError, match="x was not announced"):
            writer.write("x", memoryview(b""))
    assert [p.name for p in (tmp_path / "b").iterdir()] == [SINGLE_NAME]
    with pytest.raises(WeightsError, match="must be positive"):
        WeightsWriter(tmp_path / "b", [stored], max_file_bytes=0)


def test_metadata_goes_into_the_file(tmp_path: Path) -> None:
    saved(tmp_path, metadata={"step": "12"})
    with safe_open(tmp_path / SINGLE_NAME, "pt") as file:
        assert file.metadata() == {"format": "pt", "baltoro_version": "1", "step": "12"}
