"""One optimizer step of a policy: packed micro-batches, logprobs with the adapter, loss, backward, clip, AdamW.

In: a frozen model with an AdapterBank, samples of a step. Out: the adapter moved in place, and a record for the log.
Invariants: denominators are the whole step's and known before the first backward, so gradients are the same, up to
rounding, for every split into micro-batches; only rows that count get logits; a step that counts no token, or has no
gradient, changes nothing and says so; the base is never written and has no gradients.
A bfloat16 bank has float32 masters here; otherwise bank and masters are the same tensors.
Source: spec/training.md A.2, A.8 (probes), C.1.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.errors import InvariantError
from baltoro.kernels.precision import acc_dtype
from baltoro.model.adapter import Adapter
from baltoro.model.context import FakeQuant, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import AdapterBank, add_adapters
from baltoro.model.routes import Routes
from baltoro.trainer.aggregate import Totals, mean_log_ratios, row_weights
from baltoro.trainer.policy_config import FactorOptim, PolicyConfig
from baltoro.trainer.policy_loss import policy_terms
from baltoro.trainer.policy_sample import PolicyBatch, PolicySample, Replayed, pack_policy, replayed
from baltoro.trainer.ratio import Drift, drift, reference_kl, tis_weights

SLOT = 1


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """What a step did.

    drift   the engine's logprobs against the trainer's before the update, of tokens that this version sampled
    ratio   the same of all counted tokens: with older ones among them, how far the policy has moved since
    num_grads   factors with a gradient that is not zero, of `num_factors`; clip_low, clip_high: shares of tokens
    probe   largest change of the B factor with the largest gradient: it must move where the rate is not 0
    replayed    how far the engine's routes were replayed; all 0 where they are not
    """

    loss: float
    tokens: int
    trajectories: int
    drift: Drift
    ratio: Drift
    clip_low: float
    clip_high: float
    grad_norm: float
    num_grads: int
    num_factors: int
    probe: float
    lr: float
    tis_cut: float = 0.0
    replayed: Replayed = field(default_factory=Replayed)


class PolicyTrainer:
    """The adapter in training. Single writer: the loop that owns it."""

    def __init__(
        self,
        model: K3Model,
        adapter: Adapter,
        loss: PolicyConfig,
        optim: FactorOptim,
        micro_tokens: int,
        quant: FakeQuant | None = None,
    ) -> None:
        """`quant`: rounding of what the routed experts read; the engine's, or the two are not one policy."""
        self.model = model.requires_grad_(False)
        self.quant = quant or FakeQuant()
        self.loss, self.optim, self.micro_tokens = loss, optim, micro_tokens
        has_experts = any(".experts." in module for module in adapter.factors)
        self.bank: AdapterBank = add_adapters(model, 1, adapter.rank, has_experts=has_experts)
        self._template = adapter
        self.bank.install(SLOT, adapter)
        self.factors = [p for module in adapter.factors for p in _pair(self.bank, module)]
        self.masters = [_master(p) for p in self.factors]
        for parameter in self.factors:
            parameter.requires_grad_(True)
        self.adam = torch.optim.AdamW(
            self.masters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        self.steps = 0

    # ---- the adapter ---------------------------------------------------------------------------------------------
    def adapter(self) -> Adapter:
        """A copy of what it is now."""
        return self.bank.read(SLOT, self._template)

    @torch.no_grad()
    def install(self, adapter: Adapter) -> None:
        """Make it another one of the same shape; the optimizer's state stays."""
        self.bank.install(SLOT, adapter)
        for master, factor in zip(self.masters, self.factors, strict=True):
            if master is not factor:
                master.copy_(factor)

    @property
    def norm(self) -> float:
        """Root of the sum of squares of all B: 0 where it changes nothing."""
        with torch.no_grad():
            return math.sqrt(float(torch.stack([b.double().square().sum() for b in self.factors[1::2]]).sum()))

    # ---- forwards ------------------------------------------------------------------------------------------------
    def logprobs(self, batch: PolicyBatch, *, has_adapter: bool = True, routes: Routes | None = None) -> Tensor:
        """Of the targets of the counted rows: [M] in the accumulate dtype, of the model's own distribution. `routes`,
        or else the batch's if it has any, are replayed; the batch's not without the adapter, since they are the
        policy's, not the base's."""
        adapters = (SLOT,) * len(batch.lengths) if has_adapter else None
        if routes is None and has_adapter:
            routes = batch.routes
        ctx = train_context(batch.tokens, batch.lengths, adapters=adapters, fake_quant=self.quant, routes=routes)
        hidden = self.model.hidden(ctx)
        logits = self.model.logits(hidden[batch.rows])
        logits = logits.to(acc_dtype(logits.dtype))
        return logits.gather(-1, batch.targets[:, None])[:, 0] - logits.logsumexp(-1)

    @torch.no_grad()
    def score(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        has_adapter: bool = True,
        routes: Routes | None = None,
    ) -> list[float]:
        """Logprobs of `output` after `prompt`; `routes` of these ids are replayed, or written (`Routes.recorded`)."""
        flags, zeros = (True,) * len(output), (0.0,) * len(output)
        sample = PolicySample((*prompt, *output), len(prompt), flags, zeros, 0.0)
        batch = pack_policy([sample], len(sample))[0].to(self.model.device)
        found: list[float] = self.logprobs(batch, has_adapter=has_adapter, routes=routes).tolist()
        return found

    @torch.no_grad()
    def effect(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[list[float], list[float]]:
        """(base, with the adapter): logprobs of `output`, both through the experts that the base's routers take. So a
        change too small to matter cannot look large by tipping a router over."""
        routes = Routes.recorded(len(prompt) + len(output), self.model.config, self.model.device)
        base = self.score(prompt, output, has_adapter=False, routes=routes)
        assert routes.taken is not None
        return base, self.score(prompt, output, routes=Routes.of(routes.taken))

    # ---- a step --------------------------------------------------------------------------------------------------
    def step(self, samples: Sequence[PolicySample]) -> PolicyRecord | None:
        """Move the adapter by one step; None where no token counts, and then nothing moved."""
        packed = pack_policy(samples, self.micro_tokens, self.model.config)
        batches = [batch.to(self.model.device) for batch in packed]
        if not batches:
            return None
        lengths = torch.tensor([sample.num_counted for sample in samples], device=self.model.device)
        of_step = Totals(lengths)
        parts = [self._backward(batch, of_step) for batch in batches]
        sizes = self._collect()
        probed = max(range(1, len(sizes), 2), key=sizes.__getitem__)  # the B with the largest gradient
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.optim.max_grad_norm or math.inf)
        if not math.isfinite(float(norm)):
            raise InvariantError(f"the gradient's norm is {float(norm)}: the step was not taken")
        num_grads = sum(size > 0.0 for size in sizes)
        before = self.masters[probed].detach().clone()
        lr = self._update() if num_grads else self._skip()
        return PolicyRecord(
            loss=sum(part.loss for part in parts),
            tokens=of_step.tokens,
            trajectories=of_step.trajectories,
            drift=sum((part.drift for part in parts), Drift()),
            ratio=sum((part.ratio for part in parts), Drift()),
            clip_low=sum(part.num_low for part in parts) / of_step.tokens,
            clip_high=sum(part.num_high for part in parts) / of_step.tokens,
            grad_norm=float(norm),
            num_grads=num_grads,
            num_factors=len(self.masters),
            probe=float((self.masters[probed].detach() - before).abs().max()),
            lr=lr,
            tis_cut=sum(part.num_cut for part in parts) / of_step.tokens,
            replayed=sum((part.replayed for part in parts), Replayed()),
        )

    def _backward(self, batch: PolicyBatch, of_step: Totals) -> _Part:
        """Forward and backward of one micro-batch; gradients add up in the factors."""
        config, mask = self.loss, batch.mask
        now = self.logprobs(batch)
        old = batch.old if config.old == "engine" else now.detach()
        mean = None
        if config.form == "by_trajectory":
            mean = mean_log_ratios(now, old, mask, batch.trajectory, of_step)
        terms = policy_terms(config, now, old, batch.advantages, mask, mean_log_ratio=mean)
        losses, num_cut = terms.losses, 0
        if config.tis_high is not None:
            weights, num_cut = tis_weights(now, batch.old, mask, high=config.tis_high, low=config.tis_low)
            losses = losses * weights
        if config.reference_kl:
            with torch.no_grad():
                base = self.logprobs(batch, has_adapter=False)
            losses = losses + config.reference_kl * reference_kl(now, base, mask)
        shares = row_weights(mask, batch.trajectory, of_step, config.aggregation, fixed_length=config.fixed_length)
        loss = (losses.double() * shares).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        same, ratio = drift(now.detach(), batch.old, batch.is_fresh), drift(now.detach(), batch.old, mask)
        num_low, num_high = int(terms.is_low.sum()), int(terms.is_high.sum())
        return _Part(float(loss.detach()), same, ratio, num_low, num_high, num_cut, replayed(batch))

    def _collect(self) -> list[float]:
        """Gradients of the factors to their masters; returns the largest element of each, all read at once.

        Errors: InvariantError where no gradient reached a factor. That is no gradient of 0: something in the forward
        cut the graph, and a part of the adapter would never be trained.
        """
        cut = sum(factor.grad is None for factor in self.factors)
        if cut:
            raise InvariantError(
                f"no gradient reached {cut} of {len(self.factors)} factors: an operation of the forward has no backward"
            )
        for master, factor in zip(self.masters, self.factors, strict=True):
            if master is not factor and factor.grad is not None:
                master.grad, factor.grad = factor.grad.to(master.dtype), None
        zero = self.masters[0].new_zeros(())
        sizes = [zero if m.grad is None else m.grad.abs().amax() for m in self.masters]
        found: list[float] = torch.stack(sizes).tolist()
        return found

    def _skip(self) -> float:
        """All advantages were 0: AdamW's momentum would go on moving a policy about which nothing was learnt."""
        self.adam.zero_grad(set_to_none=True)
        return 0.0

    def _update(self) -> float:
        lr = self.optim.lr * min(1.0, (self.steps + 1) / max(1, self.optim.warmup_steps))
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.steps += 1
        with torch.no_grad():
            for master, factor in zip(self.masters, self.factors, strict=True):
                if master is not factor:
                    factor.copy_(master)
        return lr

    def release(self) -> None:
        """Let go of the model, whose weights may be an engine's that is about to free them. Nothing but the adapter is
        left; may be called twice."""
        self.__dict__.pop("model", None)
        gc.collect()

    # ---- checkpoint ----------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Tensors and plain values: everything that decides the next step."""
        masters = [master.detach() for master in self.masters]
        return {"masters": masters, "adam": self.adam.state_dict(), "steps": self.steps}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        for master, factor, saved in zip(self.masters, self.factors, state["masters"], strict=True):
            master.copy_(saved)
            factor.copy_(master)
        self.adam.load_state_dict(state["adam"])
        self.steps = state["steps"]


@dataclass(frozen=True, slots=True)
class _Part:
    loss: float
    drift: Drift
    ratio: Drift
    num_low: int
    num_high: int
    num_cut: int
    replayed: Replayed


def _pair(bank: AdapterBank, module: str) -> Iterable[nn.Parameter]:
    return bank.factors[module].a, bank.factors[module].b


def _master(factor: nn.Parameter) -> nn.Parameter:
    if factor.dtype in (torch.float32, torch.float64):
        return factor
    return nn.Parameter(factor.detach().float())
