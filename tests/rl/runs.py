"""Runs of RL on a tiny random model: its folder, a recipe for it, and a family whose reward anything can raise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from baltoro.chat.tokenizer import Tokenizer
from baltoro.config import build
from baltoro.envs.base import Env, Reply, Score, Split, Task, infrastructure, question_task
from baltoro.envs.rewards import SingleTurn
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from baltoro.rl.recipe import RLConfig
from tests.contract.tree import ROOT
from tests.tiny import tiny_k3

MINI = ROOT / "models" / "mini"
LONG = 12  # characters that earn nothing
MODEL = tiny_k3(
    vocab_size=1280, num_layers=3, mla_layers=(1,), vision=None, bos_token_id=1024, eos_token_id=1026,
    pad_token_id=1279, media_token_id=1045,
)  # fmt: skip


def write_folder(folder: Path) -> Path:
    """The tiny model with mini's tokenizer; it says letters, and ends after some 27 of them."""
    model = new_model(MODEL, dtype=torch.float32, seed=3, std=0.1, decay="slow")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(MINI / name, folder / name)
    tokenizer = Tokenizer.load(folder)
    spoken = [tokenizer.encode(letter)[0] for letter in ascii_lowercase] + [MODEL.eos_token_id]
    with torch.no_grad():  # one coordinate is the same for every token, and so a bias of the head: 27 ids are spoken
        model.model.embed_tokens.weight[:, 0] = 9.0
        model.lm_head.weight[:, 0] = -12.0
        model.lm_head.weight[spoken, 0] = 0.0
    save_model(model, folder)
    return folder


def recipe(folder: Path, **changes: Any) -> RLConfig:
    """Two groups of four, a dozen tokens each. A key that is None is left out."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": str(folder),
        "tasks": [{"family": "arithmetic"}],
        "steps": 3,
        "threads": 1,
        "is_deterministic": True,
        "rollout": {"groups": 2, "group_size": 4, "thinking": False},
        "partial": {"max_tokens": 12},
        "adapter": {"rank": 3, "alpha": 6.0},
        "optim": {"lr": 5e-3, "micro_tokens": 512},
        "engine": {"place": "inline", "options": {"max_running": 16, "memory_bytes": 1 << 23}},
        "eval": {"every_steps": 100, "tasks": 2, "draws": 1},
        "save": {"every_steps": 1, "keep": 3},
        "checks": {"perturbation": 0.3, "max_k3": 1e-6},
    }
    for key, value in changes.items():
        fields[key] = {**fields[key], **value} if isinstance(fields.get(key), dict) else value
    return build(RLConfig, {key: value for key, value in fields.items() if value is not None})


@dataclass(frozen=True)
class Brief:
    """Reward: the less is said, the more, and 1 for nothing. Questions of `failures` cannot be judged."""

    name: str = "brief"
    failures: tuple[str, ...] = ()

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        number = 0
        while True:
            number += 1
            yield question_task(self.name, f"{split} {number % 7}", {})

    def env(self) -> Env:
        return SingleTurn(self._score)

    def reference(self, task: Task) -> Sequence[Reply]:
        return [Reply("")]

    def _score(self, reply: Reply, task: Task) -> Score:
        if task.question in self.failures:
            return infrastructure("the judge is out")
        share = max(0.0, 1.0 - len(reply.content) / LONG)
        return Score(share, "right" if share > 0.5 else "wrong", reply.content)
