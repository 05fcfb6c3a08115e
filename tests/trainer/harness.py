"""A small data folder and a small recipe."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from baltoro.trainer.config import BatchConfig, CheckpointConfig, DataConfig, EvalConfig, StageConfig, TrainConfig
from baltoro.trainer.corpus import Document, Manifest, write_corpus, write_manifest
from tests.tiny import tiny_k3

VOCAB = 131


def random_documents(count: int, lengths: tuple[int, int], *, seed: int, weighted: bool = False) -> list[Document]:
    """Documents in which each id follows from the one before it, so that there is something to learn."""
    draw = random.Random(seed)
    documents = []
    for _ in range(count):
        ids = [draw.randrange(31)]
        for _ in range(draw.randint(*lengths) - 1):
            ids.append((3 * ids[-1] + 1) % 31)
        weights = [int(i % 3 > 0) for i in range(len(ids))] if weighted else None
        documents.append(Document(ids, weights))
    return documents


def make_data(folder: Path) -> Path:
    """`prose` may be cut, `talk` may not and has weights."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for seed, split in enumerate(("train", "eval")):
        for name, lengths in (("prose", (30, 90)), ("talk", (9, 25))):
            documents = random_documents(40, lengths, seed=seed, weighted=name == "talk")
            entries.append(
                write_corpus(folder, name, split, documents, vocab_size=VOCAB, is_divisible=name == "prose")  # type: ignore[arg-type]
            )
    write_manifest(folder, Manifest(vocab_size=VOCAB, corpora=tuple(entries)))
    return folder


def tiny_recipe(folder: Path, **changes: Any) -> TrainConfig:
    """Six steps in two stages, the second one quantised, on a tiny K3 with an MTP layer."""
    mix = {"prose": 0.6, "talk": 0.4}
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": tiny_k3(num_mtp_layers=1, vision=None),
        "data": DataConfig(folder=folder),
        "stages": (
            StageConfig(until=0.5, max_length=24, mix=mix),
            StageConfig(until=1.0, max_length=48, mix=mix, quantise_weights=True, quantise_inputs=True),
        ),
        "steps": 6,
        "init_std": 0.1,
        "batch": BatchConfig(tokens=128, micro_tokens=64),
        "checkpoint": CheckpointConfig(every_s=0.0, keep=2),
        "eval": EvalConfig(every_steps=3, tokens=100),
    }
    return TrainConfig(**(fields | changes))
