"""Ask a served model questions with known answers, and count.

In: questions, the address of an OpenAI-compatible server. Out: verdicts, and a report by family: right of asked, the
95 % interval, tokens thought and said.
Invariants: greedy, one reply a question; a question that the server cannot answer counts as wrong, and its error is
kept; the order of the verdicts is that of the questions.
Limit: the client is the standard library's, a thread for each request in flight: enough for tens at a time.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from baltoro.bench.questions import Question
from baltoro.bench.scoring import is_right, wilson
from baltoro.errors import WorkerLost

MAX_TOKENS = 600
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came back for one question. Tokens are the server's counts."""

    id: str
    family: str
    is_right: bool
    content: str
    reasoning: str
    calls: tuple[Any, ...]
    finish: str
    reasoning_tokens: int
    completion_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One family's line of the report; `low` and `high` bound the share at 95 % (Wilson)."""

    family: str
    right: int
    asked: int
    low: float
    high: float
    reasoning_tokens: float
    completion_tokens: float

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else 0.0


def ask_all(
    questions: Sequence[Question],
    url: str,
    *,
    model: str | None = None,
    concurrency: int = 8,
    on_verdict: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Errors: WorkerLost where no server answers at `url`."""
    name = model or first_model(url)
    with ThreadPoolExecutor(concurrency) as pool:
        pending = [pool.submit(ask, question, url, name) for question in questions]
        found = []
        for future in pending:
            found.append(future.result())
            on_verdict(found[-1])
    return found


def ask(question: Question, url: str, model: str) -> Verdict:
    """One question."""
    body = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS, **question.request}
    try:
        reply = _post(f"{url.rstrip('/')}/v1/chat/completions", body)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", errors="replace")
        return Verdict(question.id, question.family, False, "", "", (), "error", 0, 0, f"{error.code}: {text[:500]}")
    except OSError as error:
        return Verdict(question.id, question.family, False, "", "", (), "error", 0, 0, str(error))
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    message = choice["message"]
    return Verdict(
        id=question.id,
        family=question.family,
        is_right=is_right(message, question.check),
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple(call["function"] for call in message.get("tool_calls") or ()),
        finish=choice.get("finish_reason") or "",
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
    )


def first_model(url: str) -> str:
    """The name of the model that the server serves. Errors: WorkerLost."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=TIMEOUT_S) as reply:
            name: str = json.load(reply)["data"][0]["id"]
    except OSError as error:
        raise WorkerLost(f"no server answers at {url} ({error}); start one with `baltoro serve`") from error
    return name


def report(verdicts: Sequence[Verdict]) -> list[Row]:
    """A row for each family, in the order of the questions; `a.b` families get a row for all of `a`, too."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        head, dot, _ = verdict.family.partition(".")
        if dot:
            groups.setdefault(head, []).append(verdict)
        groups.setdefault(verdict.family, []).append(verdict)
    return [_row(family, group) for family, group in groups.items()]


def as_json(rows: Sequence[Row], verdicts: Sequence[Verdict], settings: Mapping[str, Any]) -> str:
    """The whole run: settings, rows, and every verdict."""
    run = {
        "version": 1,
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "settings": dict(settings),
        "families": [asdict(row) | {"share": row.share} for row in rows],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    return json.dumps(run, ensure_ascii=False, indent=1) + "\n"


def _row(family: str, verdicts: Sequence[Verdict]) -> Row:
    asked, right = len(verdicts), sum(v.is_right for v in verdicts)
    low, high = wilson(right, asked)
    thought, said = (
        sum(getattr(v, f"{kind}_tokens") for v in verdicts) / asked for kind in ("reasoning", "completion")
    )
    return Row(family, right, asked, low, high, thought, said)


def _post(url: str, body: Mapping[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return json.load(reply)
