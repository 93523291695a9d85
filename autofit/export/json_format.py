"""The contract's JSON document: the whole recommendation, for programs."""

from __future__ import annotations

import json

from autofit.export.document import Export
from autofit.frontier import Recommendation


def export_json(recommendation: Recommendation, source: str) -> Export:
    """`Recommendation.to_json`, indented; `source` has no place in the contract and is not written."""
    return Export(text=json.dumps(recommendation.to_json(), indent=2) + "\n", suffix=".json")
