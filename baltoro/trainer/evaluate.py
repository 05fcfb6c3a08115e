"""Loss on the held-out part of the corpora, always on the same tokens.

In: a run. Out: nats per counted token by corpus. Nothing of the run moves: observers are off, cursors are others.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from baltoro.trainer.data import Mixture
from baltoro.trainer.pack import fill
from baltoro.trainer.qat import fake_quant
from baltoro.trainer.run import Run
from baltoro.trainer.step import mean_losses, objective


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
        batches, losses, tokens = [], [], 0
        while tokens < config.eval.tokens:
            batch = fill(mixture, alone, config.batch.micro_tokens).to(torch.device(config.device))
            losses.append(objective(run.worker, batch, fake_quant(stage))[0])
            batches.append(batch)
            tokens += batch.num_tokens
        found[name] = mean_losses(batches, losses)[0]
    return found
