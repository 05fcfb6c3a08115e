"""Building: the same whatever the processes, carried without loss, pictures at their places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baltoro.chat.tokenizer import MEDIA_PAD, Tokenizer
from baltoro.trainer.corpus import Manifest, open_corpus, read_manifest, write_manifest
from baltoro.trainer.pictures import open_pictures, patches
from scripts.data.tiny import build, carry, jobs, vocabulary
from scripts.data.tiny.draw import HANDWRITTEN, LETTERS, Ink, Picture, draw, pack_recipes, rounded, unpack_recipes
from scripts.data.tiny.families import Context
from scripts.data.tiny.jobs import Job, Workshop

TEXTS = {("prose", "train"): ["One text.", "Another text, 123 words long."], ("prose", "eval"): ["A third."]}
JOBS = [Job("prose", "train", 0, 2), Job("arithmetic", "train", 0, 12), Job("digits", "train", 0, 6)]


@pytest.fixture(scope="module")
def stock() -> Ink:
    draw_from = np.random.default_rng(0)
    glyphs = draw_from.integers(0, 256, (13, len(LETTERS), 28, 28)).astype(np.uint8)
    digits = draw_from.integers(0, 17, (60, 8, 8)).astype(np.uint8)
    return Ink(digits, glyphs, np.full((13, len(LETTERS)), 14, np.uint8))


def write_folder(folder: Path, world: Context, tokenizer: Tokenizer, stock: Ink) -> Path:
    folder.mkdir()
    tokenizer.save(folder)
    stock.save(folder / "ink.npz")
    parts = list(jobs.run(Workshop(world, tokenizer, TEXTS), JOBS, 1))
    entries = [build.write_parts(folder, p.job.name, p.job.split, [p], tokenizer, stock, []) for p in parts]
    write_manifest(folder, Manifest(vocab_size=tokenizer.vocab_size, corpora=tuple(entries)))
    return folder


def test_a_carried_folder_comes_back_byte_for_byte(
    tmp_path: Path, world: Context, tokenizer: Tokenizer, stock: Ink
) -> None:
    folder = write_folder(tmp_path / "there", world, tokenizer, stock)
    carry.pack(folder, tmp_path / "file")
    carry.unpack(tmp_path / "file", tmp_path / "back")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "back").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name


def test_every_pad_run_has_its_picture(tmp_path: Path, world: Context, tokenizer: Tokenizer, stock: Ink) -> None:
    folder = write_folder(tmp_path / "there", world, tokenizer, stock)
    corpus = open_corpus(folder, read_manifest(folder).entry("digits", "train"))
    found = open_pictures(folder, "digits", "train")
    assert found is not None and open_pictures(folder, "arithmetic", "train") is None
    for document in range(corpus.entry.documents):
        ids = corpus.tokens[int(corpus.offsets[document]) : int(corpus.offsets[document + 1])]
        pixels, grids = patches(found.of(document))
        assert (ids == tokenizer.special(MEDIA_PAD)).sum() == sum(t * h * w for t, h, w in grids) // 4
        assert pixels.shape == (16 * len(grids), 3, 14, 14) and abs(pixels).max() <= 1


def test_a_job_does_not_depend_on_the_process(world: Context, tokenizer: Tokenizer) -> None:
    workshop = Workshop(world, tokenizer, TEXTS)
    alone, shared = list(jobs.run(workshop, JOBS, 1)), list(jobs.run(workshop, JOBS, 2))
    for one, two in zip(alone, shared, strict=True):
        assert one.job == two.job and one.shown == two.shown
        assert np.array_equal(one.ids, two.ids) and np.array_equal(one.weights, two.weights)
        assert np.array_equal(one.pictures, two.pictures)


def test_patches_are_those_of_the_chat_preprocessing(stock: Ink) -> None:
    from PIL import Image

    from baltoro.chat.media import preprocess

    picture = draw(unpack_recipes(pack_recipes([_picture()]))[0], stock)
    mine, grids = patches(picture[None])
    theirs = preprocess(Image.fromarray(picture))
    assert grids == (theirs.grid,) and np.array_equal(mine, theirs.pixels)


def test_recipes_survive_packing() -> None:
    assert unpack_recipes(pack_recipes([_picture()])) == [_picture()]


def test_the_vocabulary_has_no_token_of_two_digits(tmp_path: Path, world: Context) -> None:
    texts = {("prose", "train"): ["In 1999 there were 127 of 2048 words, and 99 more in 2001. " * 3] * 30}
    tokenizer = vocabulary.learn(world, texts, tmp_path, size=900, families=("arithmetic", "talk"))  # type: ignore[arg-type]
    for token in range(tokenizer.num_base):
        found = tokenizer.token_bytes(token)
        assert len(found) == 1 or not any(chr(b).isdigit() for b in found)
    assert len(tokenizer.encode("1999")) == 4


def _picture() -> Picture:
    return Picture("3", HANDWRITTEN, 56, 56, rounded(0.8), rounded(7.5), rounded(0.05), 0.0, 255, 0, 20, 7)
