"""Inspect: a good checkpoint passes, every single fault is a problem that names the tensor."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro.errors import ConfigError, WeightsError
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.inspect import Report, inspect_checkpoint
from baltoro.model.names import tensor_specs
from baltoro.model.weight_files import INDEX_NAME, SINGLE_NAME
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3, tiny_kimi_linear

NORM = "language_model.model.norm.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"
CONFIGS: dict[str, K3Config] = {
    "k3": tiny_k3(),
    "packed": tiny_k3(are_experts_packed=True),
    "mtp": tiny_k3(num_mtp_layers=1),
    "tied": tiny_k3(tie_word_embeddings=True),
    "kimi-linear": tiny_kimi_linear(),
}


def saved(folder: Path, config: K3Config | None = None, *, several: bool = False) -> Path:
    save_model(new_model(config or tiny_k3()), folder, max_shard_bytes=1_000_000 if several else 10**9)
    return folder


def edit_tensors(folder: Path, name: str, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the file `name` behind the back of the index."""
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def total(index: dict[str, Any]) -> int:
    return int(index["metadata"]["total_size"])


def file_of(folder: Path, name: str) -> str:
    return str(json.loads((folder / INDEX_NAME).read_text())["weight_map"][name])


def found(report: Report) -> list[tuple[str, str]]:
    return [(problem.kind, problem.name) for problem in report.problems]


# ---- good -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_we_save_is_good(tmp_path: Path, config: K3Config, several: bool) -> None:
    report = inspect_checkpoint(saved(tmp_path, config, several=several))
    specs = list(tensor_specs(config))
    assert report.is_good and report.problems == ()
    assert (report.total.num_tensors, report.total.num_bytes) == (len(specs), sum(spec.num_bytes for spec in specs))
    assert report.index_bytes == (report.total.num_bytes if several else None)
    assert report.num_files == report.num_compared == len(list(tmp_path.glob("model*.safetensors")))
    assert report.is_packed == config.are_experts_packed


@pytest.mark.parametrize("form", ["folder", "json", "gz", "gz-folder"])
def test_an_index_without_files_is_enough(tmp_path: Path, form: str) -> None:
    saved(tmp_path, several=True)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    source = tmp_path / INDEX_NAME
    if form.startswith("gz"):
        (tmp_path / f"{INDEX_NAME}.gz").write_bytes(gzip.compress(source.read_bytes()))
        source.unlink()
        source = tmp_path / f"{INDEX_NAME}.gz"
    report = inspect_checkpoint(tmp_path if form.endswith("folder") else source)
    assert report.is_good and report.num_compared == 0 and report.num_files == 3
    assert report.total.num_bytes == report.index_bytes


def test_the_config_may_lie_elsewhere(tmp_path: Path) -> None:
    saved(tmp_path / "a", several=True)
    (tmp_path / "a" / "config.json").rename(tmp_path / "mine.json")
    assert inspect_checkpoint(tmp_path / "a", tmp_path / "mine.json").is_good
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        inspect_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("shape", [(3,), (12,), (1, 1, 3, 1)])
def test_every_known_form_of_a_log_is_good_and_its_bytes_are_the_file_s(tmp_path: Path, shape: tuple[int, ...]) -> None:
    saved(tmp_path, several=True)
    value = torch.zeros(shape)
    edit_tensors(tmp_path, file_of(tmp_path, A_LOG), lambda t: t.update({A_LOG: value}))
    edit_index(tmp_path, lambda index: index["metadata"].update(total_size=total(index) + value.nbytes - 8 * 4))
    assert inspect_checkpoint(tmp_path).is_good


def test_groups_add_up_in_the_order_of_the_model(tmp_path: Path) -> None:
    report = inspect_checkpoint(saved(tmp_path, tiny_k3(num_mtp_layers=1)))
    groups = ["globals", "layer", "kda", "dense", "moe", "experts", "mla", "mtp", "vision", "projector"]
    assert list(report.groups) == groups
    assert report.groups["layer"].num_tensors == 7 * 8 and report.groups["kda"].num_tensors == 4 * 12
    assert report.groups["experts"].num_tensors == 6 * 11 * 3


