"""Snapshots of the public interfaces: how they are compared, and how a new one is written on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "snapshots"
UPDATE = "AUTOFIT_UPDATE_SNAPSHOTS"
"""Environment variable that, when set, rewrites the snapshots: changing one must be deliberate."""
ABSENT = "absent"


def check(name: str, actual: dict[str, Any]) -> None:
    """Fails with every difference between `actual` and the snapshot `name`, one per line."""
    path = FOLDER / name
    if os.environ.get(UPDATE):
        path.write_text(json.dumps(actual, indent=1, sort_keys=True) + "\n")
    changes = differences(json.loads(path.read_text()), json.loads(json.dumps(actual)))
    text = "\n".join(changes)
    assert not changes, f"{name} has changed; if that is meant, run this test with {UPDATE}=1:\n{text}"


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """The differences between two JSON values, each as `path: before -> after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        changes = []
        for key in sorted(before.keys() | after.keys()):
            inner = f"{where} > {key}" if where else key
            changes += differences(before.get(key, ABSENT), after.get(key, ABSENT), inner)
        return changes
    return [] if before == after else [f"{where}: {json.dumps(before)} -> {json.dumps(after)}"]
