"""bench/results/rl-cpu.json: figures of RL that need no GPU, a section for each script of this folder."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "rl-cpu.json"


def record(section: str, figures: dict[str, Any], path: Path = RESULT) -> None:
    """Write one section, and leave the others as they are."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"name": "rl-cpu", "sections": {}}
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    facts = {
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": platform.machine(),
        "cores": os.cpu_count(),
    }
    found["sections"][section] = facts | figures
    path.write_text(json.dumps(found, indent=1) + "\n")


def rounded(value: Any, digits: int = 4) -> Any:
    """Numbers of a nested structure to so many digits that count."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(one, digits) for key, one in value.items()}
    return [rounded(one, digits) for one in value] if isinstance(value, list | tuple) else value
