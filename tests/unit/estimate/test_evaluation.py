"""Estimates of training that evaluates between its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_trace import MODELS
from test_trace import job as job_of
from tiny import CUDA_HARDWARE

from autofit.cli.text.predicted import estimate_text
from autofit.core.device.hardware import Hardware
from autofit.core.outcome import EVALUATION, PHASES, SAVING
from autofit.core.units import GIB
from autofit.estimate.bound import bounded
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.identity import EstimateKeys
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.export.charts.memory_chart import course
from autofit.techniques import Job, complete, parse

CPU = Hardware(name="cpu-x", kind="cpu", device_name="x", memory_bytes=64 * GIB, cores=2)


def job(eval_batch: int | None, *, model: str = "gqa", hardware: Hardware = CUDA_HARDWARE) -> Job:
    of = job_of(MODELS[model])
    return replace(of, workload=replace(of.workload, eval_batch=eval_batch), hardware=hardware)


def predicted(text: str, of: Job, *, exact: bool = False) -> Estimate:
    return Estimator(of, None, exact=exact).estimate(complete(parse(text)), memory_limit_bytes=80 * GIB)


@pytest.mark.parametrize("hardware", [CUDA_HARDWARE, CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize("text", ["method=full", "method=qlora,precision=bf16,checkpointing=full,loss=chunked"])
def test_training_takes_what_it_takes_without_evaluation(text: str, hardware: Hardware) -> None:
    alone, few, many = (predicted(text, job(n, hardware=hardware)) for n in (None, 1, 256))
    assert set(alone.phase_peaks) == {*PHASES, SAVING}
    assert set(few.phase_peaks) == {*PHASES, EVALUATION, SAVING}
    assert all(few.phase_peaks[phase] == alone.phase_peaks[phase] for phase in PHASES)
    # No gradient and nothing saved: what trains fits evaluates as many.
    assert few.phase_peaks[EVALUATION] <= max(alone.phase_peaks.values())
    assert few.peak_allocated_bytes == alone.peak_allocated_bytes
    assert many.peak_phase == EVALUATION and many.device_bytes > few.device_bytes
    assert sum(many.breakdown.values()) == many.device_bytes
    if hardware is CUDA_HARDWARE:  # a processor's heap keeps what gradients have taken
        assert not many.breakdown["gradients"]


def test_all_logits_at_once_are_what_evaluation_takes() -> None:
    """The logits in 16 bits, in fp32, and their log-probabilities: 10 bytes for each."""
    of = job(64)
    found = predicted("method=lora,precision=bf16,loss=full", of)
    logits = 64 * of.workload.seq_len * MODELS["gqa"].config["vocab_size"]
    assert found.breakdown["logits_and_loss"] == pytest.approx(10 * logits, rel=0.01)
    fused = predicted("method=lora,precision=bf16,loss=fused", of)
    assert found.phase_peaks[EVALUATION] - fused.phase_peaks[EVALUATION] > 5 * logits


@pytest.mark.parametrize("text", ["method=full", "method=lora,precision=bf16-mixed", "method=full,precision=bf16"])
def test_repeated_layers_evaluate_like_every_layer(text: str) -> None:
    """Autocast keeps a copy of every layer's weights to the end of the forward pass."""
    found, every = (predicted(text, job(64), exact=exact) for exact in (False, True))
    assert found.phase_peaks == every.phase_peaks
    assert found.peak_reserved_bytes == every.peak_reserved_bytes


def test_a_formula_counts_evaluation_too() -> None:
    config = complete(parse("method=full"))
    alone, few, many = (bounded(config, job(n), memory_limit_bytes=80 * GIB, reason="") for n in (None, 1, 4096))
    assert (few.device_bytes, EVALUATION in alone.phase_peaks) == (alone.device_bytes, False)
    assert many.device_bytes > alone.device_bytes and many.peak_phase == EVALUATION
    assert sum(many.breakdown.values()) == many.device_bytes


def test_what_is_sharded_says_that_gathering_is_left_out() -> None:
    of = job(8)
    of = replace(of, workload=replace(of.workload, devices=2, global_batch=16))
    said = predicted("method=full,sharding=zero3", of).assumptions
    assert "what is gathered of sharded or offloaded weights to evaluate is left out" in said


def test_estimates_are_kept_apart_by_what_is_evaluated() -> None:
    config = complete({})
    assert len({EstimateKeys(job(n)).of(config) for n in (None, 1, 8)}) == 3


@pytest.mark.parametrize("trainer", ["axolotl", "llamafactory"])
def test_where_a_patch_applies_liger_evaluation_makes_all_logits(trainer: str) -> None:
    of = job(64)
    theirs = replace(of, workload=replace(of.workload, trainer=trainer))
    fused, full = (predicted(f"method=lora,precision=bf16-mixed,loss={loss}", theirs) for loss in ("fused", "full"))
    assert fused.phase_peaks[EVALUATION] == full.phase_peaks[EVALUATION]
    own = predicted("method=lora,precision=bf16-mixed,loss=fused", of)
    assert own.phase_peaks[EVALUATION] < fused.phase_peaks[EVALUATION]


def test_the_answer_and_the_chart_say_that_evaluation_sets_the_peak() -> None:
    of = job(64)
    estimator = Estimator(of, None)
    found = estimator.estimate(complete(parse("method=lora,precision=bf16")), memory_limit_bytes=80 * GIB)
    assert "evaluation         sets the peak: training alone allocates" in estimate_text(found)
    drawn = course(estimator.trace(found.config).timeline, found, of_heap=False)
    assert drawn.peak_phase == EVALUATION and [phase for phase, _, _ in drawn.phases] == [EVALUATION]


@pytest.mark.parametrize(("other", "phase"), [("kernels=liger", "backward"), ("mlp=tiled", EVALUATION)])
def test_what_was_traced_of_other_layers_is_not_taken_for_theirs(tmp_path: Path, other: str, phase: str) -> None:
    """Without gradients, Liger's MLP takes as much as the plain one: gate, projection and product."""
    text, cache, of = "method=lora,precision=bf16,loss=fused,micro_batch=1", TraceCache(tmp_path), job(4)
    of = replace(of, workload=replace(of.workload, seq_len=512))
    lighter, after_it, fresh = (
        Estimator(of, None, cache=known).estimate(complete(parse(asked)), memory_limit_bytes=80 * GIB).phase_peaks
        for asked, known in ((f"{text},{other}", cache), (text, cache), (text, None))
    )
    assert after_it == fresh
    assert fresh[phase] != lighter[phase]
    assert fresh["backward"] > lighter["backward"]


def test_what_was_traced_of_full_sequences_is_not_taken_for_padded_ones(tmp_path: Path) -> None:
    """These are masked in evaluation, too."""
    text, cache = "method=lora,precision=bf16,loss=chunked,micro_batch=1", TraceCache(tmp_path)
    of = job(64)
    full = replace(of, workload=replace(of.workload, trainer="transformers"))
    padded = replace(full, workload=replace(full.workload, lengths=(8, of.workload.seq_len)))
    fresh, unmasked, after_it = (
        Estimator(each, None, cache=known).estimate(complete(parse(text)), memory_limit_bytes=80 * GIB).phase_peaks
        for each, known in ((padded, None), (full, cache), (padded, cache))
    )
    assert after_it == fresh
    assert fresh[EVALUATION] > unmasked[EVALUATION]
