"""The record of searches run in turn, with made-up ones."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_an_interrupted_record_has_every_run_until_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script: Any = importlib.import_module("before_after")
    asked: list[tuple[str, ...]] = []
    searched: list[str] = []

    def git(*words: str) -> str:
        asked.append(words)
        return "new"

    def run(source: Path, revision: str) -> dict[str, Any]:
        if len(searched) == 3:
            raise KeyboardInterrupt
        searched.append(revision)
        assert (source == script.ROOT) == (revision == "new")
        return {"revision": revision}

    monkeypatch.setattr(script, "git", git)
    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(sys, "argv", ["before_after.py", "old", "--rounds", "2", "--out", str(tmp_path / "out.json")])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    written = json.loads((tmp_path / "out.json").read_text())
    assert [done["revision"] for done in written["runs"]] == ["new", "old", "new"] and written["recorded_at"]
    assert asked[-1][:2] == ("worktree", "remove"), "the earlier revision's files are gone"
