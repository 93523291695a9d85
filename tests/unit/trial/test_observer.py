"""Which steps of a run that is no trial are timed, and that nothing of the run is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import tiny_job
from unit.trial.fake_cuda import install_cuda

from autofit.core.outcome import Fits
from autofit.core.units import GIB
from autofit.techniques import complete
from autofit.trial.measure.meter import CpuMeter, CudaMeter, Meter
from autofit.trial.program import observer
from autofit.trial.program.observer import NotRecorded, RunObserver

TOKENS = tiny_job().workload.tokens_per_step


class Stopwatch(CpuMeter):
    """A meter with a clock of its own."""

    now = 0.0

    def __init__(self, kind: str) -> None:
        super().__init__(whole=True)
        self.device = torch.device(kind)

    def mark(self) -> float:
        return self.now


@pytest.fixture(params=["cpu", "cuda"])
def meter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Of a processor, or of an accelerator, whose last step is still under way when the next is issued."""
    stopwatch = Stopwatch(request.param)

    def made(kind: str, held_bytes: int | None, *, whole: bool) -> Meter:
        return stopwatch

    monkeypatch.setattr(observer, "meter_for", made)
    return stopwatch


def step(run: RunObserver, meter: Stopwatch, seconds: float, tokens: int = TOKENS) -> None:
    meter.now += seconds
    run.step(tokens)


def started(**job: Any) -> RunObserver:
    return RunObserver(tiny_job(**job), complete({"precision": "fp32"}), None)


def test_what_belongs_to_no_step_is_not_timed(meter: Stopwatch) -> None:
    run = started()
    for number in range(1, 12):
        step(run, meter, float(number), tokens=TOKENS if number not in (5, 11) else 1)
        if number in (5, 11):
            run.end_epoch()  # on what was left of the data
        if number == 7:
            run.interrupt()
            meter.now += 100.0
    outcome = run.conclude().outcome
    assert isinstance(outcome, Fits) and outcome.measurement.steps == 5
    assert outcome.measurement.step_seconds.median == 7.0  # of steps 3, 4, 7, 9 and 10
    assert outcome.measurement.tokens_per_second == TOKENS / 7.0


def test_too_few_steps_are_no_measurement(meter: Stopwatch) -> None:
    run = started()
    for _ in range(5):
        step(run, meter, 1.0)
    run.end_epoch()
    with pytest.raises(NotRecorded, match="too short: 2 steps could be timed"):
        run.conclude()


@pytest.mark.parametrize(("tokens", "is_stored"), [(TOKENS, True), (TOKENS // 2, False)])
def test_tokens_are_those_of_the_workload(meter: Stopwatch, tokens: int, is_stored: bool) -> None:
    run = started()
    for _ in range(8):
        step(run, meter, 1.0, tokens)
    if is_stored:
        assert isinstance(run.conclude().outcome, Fits)
    else:
        with pytest.raises(NotRecorded, match="4 full sequences of 32"):
            run.conclude()


def test_a_meter_without_a_limit_leaves_the_allocators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    torch.cuda.set_per_process_memory_fraction(0.25)  # the user's own
    before = fake.allowed()
    meter = CudaMeter()
    meter.reset()
    fake.use(allocated=1 * GIB)
    assert fake.allowed() == before and meter.reading().peak_allocated_bytes == 1 * GIB