# ---- one fault at a time --------------------------------------------------------------------------------------------
def test_a_missing_tensor_is_named_and_the_bytes_no_longer_add_up(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    edit_tensors(tmp_path, file_of(tmp_path, NORM), lambda t: t.pop(NORM))
    edit_index(tmp_path, lambda index: index["weight_map"].pop(NORM))
    report = inspect_checkpoint(tmp_path)
    assert found(report) == [("missing", NORM), ("bytes", "total_size")]
    assert report.problems[0].message == "the config asks for fp32 [40]"
    assert report.problems[1].message.endswith("(-160)")


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    edit_index(tmp_path, lambda index: index["weight_map"].update(extra=file_of(tmp_path, NORM)))
    edit_tensors(tmp_path, file_of(tmp_path, NORM), lambda t: t.update(extra=torch.zeros(1)))
    assert found(inspect_checkpoint(tmp_path)) == [("unexpected", "extra")]


@pytest.mark.parametrize("error", [-1, 1])
def test_a_total_that_is_off_by_one_is_noticed(tmp_path: Path, error: int) -> None:
    saved(tmp_path, several=True)
    edit_index(tmp_path, lambda index: index["metadata"].update(total_size=total(index) + error))
    assert found(inspect_checkpoint(tmp_path)) == [("bytes", "total_size")]


def test_a_name_twice_in_the_index_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    text = (tmp_path / INDEX_NAME).read_text()
    line = f'"{NORM}": "{file_of(tmp_path, NORM)}"'
    (tmp_path / INDEX_NAME).write_text(text.replace(line, f"{line}, {line}"))
    assert found(inspect_checkpoint(tmp_path)) == [("repeated", NORM)]


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        (NORM, torch.zeros(41), "shape", "[41] in the file, [40] by the config"),
        (A_LOG, torch.zeros(2), "shape", "[2] in the file, [8] by the config"),
        (NORM, torch.zeros(40, dtype=torch.bfloat16), "dtype", "BF16 in the file, F32 by the config"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(tmp_path: Path, name: str, value: Tensor, kind: str, message: str) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, SINGLE_NAME, lambda t: t.update({name: value}))
    report = inspect_checkpoint(tmp_path)
    assert [(p.kind, p.name, p.message) for p in report.problems] == [(kind, name, message)]


def test_a_file_that_is_not_there_is_named_when_others_are(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    gone = file_of(tmp_path, NORM)
    (tmp_path / gone).unlink()
    report = inspect_checkpoint(tmp_path)
    assert found(report) == [("file", gone)] and report.num_compared == 2


def test_a_file_cut_short_is_named_with_its_tensor(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    path = tmp_path / file_of(tmp_path, NORM)
    path.write_bytes(path.read_bytes()[:-1])
    report = inspect_checkpoint(tmp_path)
    assert found(report) == [("file", path.name)]
    assert "is cut short: " in report.problems[0].message


def test_a_tensor_in_another_file_than_the_index_says_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    right = file_of(tmp_path, NORM)
    wrong = next(path.name for path in tmp_path.glob("model-*") if path.name != right)
    edit_index(tmp_path, lambda index: index["weight_map"].update({NORM: wrong}))
    report = inspect_checkpoint(tmp_path)
    assert found(report) == [("unexpected", NORM), ("missing", NORM)]
    assert report.problems[0].message == f"lies in {right}, but the index looks for it in {wrong}"


def test_a_tensor_that_the_index_does_not_know_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, several=True)
    edit_tensors(tmp_path, file_of(tmp_path, NORM), lambda t: t.update(extra=torch.zeros(1)))
    report = inspect_checkpoint(tmp_path)
    assert found(report) == [("unexpected", "extra")]
    assert report.problems[0].message.endswith("but the index does not know it")


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_config_that_is_wrong_about_packing_is_noticed(tmp_path: Path, is_packed: bool) -> None:
    saved(tmp_path, tiny_k3(are_experts_packed=is_packed))
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3(are_experts_packed=not is_packed).to_json()))
    assert found(inspect_checkpoint(tmp_path)) == [("config", "quantization_config")]


def test_a_half_packed_expert_is_missing_one_and_has_one_too_many(tmp_path: Path) -> None:
    name = "language_model.model.layers.2.block_sparse_moe.experts.4.w3.weight"
    saved(tmp_path, tiny_k3(are_experts_packed=True))
    edit_tensors(tmp_path, SINGLE_NAME, lambda t: t.update({name: t.pop(name + "_scale")}))
    assert found(inspect_checkpoint(tmp_path)) == [("missing", name + "_scale"), ("unexpected", name)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "does not exist; give a model folder or an index"),
        ("a.txt", b"", "is no index; give a model folder, a .json"),
        ("a.json", b"{", "is not valid JSON"),
        ("a.json", b"{}", "has no weight_map"),
        ("a.json", b"[]", "has no weight_map"),
        ("a.json.gz", b"{}", "is not valid JSON"),
        ("a.json.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "is not valid JSON"),
        ("folder/x", b"", f"neither {SINGLE_NAME} nor {INDEX_NAME}"),
    ],
)
def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, name: str | None, content: bytes, message: str) -> None:
    source = tmp_path / (name or "nothing")
    if name is not None:
        source.parent.mkdir(exist_ok=True)
        source.write_bytes(content)
    with pytest.raises(WeightsError, match=message.replace(".", r"\.")):
        inspect_checkpoint(source.parent if source.parent != tmp_path else source)


# ---- the published index --------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_published_index_is_good(k3_data: Path) -> None:
    report = inspect_checkpoint(k3_data)
    assert report.is_good and report.is_packed
    assert (report.total.num_tensors, report.num_files) == (497_220, 96)
    assert report.total.num_bytes == report.index_bytes == 1_560_860_324_864


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        pytest.param({"num_shared_experts": 3}, {"bytes"}, marks=pytest.mark.nightly),
        ({"num_experts": 895}, {"unexpected", "bytes"}),
    ],
)
def test_the_published_index_fits_no_other_config(
    k3_data: Path, tmp_path: Path, change: dict[str, int], kinds: set[str]
) -> None:
    data = json.loads((k3_data / "config.json").read_text())
    data["text_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(data))
    report = inspect_checkpoint(k3_data / "model.safetensors.index.json.gz", tmp_path / "config.json")
    assert {problem.kind for problem in report.problems} == kinds
