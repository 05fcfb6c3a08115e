"""K3 against the independent implementation in `mlx-lm`, on the same files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.context import train_context
from baltoro.model.weights import load_model, save_model
from tests.model.harness import Harness, random_tokens
from tests.tiny import tiny_k3

mx = pytest.importorskip("mlx.core", reason="mlx is in the extra `peers`")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is in the extra `peers`")
pytestmark = pytest.mark.slow

CONFIGS = {
    "k3": tiny_k3(),
    "packed": tiny_k3(are_experts_packed=True),
    "no-gate": tiny_k3(has_mla_gate=False, q_lora_rank=None, attn_res_block_size=None),
    "whole-width": tiny_k3(latent_size=None, has_latent_norm=False, hidden_size=64, num_shared_experts=1),
}


def their_logits(folder: Path, tokens: list[int]) -> Tensor:
    """Logits of mlx-lm's model on the folder, fp32, one pass."""
    model: Any = mlx_utils.load_model(folder)[0]
    model.set_dtype(mx.float32)
    logits = model(mx.array([tokens]))
    return torch.from_numpy(np.array(logits.astype(mx.float32)))[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_same_file_same_logits(tmp_path: Path, config: K3Config) -> None:
    save_model(new_model(config, std=0.1, decay="slow", seed=2), tmp_path)
    ours = load_model(tmp_path, dtype=torch.float32)
    prompts = [random_tokens(n, config.vocab_size, seed=n) for n in (150, 65)]
    expected = [their_logits(tmp_path, prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, expected, strict=True):
        with torch.no_grad():
            got = ours(train_context(torch.tensor(prompt), (len(prompt),)))
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=0)
    for cuts in [(1,), (64, 1, 1), (100, 49), (9,) * 20, (1,) * 150]:
        torch.testing.assert_close(Harness(ours, 1).run(0, prompts[0], cuts), expected[0], atol=1e-4, rtol=0)
    harness = Harness(ours, 2)
    first = harness.step([(0, prompts[0][:80]), (1, prompts[1][:64])])
    second = harness.step([(1, prompts[1][64:]), (0, prompts[0][80:])])
    torch.testing.assert_close(torch.cat([first[0], second[1]]), expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat([first[1], second[0]]), expected[1], atol=1e-4, rtol=0)
