"""What a replay says to people and to files: counts by label, and the whole run as JSON.

In: a Replayed. Out: LabelCounts; a file with settings, plan, totals, labels, outcomes and samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from baltoro.bench.replay import Outcome, Replayed, Sample


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """Requests of one label: all, those never retracted, and when the last of them ended (seconds after the first
    arrival of the label)."""

    name: str
    requests: int
    whole: int
    last_s: float


def by_label(found: Replayed) -> list[LabelCounts]:
    """In order of first arrival."""
    labels: dict[str, list[Outcome]] = {}
    for one in sorted(found.outcomes, key=lambda one: one.arrival):
        labels.setdefault(one.label, []).append(one)
    return [
        LabelCounts(
            name,
            len(ones),
            sum(not one.num_retracted and not one.is_refused for one in ones),
            max(one.ended for one in ones) - ones[0].arrival,
        )
        for name, ones in labels.items()
    ]


def whole_within(found: Replayed, label: str, seconds: float) -> int:
    """Requests of a label that ended within `seconds` of its first arrival and were never retracted."""
    ones = [one for one in found.outcomes if one.label == label and not one.is_refused]
    first = min((one.arrival for one in ones), default=0.0)
    return sum(not one.num_retracted and one.ended - first <= seconds for one in ones)


def write_replay(path: Path, found: Replayed, settings: Mapping[str, Any]) -> None:
    """Samples as columns: names once, then rows."""
    record = {
        "settings": dict(settings),
        "plan": found.plan.describe(),
        "totals": found.totals(),
        "labels": [asdict(label) for label in by_label(found)],
        "outcomes": [asdict(one) for one in found.outcomes],
        "samples": {"names": [field.name for field in fields(Sample)], "rows": [astuple(one) for one in found.samples]},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
