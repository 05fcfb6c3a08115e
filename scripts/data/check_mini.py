"""What the mini model can do, measured: all hundred one-digit sums in the chat protocol, and continued documentation.

In: a model folder. Out: counts on stdout, the wrong answers, and continuations; `--json FILE` writes the same.
Greedy, so the numbers repeat on one machine.

    python scripts/data/check_mini.py models/mini
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.llm import LLM
from baltoro.protocol.sampling import SamplingParams

WORDINGS = ("What is {a} + {b}?", "{a}+{b}", "How much is {a} plus {b}?")
PROMPTS = (
    "# json --- JSON encoder and decoder\n\n",
    "The list methods make it easy to",
    "Return True if the string",
    "class Thread(",
)
PAIRS = [(a, b) for a in range(10) for b in range(10)]


def check_sums(llm: LLM, wording: str, *, thinking: bool) -> tuple[int, list[str]]:
    """How many of the hundred answers end with the right number, and the others."""
    talks = [[{"role": "user", "content": wording.format(a=a, b=b)}] for a, b in PAIRS]
    answers = llm.chat(talks, SamplingParams(temperature=0.0, max_tokens=120), thinking=thinking)
    wrong = []
    for (a, b), answer in zip(PAIRS, answers, strict=True):
        numbers = re.findall(r"\d+", answer.text)
        if not numbers or int(numbers[-1]) != a + b:
            wrong.append(f"{wording.format(a=a, b=b)} -> {answer.text!r}")
    return len(PAIRS) - len(wrong), wrong


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=80, help="tokens of a continuation")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    llm = LLM(args.model)
    report: dict[str, Any] = {"sums": [], "continuations": []}
    for thinking in (True, False):
        for wording in WORDINGS:
            right, wrong = check_sums(llm, wording, thinking=thinking)
            report["sums"].append({"wording": wording, "thinking": thinking, "right": right, "wrong": wrong})
            print(f"{wording!r}, thinking {'on' if thinking else 'off'}: {right} of {len(PAIRS)}", *wrong, sep="\n  ")
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for prompt, answer in zip(PROMPTS, llm.generate(list(PROMPTS), params), strict=True):
        report["continuations"].append({"prompt": prompt, "text": answer.text})
        print("-----", prompt + "|" + answer.text, sep="\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
