"""Write the corpora of the mini model: the CPython documentation, and sums in the chat protocol.

In: Debian's python3.N-doc if it is installed (`apt-get install python3.11-doc`), else the standard library's own help
texts. Out: a data folder with a vocabulary trained on it (`tiktoken.model`, `tokenizer_config.json`), token files and
`manifest.json` (package, version, licence, sha256, tokens, train or eval). Deterministic for the same input.

    python scripts/data/build_mini.py --out data/mini
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.chat.messages import normalise
from baltoro.chat.segments import Segment, encode_segments
from baltoro.chat.tokenizer import NUM_CONTROL, Tokenizer
from baltoro.chat.xtml import Options, completion_segments, segments
from baltoro.trainer.corpus import Document, Manifest, Source, Split, write_corpus, write_manifest
from scripts.data import pydocs, rst, sums, train_vocab

VOCAB_SIZE = 1280
NUM_CONVERSATIONS = {"train": 8000, "eval": 300}
HELD_OUT = 40  # one page in so many is kept for evaluation


def is_held_out(page: str) -> bool:
    """By name, so that a page stays on its side whatever else is installed."""
    return zlib.crc32(page.encode()) % HELD_OUT == 0


def rendered(conversation: sums.Conversation) -> list[tuple[list[Segment], int]]:
    """The whole conversation as segments, each run with its weight: 1 for what the model is to say, 0 for the rest."""
    messages = normalise(conversation.messages)
    options = Options(thinking=conversation.thinking, effort=conversation.effort)
    runs: list[tuple[list[Segment], int]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = segments(messages[:index], options)
        answer = completion_segments(message, thinking=conversation.thinking)
        runs += [(prompt[done:], 0), (answer, 1)]
        done = len(prompt) + len(answer)
    return runs


def document_of(conversation: sums.Conversation, tokenizer: Tokenizer) -> Document:
    """Ids and weights of a conversation."""
    ids: list[int] = []
    weights: list[int] = []
    for run, weight in rendered(conversation):
        found = encode_segments(run, tokenizer)
        ids += found
        weights += [weight] * len(found)
    return Document(ids, weights)


def texts_for_vocabulary(pages: Sequence[pydocs.Page], folder: Path) -> list[Path]:
    """Plain text files to learn merges from: all training pages, and the words of the protocol."""
    folder.mkdir(parents=True, exist_ok=True)
    prose, dialogue = folder / "docs.txt", folder / "sums.txt"
    prose.write_text("\n".join(page.text for page in pages if not is_held_out(page.name)), encoding="utf-8")
    with dialogue.open("w", encoding="utf-8") as file:
        for conversation in sums.conversations(NUM_CONVERSATIONS["train"] // 4, seed=2):
            for run, _ in rendered(conversation):
                file.writelines(segment.text + "\n" for segment in run if not segment.allow_special)
    return [prose, dialogue]


def prose_documents(pages: Sequence[pydocs.Page], split: Split, tokenizer: Tokenizer) -> Iterator[Document]:
    """Sections of pages, each closed by [EOS]."""
    end = tokenizer.special("[EOS]")
    for page in pages:
        if is_held_out(page.name) == (split == "eval"):
            for section in rst.sections(page.text):
                yield Document([*tokenizer.encode(section), end])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--docs", type=Path, help="`_sources` folder of the Python documentation; default: look for it")
    parser.add_argument("--no-docs", action="store_true", help="use the standard library's help texts in any case")
    args = parser.parse_args(argv)
    folder = None if args.no_docs else args.docs or pydocs.find_docs()
    if folder is None:
        print(f"no Python documentation found: using help topics and docstrings ({pydocs.INSTALL_HINT} gives more)")
    args.out.mkdir(parents=True, exist_ok=True)
    pages, source = pydocs.pages(folder)
    files = texts_for_vocabulary(pages, args.out / "text")
    learnt = train_vocab.learn(files, VOCAB_SIZE - NUM_CONTROL)
    tokenizer = Tokenizer(train_vocab.ranks_of(learnt, VOCAB_SIZE - NUM_CONTROL))
    tokenizer.save(args.out)
    entries = []
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        prose = prose_documents(pages, split, tokenizer)
        entries.append(
            write_corpus(args.out, "docs", split, prose, vocab_size=VOCAB_SIZE, is_divisible=True, sources=[source])
        )
        count = NUM_CONVERSATIONS[split]
        dialogue = (document_of(c, tokenizer) for c in sums.conversations(count, seed=0 if split == "train" else 1))
        mine = [own_source(count)]
        entries.append(
            write_corpus(args.out, "sums", split, dialogue, vocab_size=VOCAB_SIZE, is_divisible=False, sources=mine)
        )
    builder = "python scripts/data/build_mini.py"
    write_manifest(args.out, Manifest(vocab_size=VOCAB_SIZE, corpora=tuple(entries), builder=builder))
    for entry in entries:
        print(f"{entry.name} {entry.split}: {entry.documents} documents, {entry.tokens} tokens")


def own_source(documents: int) -> Source:
    """What this repository writes itself."""
    digest = hashlib.sha256(Path(sums.__file__).read_bytes()).hexdigest()
    return Source(package="scripts/data/sums.py", version="1", licence="Apache-2.0", sha256=digest, documents=documents)


if __name__ == "__main__":
    main()
