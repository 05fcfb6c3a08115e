"""Convert: what need not change is copied bit for bit, MXFP4 follows the rule, a half-written folder never appears."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro.errors import ConfigError, WeightsError
from baltoro.kernels.quant import mxfp4
from baltoro.model import convert as module
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.convert import convert
from baltoro.model.inspect import inspect_checkpoint
from baltoro.model.weight_files import SINGLE_NAME, WeightFiles
from baltoro.model.weights import load_model, save_model
from tests.tiny import tiny_k3, tiny_kimi_linear

EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.4.w3.weight"


def saved(folder: Path, config: K3Config | None = None, **options: Any) -> Path:
    config = config or tiny_k3(dtype="bfloat16")
    save_model(new_model(config, dtype=getattr(torch, config.dtype), std=0.1, decay="slow"), folder, **options)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("model*.safetensors")) for name, t in load_file(path).items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(bits(got[name]), bits(tensor)), name


def is_expert(name: str) -> bool:
    return ".experts." in name


# ---- other files ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("sizes", [(10**9, 200_000), (200_000, 10**9), (200_000, 300_000)])
def test_other_files_hold_the_same_bits(tmp_path: Path, is_packed: bool, sizes: tuple[int, int]) -> None:
    config = tiny_k3(dtype="bfloat16", are_experts_packed=is_packed)
    saved(tmp_path / "a", config, max_shard_bytes=sizes[0])
    convert(tmp_path / "a", tmp_path / "b", max_shard_bytes=sizes[1])
    assert_same_bits(tensors_of(tmp_path / "b"), tensors_of(tmp_path / "a"))
    assert inspect_checkpoint(tmp_path / "b").is_good
    assert (tmp_path / "b" / "config.json").read_text() == (tmp_path / "a" / "config.json").read_text()
    largest = max(path.stat().st_size for path in (tmp_path / "b").glob("model*.safetensors"))
    assert largest < sizes[1] + 50_000  # of header


def test_tensors_are_copied_even_in_forms_that_we_would_not_write(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / SINGLE_NAME)
    a_log, norm = "language_model.model.layers.0.self_attn.A_log", "language_model.model.norm.weight"
    tensors[a_log] = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    tensors[norm] = tensors[norm].double()
    save_file(tensors, tmp_path / "a" / SINGLE_NAME)
    convert(tmp_path / "a", tmp_path / "b", quantise=True)
    written = tensors_of(tmp_path / "b")
    assert_same_bits({n: written[n] for n in (a_log, norm)}, {n: tensors[n] for n in (a_log, norm)})


# ---- MXFP4 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [tiny_k3(dtype="bfloat16"), tiny_kimi_linear(hidden_size=64)], ids=["k3", "linear"])
def test_quantising_packs_the_experts_by_the_rule_and_nothing_else(tmp_path: Path, config: K3Config) -> None:
    before = tensors_of(saved(tmp_path / "a", config))
    convert(tmp_path / "a", tmp_path / "b", quantise=True)
    after = tensors_of(tmp_path / "b")
    expected = {name: tensor for name, tensor in before.items() if not is_expert(name)}
    for name in before.keys() - expected.keys():
        packed, scale = mxfp4.quantise(before[name])
        expected |= {f"{name}_packed": packed, f"{name}_scale": scale}
    assert_same_bits(after, expected)
    assert inspect_checkpoint(tmp_path / "b").is_good
    assert load_model(tmp_path / "b").config == config.with_(are_experts_packed=True)


def test_the_two_halves_of_an_expert_may_lie_in_different_files(tmp_path: Path) -> None:
    config = tiny_k3(dtype="bfloat16", num_layers=2, mla_layers=(1,), num_experts=2, num_active_experts=1, vision=None)
    before = tensors_of(saved(tmp_path / "a", config))
    convert(tmp_path / "a", tmp_path / "b", quantise=True, max_shard_bytes=1050)  # room for packed, not for scale
    files = WeightFiles.open(tmp_path / "b").entries
    after = tensors_of(tmp_path / "b")
    for name in filter(is_expert, before):
        packed, scale = mxfp4.quantise(before[name])
        assert torch.equal(after[f"{name}_packed"], packed) and torch.equal(after[f"{name}_scale"], scale)
        assert files[f"{name}_packed"].path != files[f"{name}_scale"].path


@pytest.mark.parametrize(("dtype", "word"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_dequantising_is_exact_and_changes_only_experts(tmp_path: Path, dtype: str, word: module.DenseDtype) -> None:
    before = tensors_of(saved(tmp_path / "a", tiny_k3(dtype=dtype, are_experts_packed=True)))
    convert(tmp_path / "a", tmp_path / "b", dequantise=word)
    after = tensors_of(tmp_path / "b")
    expected = {name: tensor for name, tensor in before.items() if not is_expert(name)}
    for name, packed in before.items():
        if name.endswith("_packed"):
            name = name.removesuffix("_packed")
            exact = mxfp4.dequantise(packed, before[f"{name}_scale"], torch.float64)
            assert torch.equal(after[name].double(), exact)
            expected[name] = exact.to(getattr(torch, dtype))
    assert_same_bits(after, expected)
    assert inspect_checkpoint(tmp_path / "b").is_good
    assert not load_model(tmp_path / "b").config.are_experts_packed


def test_packed_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    # blocks whose largest value is 4 or 6 in their scale, as quantising makes them, come back as they were
    saved(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", quantise=True)
    convert(tmp_path / "b", tmp_path / "c", dequantise="bf16")
    convert(tmp_path / "c", tmp_path / "d", quantise=True)
    assert_same_bits(tensors_of(tmp_path / "d"), tensors_of(tmp_path / "b"))


def test_experts_that_are_packed_are_not_touched_by_quantising(tmp_path: Path) -> None:
    saved(tmp_path / "a", tiny_k3(dtype="bfloat16", are_experts_packed=True))
    tensors = load_file(tmp_path / "a" / SINGLE_NAME)
    tensors[f"{EXPERT}_scale"][:] = 255  # no number: nobody may look
    save_file(tensors, tmp_path / "a" / SINGLE_NAME)
    convert(tmp_path / "a", tmp_path / "b", quantise=True)
    assert_same_bits(tensors_of(tmp_path / "b"), tensors)


def test_experts_that_are_not_packed_are_not_touched_by_dequantising(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", dequantise="bf16")
    assert_same_bits(tensors_of(tmp_path / "b"), tensors_of(tmp_path / "a"))


# ---- config and other files -----------------------------------------------------------------------------------------
def test_the_config_keeps_every_field_and_says_what_the_experts_are(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    raw["transformers_version"], raw["text_config"]["temperature"] = "4.56.2", 0.7
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    convert(tmp_path / "a", tmp_path / "b", quantise=True)
    packed = json.loads((tmp_path / "b" / "config.json").read_text())
    quantization = packed["text_config"].pop("quantization_config")
    assert quantization["format"] == "mxfp4-pack-quantized" and packed == raw
    convert(tmp_path / "b", tmp_path / "c", dequantise="bf16")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == raw


def test_a_quantization_config_that_is_there_is_kept_in_its_place(tmp_path: Path) -> None:
    saved(tmp_path / "a", tiny_k3(dtype="bfloat16", are_experts_packed=True))
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    raw["quantization_config"] = raw["text_config"].pop("quantization_config") | {"note": "mine"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    convert(tmp_path / "a", tmp_path / "b")
    found = json.loads((tmp_path / "b" / "config.json").read_text())
    assert found["text_config"]["quantization_config"]["note"] == "mine" and "quantization_config" not in found
    convert(tmp_path / "a", tmp_path / "c", dequantise="bf16")
    assert "quantization_config" not in (tmp_path / "c" / "config.json").read_text()


def test_the_config_of_kimi_linear_has_it_at_the_top(tmp_path: Path) -> None:
    saved(tmp_path / "a", tiny_kimi_linear(hidden_size=64))
    convert(tmp_path / "a", tmp_path / "b", quantise=True)
    assert "quantization_config" in json.loads((tmp_path / "b" / "config.json").read_text())


def test_tokenizer_and_card_come_along_but_no_other_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a", max_shard_bytes=10**6)
    others = {"tiktoken.model", "tokenizer_config.json", "generation_config.json", "README.md", "modeling.py"}
    for name in [*others, "draft.safetensors", "pytorch_model.bin", ".lock", "x.safetensors.index.json"]:
        (tmp_path / "a" / name).write_bytes(name.encode())
    (tmp_path / "a" / "folder").mkdir()
    convert(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == others | {"config.json", SINGLE_NAME}
    assert (tmp_path / "b" / "tiktoken.model").read_bytes() == b"tiktoken.model"


# ---- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"quantise": True, "dequantise": "bf16"}, "exclude each other"),
        ({"num_experts": 0, "num_active_experts": 0}, {"quantise": True}, "no routed experts"),
        ({"are_experts_packed": True}, {"dequantise": "fp32"}, "give --dequantise bf16 instead of fp32"),
        ({"latent_size": 40}, {"quantise": True}, "multiples of 32"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    saved(tmp_path / "a", tiny_k3(dtype="bfloat16", **config))
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "a", tmp_path / "b", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_with_something_in_it_is_never_written_to(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (tmp_path / "b").mkdir()
    convert(tmp_path / "a", tmp_path / "b")  # empty: as good as none
    before = (tmp_path / "b" / SINGLE_NAME).stat().st_mtime_ns
    for target in ("b", "a"):
        with pytest.raises(ConfigError, match=f"{target} is not empty; give a new folder, or empty this one first"):
            convert(tmp_path / "a", tmp_path / target)
    with pytest.raises(ConfigError, match=f"{SINGLE_NAME} is a file; give the folder to write"):
        convert(tmp_path / "a", tmp_path / "b" / SINGLE_NAME)
    assert (tmp_path / "b" / SINGLE_NAME).stat().st_mtime_ns == before


def test_a_value_that_mxfp4_cannot_hold_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / SINGLE_NAME)
    tensors[EXPERT][3, 5] = float("inf")
    save_file(tensors, tmp_path / "a" / SINGLE_NAME)
    with pytest.raises(WeightsError, match=f"{EXPERT} holds values that are not finite"):
        convert(tmp_path / "a", tmp_path / "b", quantise=True, max_shard_bytes=10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_source_that_does_not_fit_its_config_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / SINGLE_NAME)
    del tensors[EXPERT]
    save_file(tensors, tmp_path / "a" / SINGLE_NAME)
    with pytest.raises(WeightsError, match=f"1 missing: {EXPERT}"):
        convert(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("step", ["_copy_others", "_new_config", "buffer_of"])
def test_a_failure_at_any_step_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    saved(tmp_path / "a")

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, step, fails)
    with pytest.raises(OSError, match="no space"):
        convert(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_dead_run_left_is_swept_away(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    (tmp_path / ".b.partial").mkdir()
    (tmp_path / ".b.partial" / "junk").write_text("half")
    convert(tmp_path / "a", tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert not (tmp_path / "b" / "junk").exists()


# ---- progress and memory --------------------------------------------------------------------------------------------
def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert(saved(tmp_path / "a"), tmp_path / "b", quantise=True, on_progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and {call[1] for call in calls} == {done[-1]}
    assert done[-1] == inspect_checkpoint(tmp_path / "b").total.num_bytes


def test_converting_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    saved(tmp_path / "a", tiny_k3(dtype="bfloat16", vocab_size=12_000))  # two tensors of 960,000 bytes
    convert(tmp_path / "a", tmp_path / "b")
    tracemalloc.start()
    convert(tmp_path / "a", tmp_path / "c")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 960_000 + 800_000  # names and offsets
