"""Questions with known answers, as a file: what the evaluation asks a served model.

In: JSON lines. Out: Question: the body of a chat request without model and sampling, and how its reply is judged.
Invariants: the file alone says what is asked, so two runs ask the same; questions of one family stand together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baltoro.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Question:
    """`request` goes to /v1/chat/completions as it is; `check` is read by `bench.scoring`."""

    id: str
    family: str
    request: Mapping[str, Any]
    check: Mapping[str, Any]

    def line(self) -> str:
        """The line of the file."""
        fields = {"id": self.id, "family": self.family, "request": self.request, "check": self.check}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def read_questions(path: Path) -> list[Question]:
    """Errors: ConfigError names the line that is no question."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the questions with --questions")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(Question(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a question ({error}); write the file again") from error
    return found


def select(questions: Sequence[Question], families: Sequence[str] = (), limit: int | None = None) -> list[Question]:
    """Those of `families` (or whose family begins with one of them and a dot; none: all), at most `limit` of each.

    Errors: ConfigError for a family that is not there.
    """
    known = list(dict.fromkeys(q.family for q in questions))
    wanted = {k for k in known for f in families if k == f or k.startswith(f"{f}.")} if families else set(known)
    missing = [f for f in families if not any(k == f or k.startswith(f"{f}.") for k in known)]
    if missing:
        raise ConfigError(f"no questions of the family {missing[0]}; there are {', '.join(known)}")
    taken = dict.fromkeys(known, 0)
    found = []
    for question in questions:
        if question.family in wanted and (limit is None or taken[question.family] < limit):
            taken[question.family] += 1
            found.append(question)
    return found
