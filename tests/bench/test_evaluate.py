"""Evaluation over HTTP against a scripted server, and the questions kept in the repository."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baltoro.bench.evaluate import ask_all, first_model, report
from baltoro.bench.questions import Question, read_questions, select
from baltoro.bench.scoring import JUDGES
from baltoro.chat.messages import normalise, normalise_tools, response_schema
from baltoro.cli.bench import app
from baltoro.errors import ConfigError, WorkerLost
from baltoro.protocol.openai import ChatRequest, parse

KEPT = Path(__file__).parents[2] / "bench" / "eval" / "tiny.jsonl"


class Adder(BaseHTTPRequestHandler):
    """Answers "a + b" with the sum, and everything else with an error."""

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "adder"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        assert body["temperature"] == 0 and body["model"] == "adder"
        if "+" not in text:
            self._reply(400, {"error": {"message": "I only add"}})
            return
        total = str(sum(int(part) for part in text.split("+")))
        message = {"role": "assistant", "content": total, "reasoning_content": "hm"}
        usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}
        self._reply(200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    def log_message(self, *args: object) -> None:
        pass

    def _reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Adder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def question(number: int, family: str, text: str, gold: int) -> Question:
    body = {"messages": [{"role": "user", "content": text}]}
    return Question(f"{family}/{number}", family, body, {"kind": "number", "gold": gold})


QUESTIONS = [
    question(0, "add", "2 + 3", 5),
    question(1, "add", "2 + 4", 7),
    question(0, "hard.words", "two", 2),
    question(0, "hard.sums", "10 + 5", 15),
]


def test_right_wrong_and_failed_answers_are_counted_by_family(url: str) -> None:
    verdicts = ask_all(QUESTIONS, url, concurrency=3)
    assert [v.id for v in verdicts] == [q.id for q in QUESTIONS]
    assert "I only add" in verdicts[2].error and not verdicts[2].is_right
    rows = {row.family: row for row in report(verdicts)}
    assert {name: (row.right, row.asked) for name, row in rows.items()} == {
        "add": (1, 2), "hard": (1, 2), "hard.words": (0, 1), "hard.sums": (1, 1),
    }  # fmt: skip
    assert rows["add"].reasoning_tokens == 3 and rows["add"].completion_tokens == 5


def test_the_verb_prints_a_table_and_writes_the_run(url: str, tmp_path: Path) -> None:
    file, out = tmp_path / "questions.jsonl", tmp_path / "run.json"
    file.write_text("".join(q.line() + "\n" for q in QUESTIONS))
    result = CliRunner().invoke(
        app, ["eval", "--url", url, "--questions", str(file), "--families", "add", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "50.0%" in result.output
    run = json.loads(out.read_text())
    assert run["families"][0]["right"] == 1 and len(run["verdicts"]) == 2 and run["settings"]["model"] == "adder"


def test_no_server_is_said_plainly() -> None:
    with pytest.raises(WorkerLost, match="baltoro serve"):
        first_model("http://127.0.0.1:9")


def test_families_and_limits_select() -> None:
    assert [q.id for q in select(QUESTIONS, ["hard"])] == ["hard.words/0", "hard.sums/0"]
    assert [q.id for q in select(QUESTIONS, [], 1)] == ["add/0", "hard.words/0", "hard.sums/0"]
    with pytest.raises(ConfigError, match=r"hard\.sums"):
        select(QUESTIONS, ["none"])


def test_questions_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(q.line() + "\n" for q in QUESTIONS))
    assert read_questions(file) == QUESTIONS
    file.write_text('{"id": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_questions(file)


def test_the_kept_questions_are_requests_that_the_server_takes() -> None:
    questions = read_questions(KEPT)
    assert len({q.id for q in questions}) == len(questions) > 1000
    assert KEPT.stat().st_size < 1_000_000
    for asked in questions:
        body = parse(ChatRequest, json.dumps({"model": "tiny", **asked.request}).encode())
        normalise([m.model_dump(exclude_none=True) for m in body.messages])
        normalise_tools(asked.request.get("tools"))
        response_schema(asked.request.get("response_format"))
        assert asked.check["kind"] in JUDGES
