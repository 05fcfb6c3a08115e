"""The start-up table names every default on which stacks disagree, and shows what a setting changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baltoro.config import build
from baltoro.errors import ConfigError
from baltoro.rl.config import ADVANTAGES, AdvantageConfig, PartialConfig, ShapingConfig, ThrottleConfig, resolved, table
from baltoro.trainer.policy_config import ALGORITHMS, PolicyConfig

PLAIN = (PolicyConfig(), AdvantageConfig(), ShapingConfig(), PartialConfig())


def test_every_algorithm_has_its_advantages() -> None:
    assert ALGORITHMS.keys() == ADVANTAGES.keys()
    assert not ADVANTAGES["dr_grpo"].is_normalised and not ADVANTAGES["kimi"].is_normalised


@pytest.mark.parametrize(
    ("place", "change", "row"),
    [
        (0, {"clip_high": 0.3}, "loss"),
        (0, {"dual_clip": 3.0}, "loss"),
        (0, {"form": "capped", "max_ratio": 4.0}, "loss"),
        (0, {"form": "mirror", "tau": 0.01}, "loss"),
        (0, {"form": "by_trajectory", "clip_low": 3e-4}, "loss"),
        (0, {"aggregation": "token_mean"}, "aggregation"),
        (0, {"aggregation": "fixed_length", "fixed_length": 99}, "aggregation"),
        (0, {"old": "trainer"}, "old logprobs"),
        (0, {"reference_kl": 0.04}, "reference KL"),
        (1, {"is_normalised": False}, "standard deviation"),
        (1, {"eps": 1e-4}, "standard deviation"),
        (1, {"is_unbiased": False}, "standard deviation"),
        (1, {"zero_std": "drop"}, "groups of equal rewards"),
        (2, {"truncated": "mask"}, "truncated trajectories"),
        (2, {"overlong_buffer": 64}, "overlong penalty"),
        (2, {"tau": 2.0}, "effort budget"),
        (3, {"max_staleness": 1}, "staleness"),
        (3, {"stale": "drop"}, "staleness"),
        (3, {"share": 0.5}, "partial rollout"),
        (3, {"resume": "carry"}, "partial rollout"),
    ],
)
def test_a_setting_shows_in_its_row_alone(place: int, change: dict[str, object], row: str) -> None:
    parts = list(PLAIN)
    parts[place] = replace(parts[place], **change)  # type: ignore[type-var]
    before, after = resolved(*PLAIN), resolved(*parts)  # type: ignore[arg-type]
    assert [a.name for a, b in zip(after, before, strict=True) if a != b] == [row]


def test_tis_and_the_statistic_of_b0_show() -> None:
    policy = PolicyConfig(old="trainer", tis_high=2.0)
    rows = {c.name: c.value for c in resolved(policy, *PLAIN[1:])}
    assert rows["TIS"] == "cut to 0..2"
    shaping = ShapingConfig(tau=2.0, b0_statistic="quantile", b0_quantile=0.75, b0_over="all", counted="output")
    rows = {c.name: c.value for c in resolved(PLAIN[0], PLAIN[1], shaping, PLAIN[3])}
    assert rows["effort budget"] == "-1 above 2 x quantile 0.75 of all, output tokens"


def test_the_table_is_aligned() -> None:
    lines = table(resolved(*PLAIN)).splitlines()
    assert len(lines) == len(resolved(*PLAIN)) + 1
    place = lines[0].index("elsewhere")
    assert all(line[place - 2 : place] == "  " and line[place] != " " for line in lines)


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        (AdvantageConfig, {"eps": -1.0}, "eps"),
        (AdvantageConfig, {"zero_std": "resample"}, "zero_std"),
        (ShapingConfig, {"tau": 0.0}, "tau"),
        (ShapingConfig, {"b0_quantile": 2.0}, "b0_quantile"),
        (PartialConfig, {"share": 0.0}, "share"),
        (PartialConfig, {"max_staleness": -1}, "max_staleness"),
        (ThrottleConfig, {"soft": 0.5}, "soft"),
        (ThrottleConfig, {"growth": 1.0}, "growth"),
        (ThrottleConfig, {"least": 9, "most": 3}, "least"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(kind: type, data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(kind, data)
