"""One optimizer step: forward, backward, clip, update, rebalance. And the objective that evaluation shares.

Denominators are those of the whole step, one per loss, known before the first backward: splitting a step into
micro-batches changes nothing but rounding. A step is launched without waiting for the device: what it did is read
later (`record.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.model.context import FakeQuant
from baltoro.model.decoder import K3Model
from baltoro.model.mtp import predict_ahead
from baltoro.trainer.loss import token_losses, weighted_sum
from baltoro.trainer.prepare import Prepared, prepare
from baltoro.trainer.qat import fake_quant
from baltoro.trainer.record import Pending, StepRecord, read_records, source_sums
from baltoro.trainer.run import Run
from baltoro.trainer.sample import MicroBatch
from baltoro.trainer.schedule import lr_factor


def objective(model: K3Model, batch: MicroBatch | Prepared, quant: FakeQuant) -> tuple[Tensor, Tensor]:
    """(losses [T] of the next token, sum of the MTP losses), weighted by the batch's weights in both."""
    if isinstance(batch, MicroBatch):
        batch = prepare(batch, model.config).to(model.device)
    ctx = batch.context(quant)
    hidden = model.hidden(ctx)
    losses = token_losses(model.logits(hidden), batch.targets)
    ahead = losses.new_zeros(())
    if batch.ahead:
        layers = model.model.layers[model.config.num_layers :]
        guesses = predict_ahead(layers, ctx, hidden, batch.next_tokens)
        for logits, (targets, weights) in zip(guesses, batch.ahead, strict=True):
            ahead = ahead + weighted_sum(token_losses(logits, targets), weights)
    return losses, ahead


def train_step(run: Run) -> StepRecord:
    """Move `run` by one step and wait for what it did."""
    return read_records([launch_step(run)])[0]


def launch_step(run: Run) -> Pending:
    """Move `run` by one step; the device may still be at it when this returns."""
    config, stage = run.config, run.config.stage(run.step)
    work, device = run.feed.take(run.step), torch.device(config.device)
    sums, aheads = [], []
    with run.balancer.watching(), run.qk_clip.watching():
        for batch in (one.to(device) for one in work.batches):
            found, ahead = objective(run.worker, batch, fake_quant(stage))
            loss = weighted_sum(found, batch.weights) / work.total + config.loss.mtp * ahead / work.ahead_total
            loss.backward()  # type: ignore[no-untyped-call]
            sums.append(source_sums(batch, found.detach()))
            aheads.append(ahead.detach())
    run.collect_gradients()
    grad_norm = _clip_gradients(run)
    factor = lr_factor(run.step, config.steps, config.optim) * run.ramp()
    for optimizer, lr in ((run.muon, config.optim.lr), (run.adam, config.optim.adam_lr or config.optim.lr)):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    max_logit, loads = run.qk_clip.apply(), run.balancer.update()
    run.publish()
    tokens = sum(batch.num_tokens for batch in work.batches)
    run.step, run.tokens = run.step + 1, run.tokens + tokens
    singles = torch.stack(
        [value.to(device, torch.float64) for value in (torch.stack(aheads).sum(), grad_norm, max_logit)]
    )
    return Pending(
        step=run.step,
        stage=config.stage_index(run.step - 1),
        tokens=tokens,
        lr=config.optim.lr * factor,
        ahead_total=work.ahead_total,
        sources=work.batches[0].sources,
        source_weights=tuple(map(sum, zip(*(batch.source_weights for batch in work.batches), strict=True))),
        routers=tuple(loads),
        numbers=torch.cat([singles, torch.stack(sums).sum(0), *(load.view(1) for load in loads.values())]),
    )


def _clip_gradients(run: Run) -> Tensor:
    """Norm of all gradients before clipping. What Muon sees is normalised anyway, so this guards AdamW's part."""
    limit = run.config.optim.max_grad_norm
    return torch.nn.utils.clip_grad_norm_(run.masters, torch.inf if limit is None else limit)
