"""What estimates say of saving a checkpoint. `tests/emulated_card/test_saving.py` holds it to transformers' Trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import tiny
from test_trace import MODELS
from tiny import CPU_HARDWARE, CUDA_HARDWARE, STACK

from autofit.catalog.models import shape
from autofit.cli.text.predicted import estimate_text
from autofit.core.outcome import SAVING
from autofit.core.units import GIB
from autofit.estimate import saving
from autofit.estimate.bound import bounded
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.footprint import Footprint
from autofit.estimate.memory import lower_bound
from autofit.estimate.saving import FILE_BYTES, copied_bytes, whole_bytes, why_not_saved
from autofit.estimate.sharding.hosted import hosted_bytes
from autofit.techniques import Job, complete, parse
from autofit.techniques.deepspeed_settings import SUB_GROUP

GQA, MIXTURE = shape(MODELS["gqa"]), shape(MODELS["mixture"])


@cache
def job(devices: int = 1, name: str = "gqa") -> Job:
    stack = replace(STACK, deepspeed="installed")
    batch = {"seq_len": 64, "global_batch": 4 * devices, "devices": devices}
    return tiny.job(MODELS[name], hardware=CUDA_HARDWARE, stack=stack, **batch)


def copied(text: str, of: Job) -> int:
    return copied_bytes(complete(parse(text)), of)


def estimated(text: str, of: Job) -> Estimate:
    return Estimator(of, None).estimate(complete(parse(text)), memory_limit_bytes=80 * GIB)


@pytest.mark.parametrize(
    ("text", "devices", "per_parameter"),
    [
        ("method=full", 1, 4),
        ("method=full,precision=bf16", 1, 2),
        ("method=full,sharding=ddp", 4, 4),
        ("method=full,sharding=fsdp", 4, 8),  # the states, after the weights
        ("method=full,sharding=zero1", 4, 2 * 4),  # each rank copies the whole model
        ("method=full,sharding=zero2,precision=fp32", 4, 4 * 4),
        ("method=full,sharding=zero3", 4, 4),  # all masters at once, after the weights in 16 bits
        ("method=full,offload=optimizer", 1, 2),
        ("method=full,offload=params", 1, 2),
        ("method=lora", 1, 0),
        ("method=qlora", 1, 0),
        ("method=lora,sharding=ddp", 4, 0),
        ("method=lora,sharding=fsdp", 4, 2),
        ("method=lora,sharding=zero2", 4, 2 * 4),
        ("method=lora,sharding=zero3", 4, 0),
    ],
)
def test_copies_of_a_checkpoint(text: str, devices: int, per_parameter: int) -> None:
    assert copied(text, job(devices)) == per_parameter * GQA.parameters


def test_a_large_model_is_copied_file_by_file_and_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(GQA, parameters=70 * 10**9)
    for module in (saving, lower_bound):
        monkeypatch.setattr(module, "shape", lambda model: large)
    assert copied("method=full", job()) == FILE_BYTES
    assert copied("method=full,sharding=zero3", job(4)) == 2 * large.parameters > 4 * 4 * SUB_GROUP


def test_experts_are_split_where_they_lie() -> None:
    """On the device where it holds the whole model, else on the host."""
    split = 2 * MIXTURE.expert_parameters // 3
    assert whole_bytes(complete(parse("method=full")), job(name="mixture")) == 4 * split
    assert copied("method=full", job(name="mixture")) == 4 * MIXTURE.parameters
    assert copied("method=full,sharding=zero2", job(2, "mixture")) == 2 * (2 * MIXTURE.parameters + split)


@pytest.mark.parametrize("name", ["gqa", "tied", "mixture"])
@pytest.mark.parametrize("sharding", ["none", "ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("base", ["method=full", "method=lora,precision=bf16", "method=full,optimizer=sgd"])
def test_a_device_that_trains_saves(name: str, sharding: str, base: str) -> None:
    """So its verdict holds. Between steps lie weights and states."""
    if sharding == "fsdp" and "sgd" in base:
        pytest.skip("refused before anything runs")
    of = job(1 if sharding == "none" else 2, name)
    text = f"{base},sharding={sharding},micro_batch=1,checkpointing=full,loss=chunked"
    found = estimated(text, of)
    assert 0 < found.phase_peaks[SAVING] <= found.peak_allocated_bytes
    assert found.peak_phase != SAVING
    by_formula = bounded(found.config, of, memory_limit_bytes=80 * GIB, reason="")
    assert 0 < by_formula.phase_peaks[SAVING] <= by_formula.peak_allocated_bytes


def test_a_processor_copies_nothing() -> None:
    of = replace(job(), hardware=CPU_HARDWARE)
    found = estimated("method=full", of)
    assert found.phase_peaks[SAVING] <= found.device_bytes
    assert (copied("method=full", of), found.saving_host_bytes) == (0, found.machine_host_bytes)


def test_a_host_too_small_to_save_on_is_said() -> None:
    """It does not decide what fits: trials save nothing, and other programs save with less."""
    needed = 4 * GQA.parameters
    small, enough = (
        estimated("method=full", replace(job(), hardware=replace(CUDA_HARDWARE, host_memory_bytes=size)))
        for size in (needed - 1, needed)
    )
    assert (small.fits, small.host_short_bytes, small.cannot_save) == (True, 0, True)
    assert "host memory: does not fit, it has" in estimate_text(small)
    assert not enough.cannot_save and "of the machine's host memory; training takes none" in estimate_text(enough)
    assert enough.to_json()["saving_host_bytes"] == needed
    assert "checkpoint" not in estimate_text(estimated("method=lora", job()))


def test_a_host_too_small_to_gather_all_saves_in_shards() -> None:
    of, needed = job(2), copied("method=full,sharding=fsdp", job(2))
    small = replace(of, hardware=replace(of.hardware, host_memory_bytes=needed - 1))
    found = estimated("method=full,sharding=fsdp", small)
    assert found.cannot_save and found.saving_host_bytes == needed
    assert ": set state_dict_type: SHARDED_STATE_DICT" in estimate_text(found)
    reason = why_not_saved(found.config, small)
    assert reason is not None and f"  {reason}" in estimate_text(found)
    assert why_not_saved(found.config, replace(of, hardware=replace(of.hardware, host_memory_bytes=needed))) is None


@pytest.mark.parametrize("text", ["method=full,sharding=zero2,offload=optimizer", "method=full,sharding=ddp"])
def test_what_is_offloaded_is_there_when_a_checkpoint_is_saved(text: str) -> None:
    of, config = replace(job(2), hardware=replace(CUDA_HARDWARE, count=2)), complete(parse(text))
    needed = copied(text, of) + 2 * hosted_bytes(config, of)
    short, enough = (replace(of.hardware, host_memory_bytes=size) for size in (needed - 1, needed))
    assert why_not_saved(config, replace(of, hardware=short)) is not None
    assert why_not_saved(config, replace(of, hardware=enough)) is None


def test_an_estimate_stored_without_the_phase_is_read() -> None:
    """What a checkpoint needs of the host is not stored, but computed as it is read."""
    found = estimated("method=full", job())
    stored = found.to_json()
    del stored["phase_peaks"][SAVING], stored["saving_host_bytes"]
    earlier = Estimate.of(Footprint.from_json(stored), job())
    assert SAVING not in earlier.phase_peaks and earlier.saving_host_bytes == found.saving_host_bytes
