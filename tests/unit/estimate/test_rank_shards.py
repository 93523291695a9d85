"""What is predicted of a rank's shards, against what the libraries' engines hold on two gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from autofit.estimate.estimator import Estimator
from autofit.estimate.events import PHASES
from autofit.estimate.tape import Category
from autofit.estimate.timeline import Timeline
from autofit.techniques import complete, parse, unsupported

sys.path.insert(0, str(Path(__file__).parent))

from held_by_ranks import shared_job

CLOSE = 0.02
"""Relative error asked of shards."""
CONFIGS = (
    "sharding=ddp,micro_batch=2",
    "sharding=ddp,micro_batch=4",
    "sharding=fsdp,micro_batch=2",
    "sharding=fsdp-no-reshard,micro_batch=2,precision=bf16",
    "sharding=fsdp,micro_batch=4,method=lora,rank=8",
    "sharding=zero1,micro_batch=2",
    "sharding=zero1,micro_batch=2,precision=bf16",
    "sharding=zero2,micro_batch=2",
    "sharding=zero2,micro_batch=2,method=lora,rank=8",
    "sharding=zero3,micro_batch=2",
    "sharding=zero3,micro_batch=2,precision=fp32",
    "sharding=zero3,micro_batch=2,method=lora,rank=8",
)
OFFLOADED = (
    "sharding=zero3,micro_batch=2,offload=optimizer",
    "sharding=zero3,micro_batch=2,offload=params",
    "sharding=fsdp,micro_batch=2,offload=params",
)
STAGE_2 = "sharding=zero2,micro_batch=2,offload=optimizer"


@pytest.fixture(scope="module")
def held(compiled_adam: None) -> dict[str, list[list[dict[str, int]]]]:
    """By config, per rank: what its engine holds before the first update and after it, and what passes."""
    program = Path(__file__).with_name("held_by_ranks.py")
    every = [*CONFIGS, *OFFLOADED, STAGE_2]
    run = subprocess.run([sys.executable, str(program), *every], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    ranks = json.loads(run.stdout.splitlines()[-1])
    return {config: [rank[index] for rank in ranks] for index, config in enumerate(every)}


def bytes_at(line: Timeline, until: int) -> dict[Category, int]:
    found = np.bincount(line.categories[:until], weights=line.sizes[:until], minlength=len(Category))
    return {category: int(found[category]) for category in Category}


@pytest.mark.parametrize("config", [*CONFIGS, *OFFLOADED])
def test_the_fullest_rank_holds_what_is_predicted(config: str, held: dict[str, list[list[dict[str, int]]]]) -> None:
    wanted = complete(parse(config))
    assert unsupported(wanted, shared_job()) is None
    traced = Estimator(shared_job(), None).trace(wanted)
    line = traced.timeline
    updates = np.flatnonzero(line.phases == PHASES.index("optimizer"))
    first = bytes_at(line, updates[0] if len(updates) else len(line.sizes))
    last = bytes_at(line, len(line.sizes))
    before, after, _ = (most(ranks) for ranks in zip(*held[config], strict=True))
    assert first[Category.WEIGHTS] == pytest.approx(before["parameters"], rel=CLOSE, abs=512)
    assert first[Category.GRADIENTS] == pytest.approx(before["gradients"], rel=CLOSE, abs=512)
    assert last[Category.OPTIMIZER] == pytest.approx(after["optimizer"], rel=CLOSE, abs=512)
    on_host = after["host_parameters"] + before["host_gradients"] + after["host_optimizer"]
    assert traced.hosted_bytes == pytest.approx(on_host, rel=CLOSE)


@pytest.mark.parametrize(
    ("config", "beside"),
    [(STAGE_2, 0.0), *((config, 0.5) for config in OFFLOADED if "zero3" in config)],  # a part in fp32 beside the fp64
)
def test_a_norm_is_taken_of_a_wide_copy_on_the_device(
    config: str, beside: float, held: dict[str, list[list[dict[str, int]]]]
) -> None:
    wide = most([rank[2] for rank in held[config]])["fp64"]
    line = Estimator(shared_job(), None).trace(complete(parse(config))).timeline
    assert wide > 2**16
    assert int(wide * (1.0 + beside)) in line.sizes[line.phases == PHASES.index("backward")]


def test_gradients_on_their_way_to_the_host_pass_through_a_buffer(held: dict[str, list[list[dict[str, int]]]]) -> None:
    buffer = most([rank[2] for rank in held[STAGE_2]])["on_the_way"]
    found = Estimator(shared_job(), None).holdings(complete(parse(STAGE_2)))
    assert buffer == found.largest_bytes


def most(ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    """Of each figure the largest over the ranks: a group's memory."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}
