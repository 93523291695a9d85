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


def test_a_server_is_asked_while_trials_are_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "service.json"
    sizes = {"trials": 60, "contexts": 2, "rate": 20, "seconds": 2}
    asked = [argument for name, size in sizes.items() for argument in (f"--{name}", str(size))]
    monkeypatch.setattr("sys.argv", ["timings.py", "service", *asked, "--out", str(out)])
    timings.main()
    record = json.loads(out.read_text())
    assert record["trials"] > 60 and len(record["server_mib"]) == 10
    assert sum(answers["count"] for answers in record["answers"].values()) == 40
    paths = {name.split()[0] for name in record["answers"]}
    assert paths == set(timings.PATHS) and any(name.endswith("200") for name in record["answers"])
