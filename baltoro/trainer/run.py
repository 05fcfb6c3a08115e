"""Run: everything of a training run that moves, in one place: model, optimizers, balancer, clip, data, step number.

In: a TrainConfig. Out: an object that `step.py` moves by one optimizer step, and that a checkpoint can hold.
A bfloat16 run computes on a bf16 copy of the model (`worker`) and moves float32 masters (`model`); otherwise the two
are one object.
Invariants: `state()` holds all that decides the next step; training draws no random number after the weights are
drawn, so there is no generator to save. Single writer: `step.train_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.trainer.balance.balancer import Balancer
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.data import Mixture
from baltoro.trainer.feed import Feed
from baltoro.trainer.optim.groups import build_optimizers
from baltoro.trainer.optim.muon import Muon
from baltoro.trainer.optim.qk_clip import QKClip
from baltoro.trainer.start_from import fill_from

# Steps over which the rate rises again after a resume that lost the optimizers' moments (their memory is about 20).
RAMP_STEPS = 20
MASTER_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(slots=True)
class Run:
    """See the module docstring. `step` steps are done; `tokens` tokens were read in them.

    masters, copies   parameters of `model` and of `worker`, in the same order
    restarted_at      the step from which the optimizers began anew, if they did (`compact.py`)
    """

    config: TrainConfig
    model: K3Model
    worker: K3Model
    muon: Muon
    adam: torch.optim.AdamW
    balancer: Balancer
    qk_clip: QKClip
    feed: Feed
    masters: list[nn.Parameter]
    copies: list[nn.Parameter]
    step: int = 0
    tokens: int = 0
    restarted_at: int | None = None

    @staticmethod
    def create(config: TrainConfig) -> Run:
        """A run before its first step: weights drawn from the seed or read from a model folder, data opened."""
        names = {name for stage in config.stages for name in stage.mix}
        unit = max(stage.max_length for stage in config.stages)
        mixture = Mixture.open(config.data.folder, "train", names, unit_tokens=unit, seed=config.seed)
        model = new_model(
            config.model, dtype=MASTER_DTYPES[config.dtype], device=config.device, seed=config.seed, std=config.init_std
        )
        if config.init_from is not None:
            fill_from(model, config.init_from)
        muon, adam = build_optimizers(model, config.optim)
        worker = model
        if config.dtype == "bfloat16":
            worker = K3Model(config.model, torch.bfloat16, config.device)
        balancer = Balancer(model, config.balance, watched=worker)
        clip = QKClip(model, config.optim.qk_clip, watched=worker)
        masters, copies = list(model.parameters()), list(worker.parameters())
        run = Run(config, model, worker, muon, adam, balancer, clip, Feed(config, mixture), masters, copies)
        run.publish()
        return run

    def collect_gradients(self) -> None:
        """Hand the worker's gradients to the masters."""
        if self.worker is self.model:
            return
        found: list[Tensor] = []
        into: list[Tensor] = []
        for master, copy in zip(self.masters, self.copies, strict=True):
            if copy.grad is not None:
                master.grad = torch.empty_like(master)
                found.append(copy.grad)
                into.append(master.grad)
                copy.grad = None
        torch._foreach_copy_(into, found)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the worker, after a step or a load."""
        if self.worker is not self.model:
            torch._foreach_copy_(list[Tensor](self.copies), list[Tensor](self.masters))

    def ramp(self) -> float:
        """Factor on the learning rate: below 1 only for the first steps after the optimizers began anew."""
        if self.restarted_at is None:
            return 1.0
        return min(1.0, (self.step - self.restarted_at + 1) / RAMP_STEPS)

    def state(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "data": self.feed.state(),
            "restarted_at": self.restarted_at,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.feed.load_state(state["data"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.restarted_at = state.get("restarted_at")
        self.publish()

    @torch.no_grad()
    def restart(self, place: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Go on from weights alone, flat and by name: the optimizers begin anew, and the rate rises again."""
        own = self.model.tensors()
        for name, tensor in own.items():
            tensor.copy_(tensors[name].view(tensor.shape))
        self.muon.state.clear()
        self.adam.state.clear()
        self.feed.load_state(place["data"])
        self.step, self.tokens = place["step"], place["tokens"]
        self.restarted_at = self.step
        self.publish()
