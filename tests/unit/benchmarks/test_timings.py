"""What the timings say of made-up figures, and what they record. Nothing is timed here."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
import timings


def test_the_worst_split_is_of_all_splits() -> None:
    assert timings.worst_split([100.0, 110.0, 100.0, 110.0]) == pytest.approx(0.1)
    assert timings.worst_split([100.0, 110.0]) == pytest.approx(0.1)


def test_a_record_says_when_and_on_what_it_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "start-up.json"
    monkeypatch.setattr(timings, "command_seconds", lambda command: {"median": 0.1, "max": 0.2})
    monkeypatch.setattr("sys.argv", ["timings.py", "start-up", "--count", "20", "--out", str(out)])
    timings.main()
    record = json.loads(out.read_text())
    assert datetime.fromisoformat(record["recorded_at"]).tzinfo is not None
    assert {"hardware", "stack", "trials", "help_seconds", "recommend_seconds"} <= set(record)
