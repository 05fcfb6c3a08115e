"""Sizes: the published numbers, worked small cases, and what a real model weighs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.errors import ConfigError
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.names import param_specs
from baltoro.model.sizes import fit, measure
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3, tiny_kimi_linear


def test_the_published_numbers(k3_data: Path) -> None:
    sizes = measure(K3Config.load(k3_data), tp=8)
    assert sizes.recurrent_bytes_per_request == 69 * 96 // 8 * 128 * 128 * 4 == 54_263_808
    assert sizes.conv_bytes_per_request == 69 * 3 * 4608 * 2
    assert sizes.kv_bytes_per_token == 24 * 576 * 2 == 27_648
    assert sizes.text_parameters == 2_779_484_478_208
    assert round(sizes.active_parameters_without_embedding / 1e9, 1) == 104.2
    assert round(sizes.active_parameters / 1e9, 1) == 105.4
    assert round(sizes.vision_parameters / 1e6, 1) == 447.4
    assert (sizes.num_tensors, sizes.file_bytes) == (497_220, 1_560_860_324_864)


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_ranks_together_hold_the_model_and_what_is_replicated(k3_data: Path, tp: int) -> None:
    config = K3Config.load(k3_data)
    one, many = measure(config), measure(config, tp=tp)
    replicated = sum(spec.num_bytes for spec in param_specs(config) if spec.rule == "replicated")
    assert many.weight_bytes_per_rank * tp == one.weight_bytes_per_rank + (tp - 1) * replicated
    assert many.recurrent_bytes_per_request * tp == one.recurrent_bytes_per_request
    assert many.conv_bytes_per_request * tp == one.conv_bytes_per_request
    assert many.kv_bytes_per_token == one.kv_bytes_per_token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "config",
    [
        tiny_k3(), tiny_k3(are_experts_packed=True), tiny_k3(num_mtp_layers=1), tiny_kimi_linear(),
        tiny_k3(tie_word_embeddings=True), tiny_k3(num_experts=0, num_active_experts=0),
    ],
    ids=["k3", "packed", "mtp", "kimi-linear", "tied", "dense"],
)  # fmt: skip
def test_bytes_are_those_of_a_real_model_and_its_files(tmp_path: Path, config: K3Config, dtype: str) -> None:
    model = new_model(config.with_(dtype=dtype), dtype=getattr(torch, dtype))
    sizes = measure(model.config)
    assert sizes.weight_bytes_per_rank == sum(t.nbytes for t in model.state_dict().values())
    save_model(model, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert sizes.file_bytes == len(data) - 8 - int.from_bytes(data[:8], "little")


def test_parameters_are_counted_once_whatever_their_form() -> None:
    config = tiny_k3(vision=None, num_mtp_layers=1)
    model = new_model(config)
    padding = 4 * 5  # four KDA layers store A_log of 3 heads in 8 places
    mtp = sum(p.numel() for name, p in model.named_parameters() if ".layers.7." in name)
    total = sum(p.numel() for p in model.parameters())
    for packed in (False, True):
        sizes = measure(config.with_(are_experts_packed=packed))
        assert sizes.mtp_parameters == mtp
        assert sizes.text_parameters == total - mtp + padding


def test_active_parameters_are_all_but_the_experts_that_are_not_picked() -> None:
    sizes = measure(tiny_k3())
    idle = 6 * (11 - 3) * 3 * 64 * 32  # MoE layers x experts not picked x matrices x F x M
    assert sizes.active_parameters == sizes.text_parameters - idle
    assert sizes.active_parameters_without_embedding == sizes.active_parameters - 131 * 40


def test_a_tied_table_is_active_because_it_is_the_head() -> None:
    sizes = measure(tiny_k3(tie_word_embeddings=True))
    assert sizes.active_parameters_without_embedding == sizes.active_parameters
    assert sizes.active_parameters == measure(tiny_k3()).active_parameters - 131 * 40


def test_a_small_cache_worked_by_hand() -> None:
    sizes = measure(tiny_k3(dtype="bfloat16"), tp=1)
    assert sizes.recurrent_bytes_per_request == 4 * 3 * 8 * 8 * 4  # layers x H x V x K x fp32
    assert sizes.conv_bytes_per_request == 4 * 3 * 3 * 24 * 2  # layers x taps before x streams x H*K x bf16
    assert sizes.kv_bytes_per_token == 3 * (14 + 6) * 2
    assert sizes.state_bytes_per_request == 3072 + 1728
    assert sizes.request_bytes(10) == 4800 + 10 * 120


def test_state_stays_wide_and_grows_only_in_a_float64_model() -> None:
    states = {d: measure(tiny_k3(dtype=d)).recurrent_bytes_per_request for d in ("bfloat16", "float32", "float64")}
    assert states == {"bfloat16": 3072, "float32": 3072, "float64": 6144}


def test_flops_worked_by_hand() -> None:
    sizes = measure(tiny_k3())
    recurrence = 4 * (7 * 3 * 8 * 8 + 3 * 2 * 4 * 24)
    assert sizes.flops_per_token == 2 * sizes.active_parameters_without_embedding + recurrence
    assert sizes.flops_per_context_token == 3 * 2 * 5 * (18 + 10)


def test_what_fits_is_used_up_to_less_than_one_more() -> None:
    sizes = measure(tiny_k3())
    memory = sizes.weight_bytes_per_rank + 1_000_000
    room = fit(sizes, memory, contexts=(1, 100, 10_000))
    assert room.free_bytes == 1_000_000 and room.max_tokens is not None
    assert sizes.request_bytes(room.max_tokens) <= 1_000_000 < sizes.request_bytes(room.max_tokens + 1)
    for length, count in room.max_requests:
        assert count * sizes.request_bytes(length) <= 1_000_000 < (count + 1) * sizes.request_bytes(length)


def test_nothing_fits_beside_weights_that_are_too_large() -> None:
    sizes = measure(tiny_k3())
    room = fit(sizes, sizes.weight_bytes_per_rank - 7, contexts=(1,))
    assert (room.free_bytes, room.max_tokens, room.max_requests) == (-7, 0, ((1, 0),))
    room = fit(sizes, sizes.weight_bytes_per_rank + 7, contexts=(1,))
    assert (room.free_bytes, room.max_tokens, room.max_requests) == (7, 0, ((1, 0),))


def test_a_model_without_mla_has_no_cost_per_token() -> None:
    sizes = measure(tiny_k3(mla_layers=()))
    assert sizes.kv_bytes_per_token == 0
    assert fit(sizes, 10**9).max_tokens is None
    assert fit(sizes, 0).max_tokens == 0


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="5 heads do not divide over 3 ranks"):
        measure(tiny_k3(), tp=3)
