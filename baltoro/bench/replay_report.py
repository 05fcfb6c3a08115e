"""What a replay says to people and to files: counts by phase, and the whole run as JSON.

In: a Replayed. Out: PhaseCounts; a file with settings, plan, totals, phases, outcomes and samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from baltoro.bench.replay import Outcome, Replayed, Sample


@dataclass(frozen=True, slots=True)
class PhaseCounts:
    """Requests of one phase: all, those never retracted, and when the last of them ended (seconds after the first
    arrival of the phase)."""

    name: str
    requests: int
    whole: int
    last_s: float


def by_phase(found: Replayed) -> list[PhaseCounts]:
    """In order of first arrival."""
    phases: dict[str, list[Outcome]] = {}
    for one in sorted(found.outcomes, key=lambda one: one.arrival):
        phases.setdefault(one.phase, []).append(one)
    return [
        PhaseCounts(
            name,
            len(ones),
            sum(not one.num_retracted and not one.is_refused for one in ones),
            max(one.ended for one in ones) - ones[0].arrival,
        )
        for name, ones in phases.items()
    ]


def whole_within(found: Replayed, phase: str, seconds: float) -> int:
    """Requests of a phase that ended within `seconds` of its first arrival and were never retracted."""
    ones = [one for one in found.outcomes if one.phase == phase and not one.is_refused]
    first = min((one.arrival for one in ones), default=0.0)
    return sum(not one.num_retracted and one.ended - first <= seconds for one in ones)


def write_replay(path: Path, found: Replayed, settings: Mapping[str, Any]) -> None:
    """Samples as columns: names once, then rows."""
    record = {
        "settings": dict(settings),
        "plan": found.plan.describe(),
        "totals": found.totals(),
        "phases": [asdict(phase) for phase in by_phase(found)],
        "outcomes": [asdict(one) for one in found.outcomes],
        "samples": {"names": [field.name for field in fields(Sample)], "rows": [astuple(one) for one in found.samples]},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
