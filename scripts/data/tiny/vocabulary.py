"""The vocabulary of the tiny model: 8,192 ids, learnt from a sample of everything it is trained on.

In: texts and dialogues of the training split. Out: `tiktoken.model` and `tokenizer_config.json` in the data folder.
Numbers are the ids of their digits: no merge of two digits is learnt. So a column of a sum is always the same two
ids, 10 embeddings are seen in every number instead of 1,000 that are each seen rarely, and working digit by digit
needs no spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import train_vocab

from baltoro.chat.tokenizer import NUM_CONTROL, Tokenizer
from scripts.data.tiny import render
from scripts.data.tiny.exchange import Split
from scripts.data.tiny.families import FAMILIES, Context

SIZE = 8192
TEXT_SHARE = 3  # one text in so many is read
DIALOGUES = 1500  # of each family


def learn(
    context: Context,
    texts: Mapping[tuple[str, Split], Sequence[str]],
    folder: Path,
    *,
    size: int,
    families: Iterable[str] = FAMILIES,
) -> Tokenizer:
    """Learn and save. `folder` also gets the sample, in `text/`."""
    sample = folder / "text"
    sample.mkdir(parents=True, exist_ok=True)
    paths = []
    for (name, split), found in texts.items():
        if split == "train":
            paths.append(sample / f"{name}.txt")
            paths[-1].write_text("\n".join(found[::TEXT_SHARE]), encoding="utf-8")
    for name in families:
        stream = FAMILIES[name].stream(context, Random(f"vocabulary/{name}"), "train")
        # Each piece once: what the protocol repeats in every dialogue would crowd out everything else.
        pieces = dict.fromkeys(text for d in islice(stream, DIALOGUES) for text, _ in render.words(d))
        paths.append(sample / f"{name}.txt")
        paths[-1].write_text("\n".join(pieces), encoding="utf-8")
    learnt = train_vocab.learn(paths, size - NUM_CONTROL, single_digits=True)
    tokenizer = Tokenizer(train_vocab.ranks_of(learnt, size - NUM_CONTROL))
    tokenizer.save(folder)
    return tokenizer
