"""Which kinds of task can RL learn on? Attempts of the untrained policy on each, before a run is paid for.

    python -m scripts.rl.probe recipes/rl-tiny.toml gym.gcd:high gym.products:low "arithmetic:low:low=100,high=999"
    python -m scripts.rl.probe recipes/rl-tiny.toml gym.lcm:none --set engine.options.device=cuda --draws 8

A case is FAMILY:EFFORT[:OPTION=VALUE,...]; effort `none` is a reply without thoughts. A kind is worth a run where
attempts are sometimes right (`best`: share of tasks with a right one among the draws) and groups differ (`equal`:
share of groups without signal); `cut`: share of attempts that were too long.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import Any

from baltoro.config import load_config
from baltoro.errors import ConfigError
from baltoro.rl.evaluate import GREEDY, Tried, summary, try_all
from baltoro.rl.parts import Parts, make_families, open_parts
from baltoro.rl.recipe import FamilyConfig, RLConfig
from baltoro.rl.rollout import Talk
from baltoro.rl.tasks import held_out

OVERRIDES = ("optim.lr=0.0", "checks.has_start_test=false")
HEAD = f"{'family, effort, options':44} sampled greedy equal  best len cut   s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=192, help="budget of an attempt")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new case after so many")
    parser.add_argument("--show", type=int, default=0, help="print so many attempts of each case")
    args = parser.parse_args()
    config = load_config(RLConfig, args.recipe, [*OVERRIDES, *args.set])
    parts = open_parts(config)
    try:
        print(HEAD, flush=True)
        start = time.monotonic()
        for case in args.cases:
            if time.monotonic() - start < args.seconds:
                _one(parts, config, case, args)
    finally:
        parts.close()


def _one(parts: Parts, config: RLConfig, case: str, args: argparse.Namespace) -> None:
    """Try one kind of task and print its line; one that cannot be made is a line too."""
    start = time.monotonic()
    family, effort, options = (*case.split(":"), "", "")[:3]
    talk = Talk(parts.talk.tokenizer, effort != "none")
    efforts = () if effort in ("", "none") else (effort,)
    made = FamilyConfig(family=family, options=dict(_option(one) for one in options.split(",") if one))
    try:
        with ExitStack() as owned:
            tasks = held_out(make_families(replace(config, tasks=(made,)), owned), args.tasks, efforts)
            ones = try_all(
                parts.policy,
                tasks,
                talk,
                draws=args.draws,
                max_tokens=args.tokens,
                seed=1,
                most=int(config.engine.options.get("max_running", 32)),
            )
    except ConfigError as error:  # the next case may do better
        print(f"{case:44} {type(error).__name__}: {error}"[:160], flush=True)
        return
    print(f"{case:44} {_figures(ones, args)} {time.monotonic() - start:4.0f}", flush=True)
    for one in ones[: args.show]:
        print("    ", one.key, one.score and one.score.reason, repr(talk.tokenizer.decode(list(one.ids))[-300:]))


def _figures(ones: list[Tried], args: argparse.Namespace) -> str:
    groups: dict[int, list[float]] = {}
    for one in ones:
        if one.key[1] != GREEDY and one.score is not None and one.score.score is not None:
            groups.setdefault(one.key[0], []).append(one.score.score)
    record = summary(ones, version=0, tasks=args.tasks, draws=args.draws)
    equal = fmean(len(set(group)) == 1 for group in groups.values())
    best = fmean(max(group) for group in groups.values())
    cut = fmean(one.score is not None and one.score.reason == "truncated" for one in ones)
    shares = f"{record.sampled:7.0%} {record.greedy:6.0%} {equal:5.0%} {best:5.0%}"
    return f"{shares} {record.length:3.0f} {cut:3.0%}"


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    main()
