"""Why one config needs other memory than another: the difference is told in full, and from figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.cli.explanation import explanation_text
from autofit.errors import UsageError
from autofit.operations import Explanation, WorkloadOptions, explain
from autofit.techniques import complete, parse

COMMON = "checkpointing=full,micro_batch=1"
NO_STORE = str(Path(__file__).with_name("no-store.db"))


def explained(before: str, after: str, *, devices: int = 2) -> Explanation:
    options = WorkloadOptions(model="smollm2-135m", seq_len=256, global_batch=8, devices=devices)
    configs = (complete(parse(f"{text},{COMMON}")) for text in (before, after))
    return explain(options, *configs, hardware="a100-80g", store=NO_STORE)


@pytest.fixture(scope="module")
def lora() -> Explanation:
    """LoRA from plain data parallelism to ZeRO-2."""
    return explained("method=lora,rank=16,sharding=ddp", "method=lora,rank=16,sharding=zero2")


def test_every_byte_of_the_difference_is_told(lora: Explanation) -> None:
    for found in (lora, explained("sharding=none,loss=full", "method=lora,sharding=fsdp,loss=chunked")):
        assert sum(p.difference_bytes for p in found.parts) == found.difference_bytes
        assert -sum(step.saved_bytes for step in found.steps) == found.difference_bytes
        assert found.difference_bytes == found.after.device_bytes - found.before.device_bytes


def test_lora_leaves_zero_2_little_to_share(lora: Explanation) -> None:
    (step,) = lora.steps
    assert step.change == {"sharding": "zero2"}
    assert step.expected_bytes is not None and step.at_most_bytes is not None
    parameters = 134_515_008
    # Gradients in fp32 and AdamW's two states, of which one half goes to the other device.
    assert step.expected_bytes == pytest.approx(parameters * (4 + 8) / 2, rel=0.01)
    trained = sum(p.before_bytes for p in lora.parts if p.name == "optimizer") / 8
    assert step.at_most_bytes == pytest.approx(trained * (4 + 8) / 2, rel=0.05)
    assert step.at_most_bytes < step.expected_bytes / 10
    assert any("lora trains" in reason for reason in step.reasons)


def test_full_training_has_all_that_was_expected() -> None:
    (step,) = explained("method=full,sharding=ddp", "method=full,sharding=zero2").steps
    assert step.expected_bytes == step.at_most_bytes
    assert step.saved_bytes > 0.5 * (step.expected_bytes or 0)
    assert not any("trains" in reason for reason in step.reasons)


def test_what_is_already_shared_is_not_expected_again() -> None:
    (step,) = explained("method=full,sharding=zero1", "method=full,sharding=zero2").steps
    assert step.expected_bytes == pytest.approx(134_515_008 * 4 / 2, rel=0.01)


def test_one_device_stands_beside_several_with_as_many_sequences_each() -> None:
    found = explained("method=full,sharding=none", "method=full,sharding=fsdp")
    assert found.before.config["sharding"] == "none"
    (step,) = found.steps
    assert step.expected_bytes == pytest.approx(134_515_008 * 16 / 2, rel=0.01)


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
