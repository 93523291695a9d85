"""Why one config needs other memory than another: the difference is told in full, and from figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from autofit.catalog.models import load, shape
from autofit.cli.explanation import explanation_text, step_text
from autofit.errors import UsageError
from autofit.operations import Explanation, WorkloadOptions, explain
from autofit.operations.explaining import Comparison, Step
from autofit.techniques import complete, parse

COMMON = "checkpointing=full,micro_batch=1"
NO_STORE = str(Path(__file__).with_name("no-store.db"))
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


def options(model: str, devices: int) -> WorkloadOptions:
    return WorkloadOptions(model=model, seq_len=256, global_batch=8, devices=devices)


def explained(before: str, after: str, *, devices: int = 2) -> Explanation:
    configs = (complete(parse(f"{text},{COMMON}")) for text in (before, after))
    return explain(options("smollm2-135m", devices), *configs, hardware="a100-80g", store=NO_STORE)


@cache
def comparison(model: str, devices: int) -> Comparison:
    return Comparison(options(model, devices), hardware="a100-80g", store=NO_STORE)


def changes(found: Comparison, places: Iterable[str], training: str) -> Iterator[tuple[str, str, Step]]:
    """(before, after, the change) for each pair of the possible values of `sharding` with `offload`."""
    configs = {text: complete(parse(f"{training},sharding={text},{COMMON}")) for text in places}
    possible = {text: config for text, config in configs.items() if found.refused(config) is None}
    assert len(possible) > len(configs) / 2
    for before, after in itertools.permutations(possible, 2):
        (step,) = found.steps(possible[before], possible[after])
        yield before, after, step


@pytest.fixture(scope="module")
def lora() -> Explanation:
    """LoRA from plain data parallelism to ZeRO-2."""
    return explained("method=lora,rank=16,sharding=ddp", "method=lora,rank=16,sharding=zero2")


def test_every_byte_of_the_difference_is_told(lora: Explanation) -> None:
    for found in (lora, explained("sharding=none,loss=full", "method=lora,sharding=fsdp,loss=chunked")):
        assert sum(p.difference_bytes for p in found.parts) == found.difference_bytes
        assert -sum(step.saved_bytes for step in found.steps) == found.difference_bytes
        assert found.difference_bytes == found.after.device_bytes - found.before.device_bytes


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.1-8b"])
def test_what_is_to_be_expected_follows_from_the_formats(model: str, devices: int) -> None:
    each = ONE if devices == 1 else {text: whole + shared / devices for text, (whole, shared) in SEVERAL.items()}
    parameters = shape(load(model)).parameters
    for before, after, step in changes(comparison(model, devices), each, "method=full"):
        fewer, said = each[before] - each[after], f"{before} -> {after}: {step_text(step)}"
        if fewer > NEGLIGIBLE:
            assert step.expected_bytes == step.at_most_bytes, said
            assert step.expected_bytes == pytest.approx(max(fewer * parameters, step.saved_bytes), rel=0.02), said
        elif fewer < -NEGLIGIBLE:
            assert step.expected_bytes is None, said


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("smollm2-135m", "method=full"),
        ("smollm2-135m", "method=full,precision=bf16"),
        ("smollm2-135m", "method=full,precision=fp32"),
        ("smollm2-135m", "method=lora"),
        ("smollm2-135m", "method=lora,precision=bf16"),
        ("smollm2-135m", "method=qlora"),
        ("llama-3.1-8b", "method=full"),
        ("llama-3.1-8b", "method=lora"),
        ("llama-3.1-8b", "method=qlora"),
    ],
)
def test_nothing_saves_more_than_is_expected_of_it(model: str, training: str) -> None:
    for devices, places in ((1, ONE), (2, SEVERAL)):
        stated = 0
        for before, after, step in changes(comparison(model, devices), places, training):
            if step.expected_bytes is not None and step.at_most_bytes is not None:
                said = f"{before} -> {after}: {step_text(step)}"
                assert 0 <= step.at_most_bytes <= step.expected_bytes, said
                assert step.saved_bytes <= step.at_most_bytes, said
                stated += 1
        assert stated >= len(places) * (len(places) - 1) / 4


def test_lora_leaves_zero_2_little_to_share(lora: Explanation) -> None:
    (step,) = lora.steps
    assert step.change == {"sharding": "zero2"}
    assert step.expected_bytes is not None and step.at_most_bytes is not None
    whole = explained("method=full,sharding=ddp", "method=full,sharding=zero2")
    assert step.expected_bytes == whole.steps[0].expected_bytes
    assert step.at_most_bytes < step.expected_bytes / 10
    assert any("lora trains" in reason for reason in step.reasons)


def test_the_reasons_account_for_the_difference_of_the_peaks() -> None:
    (step,) = explained("method=full,sharding=ddp", "method=full,sharding=zero2").steps
    assert step.expected_bytes == step.at_most_bytes
    assert "weights, gradients and optimizer states take" in step.reasons[0]
    assert not any("trains" in reason for reason in step.reasons)


def test_one_device_stands_beside_several_with_as_many_sequences_each() -> None:
    found = explained("method=full,sharding=none", "method=full,sharding=fsdp")
    assert found.before.config["sharding"] == "none"
    (step,) = found.steps
    assert step.expected_bytes is not None and step.expected_bytes >= 134_515_008 * 16 // 2 * 0.99


def test_the_text_has_the_table_and_the_reasons(lora: Explanation) -> None:
    text = explanation_text(lora)
    assert "gradients" in text and "device memory" in text
    assert "sharding=zero2" in text and "to be expected if all parameters were trained" in text
    same = explanation_text(explained("method=lora,sharding=ddp", "method=lora,sharding=ddp"))
    assert "the two configs are the same" in same


def test_the_document_has_both_estimates_and_the_steps(lora: Explanation) -> None:
    document = lora.to_json()
    assert set(document) == {"before", "after", "difference_bytes", "parts", "steps"}
    assert document["parts"]["gradients"].keys() == {"before", "after", "difference"}
    assert document["steps"][0].keys() == {"change", "saved_bytes", "expected_bytes", "at_most_bytes", "reasons"}


def test_what_cannot_be_estimated_is_refused_by_its_reason() -> None:
    with pytest.raises(UsageError, match="several devices"):
        explained("sharding=none", "sharding=zero2", devices=1)
