"""What an estimate says that it assumes, held against the records that it speaks of."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import CPU_HARDWARE, CUDA_HARDWARE, LLAMA, STACK

from autofit.estimate.assumptions import assumptions
from autofit.hardware import Hardware
from autofit.techniques import Job, complete, parse
from autofit.workload import Workload

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded"
RECORD = RECORDED / "cpu-zen5-2c-sharded-memory.json"


def heap_sentence(text: str, hardware: Hardware = CPU_HARDWARE) -> str | None:
    workload = Workload(model=LLAMA.name, model_digest=LLAMA.digest, seq_len=16, global_batch=4, devices=2)
    job = Job(model=LLAMA, workload=workload, hardware=hardware, stack=replace(STACK, deepspeed="installed"))
    return next((said for said in assumptions(complete(parse(text)), job) if "C library" in said), None)


def test_a_processors_memory_is_said_to_be_off_by_what_was_recorded() -> None:
    errors = json.loads((RECORDED / "estimate-cpu.json").read_text(encoding="utf-8"))["all_tables"]["memory"]
    median, worst = math.ceil(100 * errors["median_absolute_error"]), round(100 * abs(errors["worst_error"]))
    said = heap_sentence("method=full")
    assert said is not None
    assert said.endswith(f"half of them were off by less than {median} %, and the worst by {worst} %")


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_processors_ranks_are_said_to_be_off_by_what_was_recorded(sharding: str) -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["configs"]
    errors = {(row["config"]["sharding"], row["config"]["method"]): row["error"] for row in rows}
    said = heap_sentence(f"sharding={sharding}")
    assert said is not None
    median = int(100 * statistics.median(map(abs, errors.values())))
    assert f"of {len(errors)} predictions for two ranks half were off by more than {median} %" in said
    low = [-error for (name, _), error in errors.items() if name in ("zero3", "fsdp")]
    assert f"{100 * min(low):.0f} to {100 * max(low):.0f} % too low" in said
    assert "with offload" not in said


def test_what_was_not_compared_is_not_said_to_be_close() -> None:
    offloaded = heap_sentence("sharding=zero3,offload=params")
    assert offloaded is not None and "none with offload was compared" in offloaded
    alone = heap_sentence("method=full")
    assert alone is not None and "ranks" not in alone
    assert heap_sentence("sharding=zero3", CUDA_HARDWARE) is None
