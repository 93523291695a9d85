"""A config that was recorded twice has the means of both runs in its table, and both runs in a file of their own."""

from __future__ import annotations

import json
from collections import defaultdict
from math import sqrt
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded"


def test_a_table_has_the_means_of_both_runs() -> None:
    runs = defaultdict(list)
    for row in json.loads((RECORDED / "both-runs.json").read_text()):
        runs[row["table"], json.dumps(row["config"], sort_keys=True)].append(row)
    for (table, config), both in runs.items():
        lines = map(json.loads, (RECORDED / table).read_text().splitlines()[1:])
        (mean,) = [line for line in lines if json.dumps(line["config"], sort_keys=True) == config]
        first, second = both
        assert mean["seconds"] == pytest.approx((first["seconds"] + second["seconds"]) / 2)
        a, b, measured = (row["measurement"] for row in (first, second, mean))
        assert measured["tokens_per_second"] == pytest.approx(sqrt(a["tokens_per_second"] * b["tokens_per_second"]))
        assert measured["device_bytes"] == pytest.approx((a["device_bytes"] + b["device_bytes"]) / 2, abs=1)
