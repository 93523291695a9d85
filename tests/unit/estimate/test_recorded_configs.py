"""Configs recorded on emulated cards, of kinds that were once predicted 4 to 12 % off: where gradients lie twice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autofit.core.device.hardware import Hardware, Stack

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from estimate_emulated import Row, again, read, rows_of

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded"
ALLOCATED, RESERVED = 0.005, 0.02
"""The largest errors asked (benchmarks/README.md)."""
ZERO = "emulated-two-ranks"
"""Full training below stage 3."""
TIED = {"precision": "fp32", "loss": "chunked", "checkpointing": "every-2"}
"""A head that is the embedding, too, with as few tokens as one chunk takes."""


@pytest.mark.parametrize(
    ("folder", "card", "model", "config"),
    [
        (ZERO, "rtx-4090", "smollm2-360m", {"sharding": "zero1", "precision": "fp32"}),
        (ZERO, "rtx-4090", "smollm2-360m", {"sharding": "zero2", "precision": "bf16-mixed"}),
        (ZERO, "a100-80g", "gemma-2-2b", {"sharding": "zero2", "precision": "bf16-mixed"}),
        (ZERO, "a100-80g", "smollm2-360m", {"sharding": "zero2", "precision": "fp16-mixed"}),
        (ZERO, "h100-80g", "qwen2.5-1.5b", {"sharding": "zero2", "precision": "tf32"}),
        (ZERO, "b200", "llama-3.1-8b", {"sharding": "zero1", "precision": "bf16"}),
        ("emulated", "h200", "llama-3.2-1b", TIED),
    ],
)
def test_full_training_takes_what_is_predicted(folder: str, card: str, model: str, config: dict[str, Any]) -> None:
    file = RECORDED / folder / f"{card}.jsonl.gz"
    about, asked = read(file)[0], {"method": "full", **config}
    rows = [r for r in rows_of(file) if r.measured and r.job["model"] == model and asked.items() <= r.config.items()]
    for row in rows:
        check(*again((Hardware.from_json(about["hardware"]), Stack.from_json(about["stack"])), [row]))
    assert rows


def check(row: Row) -> None:
    assert row.predicted["fits"], row
    assert abs(row.error("peak_allocated_bytes") or 0.0) <= ALLOCATED, row
    assert abs(row.error("peak_reserved_bytes") or 0.0) <= RESERVED, row
