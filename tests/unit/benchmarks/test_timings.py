"""What the timings record. Nothing is timed here."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
import timings


def test_a_record_says_when_and_on_what_it_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "estimator.json"
    monkeypatch.setattr(timings, "estimator", lambda asked: {"model": asked.model})
    monkeypatch.setattr("sys.argv", ["timings.py", "estimator", "--model", "smollm2-135m", "--out", str(out)])
    timings.main()
    record = json.loads(out.read_text())
    assert datetime.fromisoformat(record["recorded_at"]).tzinfo is not None
    assert record["model"] == "smollm2-135m" and {"hardware", "stack"} <= set(record)
