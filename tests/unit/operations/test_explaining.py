"""Why one config needs other memory than another: the difference is told in full, and from figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from autofit.catalog.models import load, shape
from autofit.cli.text.explanation import explanation_text, step_text
from autofit.core.errors import UsageError
from autofit.operations import Comparison, Explanation, WorkloadOptions
from autofit.operations.explaining import Step
from autofit.techniques import complete, parse

COMMON = "checkpointing=full,micro_batch=1"
ONE = {"none": 16, "none,offload=optimizer": 2, "none,offload=params": 0, "none,offload=nvme": 0}
"""Bytes of weights, gradients and optimizer states per parameter on one device as an update begins, in mixed precision
and with AdamW: fp32 throughout, and with the optimizer on the host 16-bit weights."""
SEVERAL = {
    "none": (16, 0),
    "ddp": (16, 0),
    "zero1": (2 + 2 + 4, 4 + 8),
    "zero2": (2, 4 + 4 + 8),
    "zero3": (0, 2 + 4 + 4 + 8),
    "fsdp": (0, 16),
    "fsdp-no-reshard": (0, 16),
    "zero1,offload=optimizer": (2, 0),
    "zero2,offload=optimizer": (2, 0),
    "zero3,offload=optimizer": (0, 2),
    "zero3,offload=params": (0, 0),
    "zero3,offload=nvme": (0, 0),
    "fsdp,offload=params": (0, 0),
    "fsdp-no-reshard,offload=params": (0, 0),
}
"""The same on several: (whole on each, shared by all). ZeRO has 16-bit weights and their fp32 masters; in its first
stage gradients are there in both formats."""
NEGLIGIBLE = 0.05
"""Bytes per parameter: small parameters are not shared, and blocks are rounded up."""
BESIDE = 4 + 2
"""Bytes per parameter by which peaks may differ in addition: gradients on their way, and 16-bit copies of weights."""


def options(model: str, devices: int) -> WorkloadOptions:
    return WorkloadOptions(model=model, seq_len=256, global_batch=8, devices=devices)


def explained(before: str, after: str, *, devices: int = 2) -> Explanation:
    configs = (complete(parse(f"{text},{COMMON}")) for text in (before, after))
    return comparison("smollm2-135m", devices).explanation(*configs)


@cache
def comparison(model: str, devices: int) -> Comparison:
    return Comparison(options(model, devices), hardware="a100-80g")


def changes(found: Comparison, places: Iterable[str], training: str) -> Iterator[tuple[str, str, Step]]:
    """(before, after, the change) for each pair of the possible values of `sharding` with `offload`."""
    configs = {text: complete(parse(f"{training},sharding={text},{COMMON}")) for text in places}
    possible = {text: config for text, config in configs.items() if found.refused(config) is None}
    assert len(possible) > len(configs) / 2
    for before, after in itertools.permutations(possible, 2):
        (step,) = found.steps(possible[before], possible[after])
        yield before, after, step


def per_parameter(devices: int) -> dict[str, float]:
    """Bytes per parameter on each device."""
    if devices == 1:
        return dict(ONE)
    return {text: whole + shared / devices for text, (whole, shared) in SEVERAL.items()}


@pytest.fixture(scope="module")
def lora() -> Explanation:
    """LoRA from plain data parallelism to ZeRO-2."""
    return explained("method=lora,rank=16,sharding=ddp", "method=lora,rank=16,sharding=zero2")


def test_every_byte_of_the_difference_is_told(lora: Explanation) -> None:
    for result in (lora, explained("sharding=none,loss=full", "method=lora,sharding=fsdp,loss=chunked")):
        assert (
            sum(result.after.breakdown[part] - size for part, size in result.before.breakdown.items())
            == result.difference_bytes
        )
        assert -sum(step.saved_bytes for step in result.steps) == result.difference_bytes
        assert result.difference_bytes == result.after.device_bytes - result.before.device_bytes


@pytest.mark.parametrize(("model", "devices"), [("llama-3.1-8b", 1), ("smollm2-135m", 2)])
def test_what_is_saved_follows_from_the_formats(model: str, devices: int) -> None:
    each, parameters = per_parameter(devices), shape(load(model)).parameters
    for before, after, step in changes(comparison(model, devices), each, "method=full"):
        fewer, said = each[before] - each[after], f"{before} -> {after}: {step_text(step)}"
        if fewer > NEGLIGIBLE:
            assert abs(step.saved_bytes - fewer * parameters) < BESIDE * parameters, said


def test_lora_leaves_zero_2_little_to_share(lora: Explanation) -> None:
    (step,), (whole,) = lora.steps, explained("method=full,sharding=ddp", "method=full,sharding=zero2").steps
    assert step.change == whole.change == {"sharding": "zero2"}
    assert step.saved_bytes < whole.saved_bytes / 10
    assert whole.reasons[0].startswith("at the peak: ")


def test_one_device_stands_beside_several_with_as_many_sequences_each() -> None:
    result = explained("method=full,sharding=none", "method=full,sharding=fsdp")
    assert result.before.config["sharding"] == "none"
    (step,) = result.steps
    assert step.saved_bytes == pytest.approx(134_515_008 * 16 // 2, abs=134_515_008 * BESIDE)


def test_the_text_has_the_table_and_the_reasons(lora: Explanation) -> None:
    text = explanation_text(lora)
    assert "gradients" in text and "device memory" in text
    assert "sharding=zero2 saves" in text
    same = explanation_text(explained("method=lora,sharding=ddp", "method=lora,sharding=ddp"))
    assert "the two configs are the same" in same


def test_the_document_has_both_estimates_and_the_steps(lora: Explanation) -> None:
    document = lora.to_json()
    assert set(document) == {"before", "after", "difference_bytes", "parts", "steps"}
    assert document["parts"]["gradients"].keys() == {"before", "after", "difference"}
    assert document["steps"][0].keys() == {"change", "saved_bytes", "reasons"}


def test_what_cannot_be_estimated_is_refused_by_its_reason() -> None:
    with pytest.raises(UsageError, match="several devices"):
        explained("sharding=none", "sharding=zero2", devices=1)
