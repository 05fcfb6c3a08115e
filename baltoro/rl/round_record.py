"""Numbers of one round of rollouts, for the log."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundRecord:
    """What a round was like. Single writer: the collector.

    occupancy  mean share of the allowed rows that were busy, over the polls (of an engine in this process: its steps)
    """

    seconds: float = 0.0
    tokens: int = 0
    retries: int = 0
    failed: int = 0
    paused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    cap: int = 0
    retractions: int = 0
    looks: int = 0
    rows: float = 0.0

    @property
    def occupancy(self) -> float:
        return self.rows / self.looks if self.looks else 0.0
