"""Loss on the held-out part of the corpora, always on the same tokens.

In: a run. Out: nats per counted token by corpus. Nothing of the run moves: observers are off, cursors are others.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from baltoro.trainer.data import Mixture
from baltoro.trainer.pack import fill
from baltoro.trainer.prepare import prepare
from baltoro.trainer.qat import fake_quant
from baltoro.trainer.record import mean_loss, source_sums
from baltoro.trainer.run import Run
from baltoro.trainer.step import objective


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Corpus -> loss, under the fake quantisation and the mix of the stage that was last trained."""
    config = run.config
    stage = config.stage(max(0, run.step - 1))
    found = {}
    unit = max(s.max_length for s in config.stages)
    for name in sorted(stage.mix):
        mixture = Mixture.open(config.data.folder, "eval", {name}, unit_tokens=unit, seed=config.seed)
        alone = replace(stage, mix={name: 1.0})
        tokens, total, device = 0, 0.0, torch.device(config.device)
        sums = torch.zeros(1, dtype=torch.float64, device=device)
        while tokens < config.eval.tokens:
            batch = prepare(fill(mixture, alone, config.batch.micro_tokens), config.model, [name]).to(device)
            sums += source_sums(batch, objective(run.worker, batch, fake_quant(stage))[0])
            tokens, total = tokens + batch.num_tokens, total + batch.total_weight
        found[name] = sums, total
    return {name: mean_loss(sums.tolist(), [total]) for name, (sums, total) in found.items()}
