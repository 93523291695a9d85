"""What is predicted of a rank's shards, against what the libraries' engines hold on one and on two gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tiny import FSDP_TAKES_QLORA

from autofit.core.outcome import PHASES
from autofit.estimate.estimator import Estimator
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.memory.timeline import Timeline
from autofit.estimate.sharding import library
from autofit.estimate.sharding.zero import Zero
from autofit.techniques import Job, complete, parse, unsupported
from autofit.techniques.axes.sharding import NVME_VARIABLE

sys.path.insert(0, str(Path(__file__).parent))

from held_by_ranks import job_of

CLOSE = 0.02
"""Relative error asked of shards."""
SCALARS = 2048
"""Bytes that rounding every tensor up to 64 bytes may add: Adafactor, and Adam, which counts its steps, have a scalar
for each parameter, a 4-bit weight has two, and this model has 21 parameters, or 28 adapters."""
CONFIGS = (
    "sharding=ddp,micro_batch=2",
    "sharding=fsdp,micro_batch=2",
    "sharding=fsdp-no-reshard,micro_batch=2,precision=bf16",
    "sharding=fsdp,micro_batch=4,method=lora,rank=8",
    "sharding=zero1,micro_batch=2,precision=bf16",
    "sharding=zero1,micro_batch=2,method=lora,rank=8",
    "sharding=zero2,micro_batch=2",
    "sharding=zero2,micro_batch=4,precision=bf16",
    "sharding=zero3,micro_batch=2,precision=bf16",
    "sharding=zero3,micro_batch=2,method=lora,rank=8",
)
QLORA = tuple(
    f"sharding={sharding},micro_batch=2,method=qlora,rank=8"
    for sharding in ("zero1", "zero3", *(["fsdp"] if FSDP_TAKES_QLORA else []))
)
OPTIMIZERS = (
    "sharding=ddp,micro_batch=2,optimizer=adafactor",
    "sharding=fsdp,micro_batch=2,optimizer=adamw-foreach",
    "sharding=zero2,micro_batch=2,optimizer=adamw-8bit",
    "sharding=zero3,micro_batch=2,optimizer=lion",
)
STAGE_2 = "sharding=zero2,micro_batch=2,offload=optimizer"
STAGE_3 = "sharding=zero3,micro_batch=2,offload=optimizer"
PARAMS = "sharding=zero3,micro_batch=2,offload=params"
OFFLOADED = (
    STAGE_2,
    f"{STAGE_2},precision=bf16",
    "sharding=zero2,micro_batch=4,offload=optimizer,precision=fp32",
    "sharding=zero1,micro_batch=2,offload=optimizer",
    STAGE_3,
    PARAMS,
    f"{PARAMS},method=qlora,rank=8",
    "sharding=fsdp,micro_batch=2,offload=params,optimizer=adamw-foreach",
)
ALONE = (
    "micro_batch=2,offload=optimizer,precision=bf16",
    "micro_batch=4,offload=optimizer",
    "micro_batch=2,offload=params",
    "micro_batch=2,offload=params,method=qlora,rank=8",
)
"""On one rank."""
IN_FILES = ("micro_batch=2,offload=nvme", "sharding=zero3,micro_batch=2,offload=nvme,precision=fp32")
"""Where libaio is there."""
EVERY = (*CONFIGS, *QLORA, *OPTIMIZERS, *OFFLOADED, *ALONE)


K = TypeVar("K")
Held = dict[str, list[list[dict[str, int]]]]
"""By config, per rank: what its engine holds before the first update and after it, and what passes."""


def held_by(configs: Sequence[str]) -> Held:
    program = Path(__file__).with_name("held_by_ranks.py")
    run = subprocess.run([sys.executable, str(program), *configs], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(zip(configs, json.loads(run.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def held(compiled_adam: None) -> Held:
    return held_by(EVERY)


@pytest.fixture(scope="module")
def held_beside_files(compiled_files: None, tmp_path_factory: pytest.TempPathFactory) -> Held:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NVME_VARIABLE, str(tmp_path_factory.mktemp("nvme")))
        return held_by(IN_FILES)


def estimator(config: str) -> Estimator:
    return _estimator(job_of(config))


@cache
def _estimator(job: Job) -> Estimator:
    return Estimator(job, None)


def as_update_begins(line: Timeline) -> int:
    """The first event of an update."""
    updates = np.flatnonzero(line.phases == PHASES.index("optimizer"))
    return int(updates[0]) if len(updates) else len(line.sizes)


def bytes_at(line: Timeline, until: int) -> dict[Category, int]:
    found = np.bincount(line.categories[:until], weights=line.sizes[:until], minlength=len(Category))
    return {category: int(found[category]) for category in Category}


@pytest.mark.parametrize("config", EVERY)
def test_the_fullest_rank_holds_what_is_predicted(config: str, held: Held) -> None:
    check(config, held[config])


OF_FSDP = [config for config in EVERY if "fsdp" in config and "offload" not in config and "qlora" not in config]


@pytest.mark.parametrize("config", OF_FSDP)
def test_nothing_of_fsdp_is_whole_after_a_reference_loss(config: str, held: Held) -> None:
    assert [passing["divided"] for _, _, passing in held[config]] == [
        before["parameters"] for before, _, _ in held[config]
    ]


def test_each_of_four_ranks_has_its_part_of_the_flat_buffer() -> None:
    """The second and third ranks are neither the first nor the last: the fullest stands for both."""
    chosen = complete(parse("sharding=zero2,micro_batch=2"))
    of_two, of_four = (
        library(chosen, replace(job_of(""), workload=replace(job_of("").workload, devices=devices)))
        for devices in (2, 4)
    )
    assert isinstance(of_two, Zero) and isinstance(of_four, Zero)
    assert [[rank.part for rank in of.extremes] for of in (of_two, of_four)] == [[-1, 0], [-1, 0, None]]
    assert of_four.parts([6, 2, 4, 4]) == [{0: 4}, {0: 2, 1: 2}, {2: 4}, {3: 4}]


@pytest.mark.parametrize("config", IN_FILES)
def test_the_fullest_rank_holds_what_is_predicted_beside_files(config: str, held_beside_files: Held) -> None:
    check(config, held_beside_files[config])


def check(config: str, held: list[list[dict[str, int]]]) -> None:
    """Hold the prediction for `config` against what each of its ranks held."""
    wanted = complete(parse(config))
    assert unsupported(wanted, job_of(config)) is None
    traced = estimator(config).trace(wanted)
    first = most([bytes_at(line, as_update_begins(line)) for line in traced.timelines])
    last = most([bytes_at(line, len(line.sizes)) for line in traced.timelines])
    before, after, passing = (most(of_ranks) for of_ranks in zip(*held, strict=True))
    assert first[Category.WEIGHTS] == pytest.approx(before["parameters"], rel=CLOSE, abs=SCALARS)
    assert first[Category.GRADIENTS] == pytest.approx(before["gradients"], rel=CLOSE, abs=512)
    assert last[Category.OPTIMIZER] == pytest.approx(after["optimizer"], rel=CLOSE, abs=SCALARS)
    assert traced.hosted.parameters == pytest.approx(after["host_parameters"], rel=CLOSE, abs=SCALARS)
    assert traced.hosted.gradients == pytest.approx(before["host_gradients"], rel=CLOSE, abs=512)
    assert traced.hosted.optimizer == pytest.approx(after["host_optimizer"], rel=CLOSE, abs=SCALARS)
    roots = passing["roots"] if wanted["offload"] != "none" else 0
    through = passing["host_out"] + passing["host_back"] + passing["locked"] + roots
    assert traced.hosted.passing == pytest.approx(through, rel=CLOSE)


@pytest.mark.parametrize(
    ("config", "beside"),
    [(STAGE_2, 0.0), (STAGE_3, 0.5), (PARAMS, 0.5)],  # a part in fp32 beside the fp64
)
def test_a_norm_is_taken_of_a_wide_copy_on_the_device(config: str, beside: float, held: Held) -> None:
    wide = most([rank[2] for rank in held[config]])["fp64"]
    line = estimator(config).trace(complete(parse(config))).timeline
    assert wide > 2**16
    assert int(wide * (1.0 + beside)) in line.sizes[line.phases == PHASES.index("backward")]


@pytest.mark.parametrize("config", [STAGE_2, f"{STAGE_2},precision=bf16"])
def test_gradients_and_weights_on_their_way_pass_through_buffers(config: str, held: Held) -> None:
    passing = most([rank[2] for rank in held[config]])
    chosen = complete(parse(config))
    found = estimator(config)._traces.holdings(chosen, library(chosen, job_of(config)))
    assert passing["host_out"] == max(found.sizes)
    assert passing["host_back"] == pytest.approx(found.trained_bytes / 2, rel=1e-3)


def most(ranks: Sequence[dict[K, int]]) -> dict[K, int]:
    """Of each figure the largest over the ranks: a group's memory."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}
