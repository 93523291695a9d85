"""The JSON document of the contract: the whole recommendation, for programs."""

from __future__ import annotations

import json

from autofit.export.document import Export, Task


def export_json(task: Task) -> Export:
    """`Recommendation.to_json`, indented; the task's source is not part of the contract and is left out."""
    return Export(text=json.dumps(task.recommendation.to_json(), indent=2) + "\n", suffix=".json")
