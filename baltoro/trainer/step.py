"""One optimizer step: forward, backward, clip, update, rebalance. And the objective that evaluation shares.

Denominators are those of the whole step, one per loss, known before the first backward: splitting a step into
micro-batches changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.model.context import FakeQuant, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.mtp import predict_ahead
from baltoro.trainer.loss import token_losses, weighted_sum
from baltoro.trainer.media import media_of
from baltoro.trainer.pack import step_batches
from baltoro.trainer.qat import fake_quant
from baltoro.trainer.run import Run
from baltoro.trainer.sample import MicroBatch
from baltoro.trainer.schedule import lr_factor


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did, for the log. Losses are means in nats per counted token; `sources` by corpus."""

    step: int
    stage: int
    tokens: int
    loss: float
    mtp_loss: float
    sources: dict[str, float]
    lr: float
    grad_norm: float
    max_logit: float
    loads: dict[str, float]


def objective(model: K3Model, batch: MicroBatch, quant: FakeQuant) -> tuple[Tensor, Tensor]:
    """(losses [T] of the next token, sum of the MTP losses), weighted by the batch's weights in both."""
    media = media_of(batch, model.config)
    ctx = train_context(batch.tokens, batch.lengths, fake_quant=quant, media=media)
    hidden = model.hidden(ctx)
    losses = token_losses(model.logits(hidden), batch.targets)
    depth = model.config.num_mtp_layers
    ahead = losses.new_zeros(())
    if depth:
        layers = model.model.layers[model.config.num_layers :]
        next_tokens = tuple(batch.ahead(s)[0].clamp(min=0) for s in range(depth))
        for s, logits in enumerate(predict_ahead(layers, ctx, hidden, next_tokens)):
            targets, weights = batch.ahead(s + 1)
            ahead = ahead + weighted_sum(token_losses(logits, targets), weights)
    return losses, ahead


def train_step(run: Run) -> StepRecord:
    """Move `run` by one step."""
    config, stage = run.config, run.config.stage(run.step)
    device = torch.device(config.device)
    batches = [batch.to(device) for batch in step_batches(run.mixture, stage, config.batch)]
    total, mtp_total = _denominators(batches, config.model.num_mtp_layers)
    losses, mtp_loss = [], 0.0
    with run.balancer.watching(), run.qk_clip.watching():
        for batch in batches:
            found, ahead = objective(run.worker, batch, fake_quant(stage))
            loss = weighted_sum(found, batch.weights) / total + config.loss.mtp * ahead / mtp_total
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(found.detach())
            mtp_loss += float(ahead.detach()) / mtp_total
    run.collect_gradients()
    grad_norm = _clip_gradients(run)
    factor = lr_factor(run.step, config.steps, config.optim)
    for optimizer, lr in ((run.muon, config.optim.lr), (run.adam, config.optim.adam_lr or config.optim.lr)):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    max_logit, loads = run.qk_clip.apply(), run.balancer.update()
    run.publish()
    tokens = sum(batch.num_tokens for batch in batches)
    run.step, run.tokens = run.step + 1, run.tokens + tokens
    mean, sources = mean_losses(batches, losses)
    return StepRecord(
        step=run.step,
        stage=config.stage_index(run.step - 1),
        tokens=tokens,
        loss=mean,
        mtp_loss=mtp_loss,
        sources=sources,
        lr=config.optim.lr * factor,
        grad_norm=grad_norm,
        max_logit=max_logit,
        loads=loads,
    )


def mean_losses(batches: Sequence[MicroBatch], losses: Sequence[Tensor]) -> tuple[float, dict[str, float]]:
    """Mean loss per counted token over everything, and of each corpus."""
    weights = torch.cat([batch.weights for batch in batches])
    flat = torch.cat(list(losses))
    sources = {}
    for name in sorted({name for batch in batches for name in batch.sources}):
        mine = weights * torch.cat([batch.source_rows(name) for batch in batches])
        if mine.any():
            sources[name] = float(weighted_sum(flat, mine) / mine.sum())
    return float(weighted_sum(flat, weights) / weights.sum().clamp(min=1.0)), sources


def _denominators(batches: Sequence[MicroBatch], depth: int) -> tuple[float, float]:
    """Weight of all targets, and of all targets of the MTP steps; at least 1, for a step that counts nothing."""
    total = sum(float(batch.weights.sum()) for batch in batches)
    ahead = sum(float(batch.ahead(s + 1)[1].sum()) for batch in batches for s in range(depth))
    return max(total, 1.0), max(ahead, 1.0)


def _clip_gradients(run: Run) -> float:
    """Norm of all gradients before clipping. What Muon sees is normalised anyway, so this guards AdamW's part."""
    limit = run.config.optim.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), torch.inf if limit is None else limit)
    return float(norm)
