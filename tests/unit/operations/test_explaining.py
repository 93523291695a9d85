"""Why one config needs other memory than another: the difference is told in full, and from figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tiny import shallow

from autofit.catalog.models import load, shape
from autofit.cli.text.explanation import explanation_text, step_text
from autofit.core.errors import UsageError
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
FROZEN = {name: (0, 0) if "params" in name or "nvme" in name else (2, 0) for name in (*ONE, *SEVERAL)}
FROZEN |= {name: (0, 2) for name in ("zero3", "fsdp", "fsdp-no-reshard", "zero3,offload=optimizer")}
"""The same of what an adapter leaves frozen: 16-bit weights."""
NEGLIGIBLE = 0.05
"""Bytes per parameter: small parameters are not shared, and blocks are rounded up."""
BESIDE = 4 + 2
"""Bytes per parameter by which peaks may differ in addition: gradients on their way, and 16-bit copies of weights."""


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


def per_parameter(several: dict[str, tuple[int, int]], devices: int) -> dict[str, float]:
    """Bytes per parameter on each device."""
    if devices == 1:
        return {text: several[text][0] if several is FROZEN else ONE[text] for text in ONE}
    return {text: several[text][0] + several[text][1] / devices for text in SEVERAL}


def adapters_of(model: str, *, rank: int) -> int:
    """Parameters of the adapters of every matrix of a Llama's layers."""
    found = load(model).config
    hidden, between, heads = found["hidden_size"], found["intermediate_size"], found["num_attention_heads"]
    keys = found["num_key_value_heads"] * hidden // heads
    sides = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden), *[(hidden, between)] * 3]
    return found["num_hidden_layers"] * sum(rank * (a + b) for a, b in sides)


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with Llama 3.1 8B of fewer layers."""
    folder = tmp_path_factory.mktemp("few-layers")
    (folder / "config.json").write_text(json.dumps(dict(shallow("llama-3.1-8b", 8).config)))
    return str(folder)


@pytest.fixture(scope="module")
def lora() -> Explanation:
    """LoRA from plain data parallelism to ZeRO-2."""
    return explained("method=lora,rank=16,sharding=ddp", "method=lora,rank=16,sharding=zero2")


def test_every_byte_of_the_difference_is_told(lora: Explanation) -> None:
    for found in (lora, explained("sharding=none,loss=full", "method=lora,sharding=fsdp,loss=chunked")):
        assert (
            sum(found.after.breakdown[part] - size for part, size in found.before.breakdown.items())
            == found.difference_bytes
        )
        assert -sum(step.saved_bytes for step in found.steps) == found.difference_bytes
        assert found.difference_bytes == found.after.device_bytes - found.before.device_bytes


@pytest.mark.parametrize(("model", "devices"), [("llama-3.1-8b", 1), ("smollm2-135m", 2)])
def test_what_is_to_be_expected_follows_from_the_formats(model: str, devices: int) -> None:
    each, parameters = per_parameter(SEVERAL, devices), shape(load(model)).parameters
    for before, after, step in changes(comparison(model, devices), each, "method=full"):
        fewer, said = each[before] - each[after], f"{before} -> {after}: {step_text(step)}"
        if fewer > NEGLIGIBLE:
            assert step.expected_bytes == step.expected_here_bytes, said
            assert step.expected_bytes == pytest.approx(fewer * parameters, rel=0.02), said
            assert abs(step.saved_bytes - fewer * parameters) < BESIDE * parameters, said
        else:
            assert step.expected_bytes is None, said


@pytest.mark.parametrize("devices", [2])
def test_what_is_to_be_expected_of_adapters_follows_from_theirs(few_layers: str, devices: int) -> None:
    model = few_layers  # of a size next to whose adapters the rounding of blocks is small
    frozen, trained = per_parameter(FROZEN, devices), per_parameter(SEVERAL, devices)
    parameters, adapters = shape(load(model)).parameters, adapters_of(model, rank=8)
    stated = 0
    for before, after, step in changes(comparison(model, devices), trained, "method=lora,rank=8"):
        fewer = (frozen[before] - frozen[after]) * parameters + (trained[before] - trained[after]) * adapters
        if step.expected_here_bytes is not None:
            # The smaller ones of ZeRO-3 are not shared.
            near = 2 * adapters if "zero3" in before + after else 0
            expected = pytest.approx(max(fewer, 0), rel=0.02, abs=near)
            assert step.expected_here_bytes == expected, f"{before} -> {after}: {step_text(step)}"
            stated += 1
    assert stated >= len(trained) * (len(trained) - 1) / 5


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        (2, 4, "saves 2.00 GiB of the 4.00 GiB to be expected"),
        (5, 4, "saves 5.00 GiB, more than the 4.00 GiB to be expected"),
        (-1, 4, "costs 1.00 GiB instead of saving the 4.00 GiB to be expected"),
        (3, 1, "saves 3.00 GiB of the 4.00 GiB to be expected if all parameters were trained; here it is 1.00 GiB"),
        (0, 0, "saves 0 B of the 4.00 GiB to be expected if all parameters were trained; here it is nothing"),
    ],
)
def test_what_is_saved_is_set_beside_what_is_to_be_expected(saved: int, here: int, said: str) -> None:
    sizes = {"saved_bytes": saved * 2**30, "expected_bytes": 4 * 2**30, "expected_here_bytes": here * 2**30}
    assert step_text(Step(change={"sharding": "zero2"}, reasons=(), **sizes)) == f"sharding=zero2 {said}"


def test_lora_leaves_zero_2_little_to_share(lora: Explanation) -> None:
    (step,) = lora.steps
    assert step.change == {"sharding": "zero2"}
    assert step.expected_bytes is not None and step.expected_here_bytes is not None
    whole = explained("method=full,sharding=ddp", "method=full,sharding=zero2")
    assert step.expected_bytes == whole.steps[0].expected_bytes
    assert step.expected_here_bytes < step.expected_bytes / 10
    assert any("lora trains" in reason for reason in step.reasons)


def test_the_reasons_account_for_the_difference_of_the_peaks() -> None:
    (step,) = explained("method=full,sharding=ddp", "method=full,sharding=zero2").steps
    assert step.expected_bytes == step.expected_here_bytes
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
    assert document["steps"][0].keys() == {"change", "saved_bytes", "expected_bytes", "expected_here_bytes", "reasons"}


def test_what_cannot_be_estimated_is_refused_by_its_reason() -> None:
    with pytest.raises(UsageError, match="several devices"):
        explained("sharding=none", "sharding=zero2", devices=1)
