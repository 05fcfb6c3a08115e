"""Train a byte-complete BPE vocabulary with K3's split pattern and write it in K3's format.

In: text files (UTF-8). Out: a directory with `tiktoken.model` and `tokenizer_config.json`.
The first 256 ranks are the single bytes in GPT-2 order, the rest are the merges in the order learnt. The result
depends only on the bytes of the files and the size, not on their order or on the number of threads.
What counts is the encoding by ranks (merge the adjacent pair whose union has the lowest rank). It can use a token in
more ways than the merge list it was learnt as, so a few pieces come out differently; the share is printed.

    python scripts/data/train_vocab.py --size 1280 --out DIR FILES...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as LearntTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.chat.tokenizer import NUM_CONTROL, SPLIT_PATTERN, Tokenizer, chunks, gpt2_byte_order
from baltoro.errors import ConfigError

_SAMPLE_CHARS = 1_000_000  # of each corpus, how much is encoded twice to compare the two encodings


def _texts(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        yield from chunks(path.read_text(encoding="utf-8", errors="replace"))


def learn(paths: Sequence[Path], num_ranks: int, *, single_digits: bool = False) -> LearntTokenizer:
    """Learn num_ranks - 256 merges from the files.

    `single_digits`: learn no token of several digits, so that a number is always the ids of its digits. The split
    pattern stays K3's, whose groups of up to three digits then simply find no merge.
    """
    learnt = LearntTokenizer(BPE())
    cuts = [pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")]
    if single_digits:
        cuts.append(pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"))
    learnt.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learnt.train_from_iterator(
        _texts(paths), BpeTrainer(vocab_size=num_ranks, initial_alphabet=alphabet, show_progress=False)
    )
    return learnt


def byte_letters() -> dict[str, int]:
    """The printable letter by which the trainer writes each byte -> the byte."""
    order = gpt2_byte_order()
    letters = {chr(b): b for b in order[:188]}
    return letters | {chr(256 + n): b for n, b in enumerate(order[188:])}


def ranks_of(learnt: LearntTokenizer, num_ranks: int) -> dict[bytes, int]:
    """Token bytes -> rank: single bytes first, then the merges in the order learnt.

    Errors: ConfigError if the text gave fewer merges than asked for.
    """
    letters = byte_letters()
    tokens = [bytes([b]) for b in gpt2_byte_order()]
    seen = set(tokens)
    for left, right in json.loads(learnt.to_str())["model"]["merges"]:
        token = bytes(letters[c] for c in left + right)
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    if len(tokens) != num_ranks:
        raise ConfigError(f"The text gives {len(tokens)} ranks, {num_ranks} were asked for: add text or lower --size.")
    return {token: rank for rank, token in enumerate(tokens)}


def compare(learnt: LearntTokenizer, tokenizer: Tokenizer, paths: Sequence[Path]) -> tuple[int, int, int]:
    """(characters, ids by ranks, ids by merges) over the first part of the texts."""
    chars = by_ranks = by_merges = 0
    for text in _texts(paths):
        if chars >= _SAMPLE_CHARS:
            break
        chars += len(text)
        by_ranks += len(tokenizer.encode(text))
        by_merges += len(learnt.encode(text).ids)
    return chars, by_ranks, by_merges


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, required=True, help="base ranks + 256 control ids; at least 512")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--single-digits", action="store_true", help="learn no token of several digits")
    parser.add_argument("files", type=Path, nargs="+", help="UTF-8 text files")
    args = parser.parse_args(argv)
    num_ranks = args.size - NUM_CONTROL
    if num_ranks < 256:
        parser.error("--size must be at least 512: 256 bytes and 256 control ids")
    paths = sorted(args.files)
    learnt = learn(paths, num_ranks, single_digits=args.single_digits)
    tokenizer = Tokenizer(ranks_of(learnt, num_ranks))
    tokenizer.save(args.out)
    chars, by_ranks, by_merges = compare(learnt, tokenizer, paths)
    print(
        f"{args.out}: {num_ranks} ranks + {NUM_CONTROL} control ids; {chars / max(by_ranks, 1):.2f} characters a "
        f"token; {by_ranks} ids by ranks, {by_merges} by the merges learnt"
    )


if __name__ == "__main__":
    main()
