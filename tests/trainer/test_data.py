"""Corpora on disk and the order in which they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baltoro.errors import ConfigError
from baltoro.trainer.config import StageConfig
from baltoro.trainer.corpus import Document, Manifest, open_corpus, read_manifest, write_corpus, write_manifest
from baltoro.trainer.data import Mixture, Reader
from baltoro.trainer.sample import TrainSample
from tests.trainer.harness import VOCAB, make_data, random_documents

STAGE = StageConfig(until=1.0, max_length=24, mix={"prose": 0.75, "talk": 0.25})


def open_mixture(folder: Path, seed: int = 1) -> Mixture:
    return Mixture.open(folder, "train", {"prose", "talk"}, unit_tokens=48, seed=seed)


def ids(samples: list[TrainSample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def take(mixture: Mixture, count: int, stage: StageConfig = STAGE) -> list[TrainSample]:
    found = [mixture.take(stage, 10_000) for _ in range(count)]
    assert all(sample is not None for sample in found)
    return [sample for sample in found if sample is not None]


def test_files_give_the_documents_back(tmp_path: Path) -> None:
    documents = random_documents(5, (3, 9), seed=3, weighted=True)
    entry = write_corpus(tmp_path, "x", "train", documents, vocab_size=VOCAB, is_divisible=False)
    corpus = open_corpus(tmp_path, entry)
    for n, document in enumerate(documents):
        first, last = int(corpus.offsets[n]), int(corpus.offsets[n + 1])
        assert corpus.tokens[first:last].tolist() == list(document.ids)
        assert corpus.weights is not None and corpus.weights[first:last].tolist() == list(document.weights or ())


def test_large_vocabularies_take_wider_ids(tmp_path: Path) -> None:
    entry = write_corpus(tmp_path, "x", "train", [Document([163_583, 1])], vocab_size=163_840, is_divisible=True)
    assert entry.dtype == "uint32" and open_corpus(tmp_path, entry).tokens.tolist() == [163_583, 1]


def test_manifest_comes_back_and_missing_data_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="builder"):
        read_manifest(tmp_path)
    entry = write_corpus(tmp_path, "x", "eval", random_documents(2, (4, 5), seed=0), vocab_size=9999, is_divisible=True)
    manifest = Manifest(vocab_size=9999, corpora=(entry,), builder="python b.py")
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    with pytest.raises(ConfigError, match=r"it has x \(eval\)"):
        manifest.entry("x", "train")


def test_files_that_disagree_with_the_manifest_are_refused(tmp_path: Path) -> None:
    entry = write_corpus(
        tmp_path, "x", "train", random_documents(2, (4, 5), seed=0), vocab_size=99999, is_divisible=True
    )
    with (tmp_path / "x.train.tokens.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ConfigError, match="build the data folder again"):
        open_corpus(tmp_path, entry)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        write_corpus(tmp_path, "x", "train", [Document([0, 7])], vocab_size=7, is_divisible=True)


def test_targets_are_the_next_tokens_of_the_document_also_across_a_cut(tmp_path: Path) -> None:
    entry = write_corpus(tmp_path, "x", "train", [Document(list(range(50)))], vocab_size=50, is_divisible=True)
    reader = Reader(open_corpus(tmp_path, entry), unit_tokens=20, seed=0)
    pieces = [reader.take(8, 100) for _ in range(8)]
    firsts = sorted(int(piece.tokens[0]) for piece in pieces if piece is not None)
    assert firsts == [0, 8, 16, 20, 28, 36, 40, 48]
    assert all(piece is not None and (piece.targets == piece.tokens + 1).all() for piece in pieces)


def test_an_epoch_reads_every_token_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    entry = write_corpus(tmp_path, "x", "train", [Document(list(range(90)))], vocab_size=90, is_divisible=True)
    reader = Reader(open_corpus(tmp_path, entry), unit_tokens=10, seed=0)
    epochs: list[list[int]] = []
    for epoch in range(2):
        seen: list[int] = []
        while reader.cursor.epoch == epoch:
            sample = reader.take(7, 100)
            assert sample is not None
            seen += sample.tokens.tolist()
        epochs.append(seen)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(89))
    assert epochs[0] != epochs[1]


def test_a_curriculum_of_lengths_neither_repeats_nor_skips(tmp_path: Path) -> None:
    entry = write_corpus(tmp_path, "x", "train", [Document(list(range(200)))], vocab_size=200, is_divisible=True)
    reader = Reader(open_corpus(tmp_path, entry), unit_tokens=32, seed=0)
    seen: list[int] = []
    length = 8
    while reader.cursor.epoch == 0:
        sample = reader.take(length, 1000)
        assert sample is not None
        seen += sample.tokens.tolist()
        length = 32 if len(seen) > 90 else 8
    assert sorted(seen) == list(range(199))


def test_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    folder = make_data(tmp_path)
    first, again, other = (ids(take(open_mixture(folder, seed), 30)) for seed in (1, 1, 2))
    assert first == again and first != other


def test_state_brings_back_the_same_samples(tmp_path: Path) -> None:
    folder = make_data(tmp_path)
    mixture = open_mixture(folder)
    take(mixture, 23)
    state = mixture.state()
    rest = ids(take(mixture, 60))  # past the end of the epoch
    other = open_mixture(folder)
    other.load_state(state)
    assert ids(take(other, 60)) == rest


def test_state_of_other_corpora_is_refused(tmp_path: Path) -> None:
    mixture = open_mixture(make_data(tmp_path))
    with pytest.raises(ConfigError, match="corpora"):
        mixture.load_state({"cursors": {"prose": [0, 0, 0]}, "credits": {}})


def test_shares_of_tokens_come_out_as_asked(tmp_path: Path) -> None:
    samples = take(open_mixture(make_data(tmp_path)), 400)
    counts = {name: sum(len(s) for s in samples if s.source == name) for name in ("prose", "talk")}
    assert counts["prose"] / sum(counts.values()) == pytest.approx(0.75, abs=0.01)


def test_dialogues_are_never_cut(tmp_path: Path) -> None:
    folder = make_data(tmp_path)
    wanted = {tuple(d.ids[:-1]) for d in random_documents(40, (9, 25), seed=0, weighted=True)}
    stage = StageConfig(until=1.0, max_length=4, mix={"talk": 1.0})
    mixture = Mixture.open(folder, "train", {"talk"}, unit_tokens=4, seed=1)
    assert {tuple(sample) for sample in ids(take(mixture, 40, stage))} == wanted


def test_weights_belong_to_the_targets(tmp_path: Path) -> None:
    document = Document([5, 6, 7, 8], [0, 0, 1, 0])
    entry = write_corpus(tmp_path, "x", "train", [document], vocab_size=9, is_divisible=False)
    sample = Reader(open_corpus(tmp_path, entry), unit_tokens=4, seed=0).take(9, 9)
    assert sample is not None and sample.weights.tolist() == [0.0, 1.0, 0.0] and sample.targets.tolist() == [6, 7, 8]


def test_a_sample_that_does_not_fit_stays(tmp_path: Path) -> None:
    mixture = open_mixture(make_data(tmp_path))
    before = mixture.state()
    assert mixture.take(STAGE, 3) is None
    assert mixture.state() == before
    assert np.isfinite(take(mixture, 1)[0].weights.numpy()).all()
