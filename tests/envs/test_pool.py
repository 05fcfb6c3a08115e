"""Judges that hang, die, raise and lie: none costs more than its own call, none becomes a zero."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baltoro.envs.base import Score
from baltoro.envs.pool import Job, RewardPool
from baltoro.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def job(name: str, **arguments: object) -> Job:
    return Job(f"tests.envs.judges:{name}", arguments)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, timeout_s=0.5) as made:
        yield made


def test_a_score_comes_back(pool: RewardPool) -> None:
    assert pool.score(job("good", answer="7")) == Score(1.0, "right", "7")


def test_a_zero_is_a_zero(pool: RewardPool) -> None:
    assert pool.score(job("zero", answer="7")) == Score(0.0, "wrong", "7")


@pytest.mark.parametrize("name", ["loops", "hangs_in_c"])
def test_a_judge_that_hangs_is_killed_in_time(pool: RewardPool, name: str) -> None:
    start = time.monotonic()
    score = pool.score(job(name))
    assert (score.score, score.reason) == (0.0, "timeout")
    assert time.monotonic() - start < 20


def test_what_a_judge_started_is_killed_with_it(pool: RewardPool) -> None:
    word = f"child-of-judge-{os.getpid()}"
    assert pool.score(job("starts_others", word=word)).reason == "timeout"
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    assert not [line for line in lines if line.endswith(word)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "ValueError: no such gold"),
        ("dies", "process ended"),
        ("no_score", "no score"),
        ("bad_score", "no score"),
        ("hungry", "MemoryError"),
        ("nothing_of_the_kind", "AttributeError"),
    ],
)
def test_a_judge_that_fails_is_excluded_and_never_scored_0(pool: RewardPool, name: str, why: str) -> None:
    score = pool.score(job(name))
    assert score.is_excluded and score.score is None and score.reason == "infrastructure"
    assert why in score.detail and "2 times" in score.detail
    assert pool.score(job("good", answer="after")).score == 1.0


def test_a_failure_is_tried_again(pool: RewardPool, tmp_path: Path) -> None:
    assert pool.score(job("dies_once", mark=str(tmp_path / "mark"))) == Score(1.0, "right", "second time")


def test_many_at_once_come_back_in_their_order(pool: RewardPool) -> None:
    jobs = [job("good", answer=str(i)) for i in range(10)]
    jobs[3], jobs[6] = job("loops"), job("dies")
    scores = pool.score_all(jobs)
    assert [score.answer for score in scores] == ["0", "1", "2", None, "4", "5", None, "7", "8", "9"]
    assert [score.reason for score in scores if score.reason != "right"] == ["timeout", "infrastructure"]


def test_a_worker_serves_many_calls(pool: RewardPool) -> None:
    answers = {pool.score(job("process")).answer for _ in range(6)}
    assert 1 <= len(answers) <= pool.num_workers


def test_workers_inherit_no_environment(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    with RewardPool(1) as fresh:
        assert "SECRET_TOKEN" not in str(fresh.score(job("environment")).answer)


def test_a_closed_pool_leaves_no_process() -> None:
    with RewardPool(1) as pool:
        number = int(pool.score(job("process")).answer or 0)
        assert Path(f"/proc/{number}").exists()
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.slow
def test_a_worker_whose_pool_was_killed_ends(tmp_path: Path) -> None:
    """It sees the end of its connection."""
    owner = (
        "import time\nfrom baltoro.envs.pool import Job, RewardPool\npool = RewardPool(1)\n"
        "print(pool.score(Job('tests.envs.judges:process', {})).answer, flush=True)\ntime.sleep(60)"
    )
    started = subprocess.Popen([sys.executable, "-c", owner], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout
    number = int(started.stdout.readline())
    started.send_signal(signal.SIGKILL)
    started.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{number}").exists() and time.monotonic() < end:
        os.sched_yield()
    assert not Path(f"/proc/{number}").exists()


def test_settings_that_make_no_pool_are_refused() -> None:
    for options in ({"num_workers": 0}, {"timeout_s": 0}, {"num_retries": -1}):
        with pytest.raises(ConfigError):
            RewardPool(**options)  # type: ignore[arg-type]
