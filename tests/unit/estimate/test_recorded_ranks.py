"""Two ranks on emulated cards, as recorded: full training by ZeRO below stage 3, where gradients come to lie twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autofit.core.hardware import Hardware, Stack

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from estimate_emulated import Row, again, read, rows_of

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded" / "emulated-two-ranks"
ALLOCATED, RESERVED = 0.005, 0.02
"""The largest errors asked (benchmarks/README.md)."""


@pytest.mark.parametrize(
    ("card", "model", "sharding", "precision"),
    [
        ("h100-80g", "llama-3.1-8b", "zero1", "bf16"),
        ("h100-80g", "llama-3.1-8b", "zero2", "bf16"),
        ("a100-40g", "smollm2-360m", "zero2", "fp32"),
        ("a100-40g", "pythia-160m", "zero2", "fp16-mixed"),
    ],
)
def test_full_training_takes_what_is_predicted(card: str, model: str, sharding: str, precision: str) -> None:
    file = RECORDED / f"{card}.jsonl.gz"
    asked = {"method": "full", "sharding": sharding, "precision": precision}
    rows = [r for r in rows_of(file) if r.measured and r.job["model"] == model and asked.items() <= r.config.items()]
    about = read(file)[0]
    for row in rows:
        check(*again((Hardware.from_json(about["hardware"]), Stack.from_json(about["stack"])), [row]))
    assert rows


def check(row: Row) -> None:
    assert row.predicted["fits"], row
    assert abs(row.error("peak_allocated_bytes") or 0.0) <= ALLOCATED, row
    assert abs(row.error("peak_reserved_bytes") or 0.0) <= RESERVED, row
