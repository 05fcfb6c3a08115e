"""Model folders: what is saved is loaded, under the published names, in little memory; what does not fit is named."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baltoro.errors import ConfigError, ShapeError, WeightsError
from baltoro.model import weights
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.names import tensor_specs
from baltoro.model.weight_files import INDEX_NAME, SINGLE_NAME, WeightFiles
from baltoro.model.weights import load_into, load_model, save_model, save_params
from tests.model.folders import NORM, assert_equal, edited, saved
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIGS: dict[str, K3Config] = {
    "k3": tiny_k3(),
    "packed": tiny_k3(are_experts_packed=True),
    "mtp": tiny_k3(num_mtp_layers=1),
    "tied": tiny_k3(tie_word_embeddings=True),
    "kimi-linear": tiny_kimi_linear(),
}
PREFIX = "language_model."
A_LOG = PREFIX + "model.layers.0.self_attn.A_log"
Edit = Callable[[dict[str, Tensor]], Any]


# ---- round trips ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path, config: K3Config, dtype: torch.dtype) -> None:
    model = new_model(config, dtype=dtype, std=0.1, decay="slow")
    save_model(model, tmp_path, max_shard_bytes=70_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    loaded = load_model(tmp_path)
    assert loaded.dtype == dtype and loaded.config == config.with_(dtype=str(dtype).removeprefix("torch."))
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_files_hold_the_published_names_shapes_and_dtypes(tmp_path: Path, config: K3Config) -> None:
    saved(tmp_path, config)
    codes = {"fp32": torch.float32, "uint8": torch.uint8}
    expected = {spec.name: (spec.shape, codes[spec.dtype]) for spec in tensor_specs(config)}
    assert {name: (tuple(t.shape), t.dtype) for name, t in load_file(tmp_path / SINGLE_NAME).items()} == expected


def test_a_bf16_model_keeps_wide_tensors_in_fp32(tmp_path: Path) -> None:
    save_model(new_model(tiny_k3(), dtype=torch.bfloat16), tmp_path)
    wide = {name for name, t in load_file(tmp_path / SINGLE_NAME).items() if t.dtype == torch.float32}
    endings = {name.rpartition("layers.")[2].split(".", 1)[1] for name in wide}
    assert endings == {
        "self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight", "self_attn.q_conv1d.weight",
        "self_attn.k_conv1d.weight", "self_attn.v_conv1d.weight", "block_sparse_moe.gate.e_score_correction_bias",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_a_model_is_loaded_in_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype, wide: torch.dtype) -> None:
    source = new_model(tiny_k3(), dtype=torch.float32, std=0.1, decay="slow")
    save_model(source, tmp_path)
    state = load_model(tmp_path, dtype=dtype).state_dict()
    for name, tensor in source.state_dict().items():
        is_wide = name.endswith(("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias"))
        assert torch.equal(state[name], tensor.to(wide if is_wide else dtype)), name
        assert state[name].dtype == (wide if is_wide else dtype)


def test_loaded_parameters_can_be_trained(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path))
    assert model.model.embed_tokens.weight.requires_grad and model.model.embed_tokens.weight.is_leaf


def test_load_into_fills_a_model_that_exists(tmp_path: Path) -> None:
    source = new_model(tiny_k3(), std=0.1)
    save_model(source, tmp_path)
    target = new_model(tiny_k3(), seed=1, std=0.1)
    before = target.model.embed_tokens.weight.data_ptr()
    load_into(target.state_dict(), tmp_path)
    assert_equal(target.state_dict(), source.state_dict())
    assert target.model.embed_tokens.weight.data_ptr() == before


def test_packed_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    name = PREFIX + "model.layers.3.block_sparse_moe.experts.7.w2.weight_"
    bits = torch.arange(32 * 32, dtype=torch.int32).remainder(256).to(torch.uint8).view(32, 32)
    scales = torch.tensor([0, 255], dtype=torch.uint8).repeat(32, 1)  # not even a number: nobody may look

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name + "packed"], tensors[name + "scale"] = bits, scales

    edited(tmp_path / "a", edit, tiny_k3(are_experts_packed=True))
    save_model(load_model(tmp_path / "a", dtype=torch.bfloat16), tmp_path / "b")
    again = load_file(tmp_path / "b" / SINGLE_NAME)
    assert torch.equal(again[name + "packed"], bits) and torch.equal(again[name + "scale"], scales)


# ---- traps ----------------------------------------------------------------------------------------------------------
def test_a_log_is_saved_padded_with_zeros(tmp_path: Path) -> None:
    model = new_model(tiny_k3(), decay="slow")
    save_model(model, tmp_path)
    padded = load_file(tmp_path / SINGLE_NAME)[A_LOG]
    assert torch.equal(padded, torch.cat([model.state_dict()[A_LOG.removeprefix(PREFIX)], torch.zeros(5)]))


@pytest.mark.parametrize("shape", [(3,), (8,), (100,), (1, 1, 3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_log_is_taken_in_every_known_form(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.full(shape, 9.0, dtype=dtype)
    value.view(-1)[:3] = torch.tensor([1.0, 2.0, 3.0])
    edited(tmp_path, lambda tensors: tensors.update({A_LOG: value}))
    loaded = load_model(tmp_path).state_dict()[A_LOG.removeprefix(PREFIX)]
    assert torch.equal(loaded, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("claims_packed", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_quantised_is_what_the_file_holds_not_what_the_config_says(
    tmp_path: Path, claims_packed: bool, is_packed: bool
) -> None:
    saved(tmp_path, tiny_k3(are_experts_packed=is_packed))
    claim = tiny_k3(are_experts_packed=claims_packed)
    (tmp_path / "config.json").write_text(json.dumps(claim.to_json()))
    model = load_model(tmp_path)
    assert model.config.are_experts_packed == is_packed
    assert ("model.layers.1.block_sparse_moe.experts.w1_packed" in model.state_dict()) == is_packed


def test_files_without_experts_load_whatever_the_config_says_of_packing(tmp_path: Path) -> None:
    config = tiny_k3(num_experts=0, num_active_experts=0)
    assert load_model(saved(tmp_path, config)).config == config


# ---- errors ---------------------------------------------------------------------------------------------------------
EXPERT = PREFIX + "model.layers.1.block_sparse_moe.experts.0.w1.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), rf"1 missing: {NORM}\. Is config\.json"),
        (lambda t: t.update(extra=torch.zeros(2)), r"1 unexpected: extra\. Is config\.json"),
        (lambda t: t.update({NORM: torch.zeros(41)}), rf"1 misshapen: {NORM} \(\[41\] in the file, \[40\] by the con"),
        (lambda t: t.update({A_LOG: torch.zeros(2)}), rf"1 misshapen: {A_LOG} \(\[2\] in the file, \[8\] by the conf"),
        (lambda t: t.update({NORM: torch.zeros(40, dtype=torch.int32)}), rf"1 of a wrong dtype: {NORM} \(I32 in the f"),
        (lambda t: t.update({NORM: torch.zeros(40, dtype=torch.uint8)}), rf"1 of a wrong dtype: {NORM} \(U8 in the fi"),
        (lambda t: t.pop(EXPERT), f"1 missing: {EXPERT}"),
        (lambda t: [t.pop(name) for name in list(t) if ".experts.3." in name], r"18 missing: .* and 13 more"),
        (lambda t: t.update({EXPERT + "_packed": t.pop(EXPERT)}), rf"missing: .*unexpected: .*{EXPERT}"),
        (lambda t: t.update({f"{PREFIX}model.layers.7.enorm.weight": torch.zeros(40)}), "from 7 on are MTP layers"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, edit: Edit, message: str) -> None:
    edited(tmp_path, edit)
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(tmp_path)
    assert f"`baltoro inspect {tmp_path}`" in str(caught.value)


def test_packed_bytes_of_another_dtype_are_named(tmp_path: Path) -> None:
    name = EXPERT + "_packed"
    edited(tmp_path, lambda t: t.update({name: t[name].float()}), tiny_k3(are_experts_packed=True))
    with pytest.raises(WeightsError, match=rf"1 of a wrong dtype: {name} \(F32 in the file, uint8 by the config\)"):
        load_model(tmp_path)


def test_nothing_is_written_before_everything_fits(tmp_path: Path) -> None:
    edited(tmp_path, lambda tensors: tensors.pop(NORM))
    model = new_model(tiny_k3(), seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match=NORM):
        load_into(model.state_dict(), tmp_path)
    assert_equal(model.state_dict(), before)


def test_mtp_tensors_without_mtp_in_the_config_are_unexpected(tmp_path: Path) -> None:
    saved(tmp_path, tiny_k3(num_mtp_layers=1))
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    with pytest.raises(WeightsError, match=r"unexpected: .*layers\.7\..*see num_nextn_predict_layers"):
        load_model(tmp_path)


def test_packed_files_do_not_fit_an_unquantised_model_and_the_error_says_convert(tmp_path: Path) -> None:
    saved(tmp_path, tiny_k3(are_experts_packed=True))
    with pytest.raises(WeightsError, match=r"MXFP4 in .* and unquantised in the model; `baltoro convert`"):
        load_into(new_model(tiny_k3()).state_dict(), tmp_path)


def test_parameters_of_another_config_are_our_bug(tmp_path: Path) -> None:
    saved(tmp_path)
    params = new_model(tiny_k3()).state_dict()
    params["lora"] = torch.zeros(1)
    params["model.norm.weight"] = torch.zeros(41)
    del params["lm_head.weight"]
    expected = r"1 missing: lm_head.weight; 1 unexpected: lora; 1 misshapen: model.norm.weight \[41\] instead of \[40\]"
    with pytest.raises(ShapeError, match=expected):
        load_into(params, tmp_path)
    with pytest.raises(ShapeError, match=expected):
        save_params(params, tiny_k3(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_folder_without_weights_or_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    with pytest.raises(WeightsError, match=f"neither {SINGLE_NAME} nor {INDEX_NAME}"):
        load_model(tmp_path)


def test_a_dtype_that_models_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'int8' is not one of bfloat16"):
        load_model(saved(tmp_path), dtype=torch.int8)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path)
    files = WeightFiles.open(tmp_path)
    pairs = files.match(tiny_k3())
    content = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(content[:-1])
    last = pairs[-1][1]
    with weights.TensorReader() as reader, pytest.raises(WeightsError, match=f"ends inside {last.name}"):
        reader.read(last)


# ---- memory ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_holds_at_most_one_tensor_beside_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tiny_k3(vocab_size=6000)  # embedding and head: 960,000 bytes each in fp32, the rest less
    saved(tmp_path, config)
    entries = WeightFiles.open(tmp_path).entries
    largest = max(entry.num_bytes for entry in entries.values())
    assert sum(entry.num_bytes for entry in entries.values()) > 2.5 * largest
    params = new_model(config, dtype=dtype).state_dict()
    load_into(params, tmp_path)  # imports and caches of the first time do not count
    tracemalloc.start()
    load_into(params, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    books = 600_000  # names and offsets
    assert peak < (largest if dtype == torch.bfloat16 else 0) + books


MEASURE = """
import sys, torch
from pathlib import Path
from baltoro.model.weights import load_model, save_model
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
load_model(sys.argv[1])
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
model = load_model(sys.argv[2], dtype=torch.bfloat16)
loaded = status("VmHWM") - before
save_model(model, sys.argv[3])
print(loaded, status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_resident_memory_is_model_plus_one_tensor(tmp_path: Path) -> None:
    config = tiny_k3(vocab_size=300_000)  # embedding and head: 48 MB each in fp32, 24 MB in the model
    saved(tmp_path / "small")
    saved(tmp_path / "large", config)
    folders = [str(tmp_path / name) for name in ("small", "large", "copy")]
    done = subprocess.run([sys.executable, "-c", MEASURE, *folders], capture_output=True, text=True, check=True)
    loaded, after_save = map(int, done.stdout.split())
    model, tensor, slack = 48_000_000 + 2_000_000, 48_000_000, 10_000_000
    assert loaded < model + tensor + slack
    assert after_save < model + tensor + slack
