"""The search spaces of the benchmarks: what each covers."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

from unit.operations.made_trials import HARDWARE, STACK, make_job

from autofit.catalog.space import load
from autofit.core.lattice import Value
from autofit.operations.recording.record import _covering
from autofit.techniques import AXES, complete, unsupported

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PAGED = "paged-adamw-8bit"

RECORDED = [axis for axis in AXES if axis.name not in ("batching", "kernels", "mlp", "update")]
"""Recorded sequences are all full, which leaves nothing to batch otherwise, and were before there were the others."""


def test_the_recorded_space_is_the_built_in_one_of_then() -> None:
    built_in, recorded = load("single-gpu", AXES), load(str(BENCHMARKS / "single_gpu_resident.yaml"), AXES)
    configs = {config for config in built_in.configs(AXES, batch=64) if "kernels" not in config}
    assert set(recorded.configs(AXES, batch=64)) == configs


def test_what_needs_a_large_host_is_recorded_only_when_asked() -> None:
    usual, large = (
        set(load(str(BENCHMARKS / name), AXES).configs(AXES, batch=16))
        for name in ("offload_8b.yaml", "offload_8b_large_host.yaml")
    )
    assert usual and large and not usual & large
    assert {config["offload"] for config in usual} == {"none", "optimizer", "params"}
    assert all(config["precision"] == "bf16-mixed" and config["offload"] != "none" for config in large)


def test_every_axis_of_a_gpu_has_every_value_that_trains_on_one_card() -> None:
    found: dict[str, set[Value]] = {axis.name: set() for axis in RECORDED}
    for config in load(str(BENCHMARKS / "gpu_every_axis.yaml"), AXES).configs(AXES, batch=1):
        for axis, value in config.items:
            found[axis].add(value)
    left_out = {axis.name: set(axis.values) - found[axis.name] for axis in RECORDED}
    assert {name: values for name, values in left_out.items() if values} == {
        "optimizer": {PAGED},
        "offload": {"nvme"},
        "sharding": {value for axis in RECORDED if axis.name == "sharding" for value in axis.values} - {"none"},
    }
    assert len(found["rank"]) > 1


def test_a_covering_table_has_every_value_that_one_processor_trains_with() -> None:
    job = make_job(hardware=replace(HARDWARE, kind="cpu", cores=2), stack=replace(STACK, deepspeed="0.19.8"))
    every = load(str(BENCHMARKS / "every_axis.yaml"), AXES).configs(AXES, batch=4)
    configs = [config for config in every if unsupported(config, job) is None]
    random.Random(0).shuffle(configs)
    seen = Counter(value for config in _covering(configs, 66) for value in config.items)
    assert min(seen.values()) >= 5 and sum(axis == "rank" for axis, _ in seen) > 1
    others = {(axis.name, value) for axis in RECORDED for value in axis.values} - set(seen)
    trains = {value for value in others if unsupported(complete({"method": "lora", **dict([value])}), job) is None}
    assert trains == {("precision", "fp16-mixed"), ("offload", "nvme")}, "the file's first lines say why"


def test_the_grid_is_complete_for_each_method_and_of_a_size_that_can_be_recorded() -> None:
    configs = list(load(str(BENCHMARKS / "gpu_grid.yaml"), AXES).configs(AXES, batch=16))
    assert 100 <= len(configs) <= 200
    for method in ("full", "lora", "qlora"):
        own = [config for config in configs if config["method"] == method]
        counts = [len({config.get(axis.name) for config in own}) for axis in RECORDED]
        assert len(own) == math.prod(counts) > 30
