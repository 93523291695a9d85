"""The contract's JSON document: the whole recommendation, for programs."""

from __future__ import annotations

import json

from autofit.export.document import Export, Task


def export_json(task: Task) -> Export:
    """`Recommendation.to_json`, indented; the source has no place in the contract and is not written."""
    return Export(text=json.dumps(task.recommendation.to_json(), indent=2) + "\n", suffix=".json")
