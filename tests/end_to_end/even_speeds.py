"""The program with real trials whose speeds are by formula, and with searches that end when every config is measured.

Real speeds differ with whatever else runs on the machine, and with them which configs are tried and which are on the
frontier: two searches could be compared within noise only, and on a busy machine that is tenfold.
"""

from __future__ import annotations

from dataclasses import replace

from autofit.cli import main as program
from autofit.lattice import Config
from autofit.operations import searching
from autofit.outcome import Fits, StepSeconds
from autofit.search import advice
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed, Pool

EFFECTS = {("method", "lora"): 1.1, ("micro_batch", 4): 1.4, ("checkpointing", "none"): 1.2}
"""Factors of the speed, so that what needs more memory is faster: every config may be on the frontier."""


def tokens_per_second(config: Config) -> float:
    """The speed of a config, whatever the machine does besides."""
    speed = 2000.0
    for (axis, value), factor in EFFECTS.items():
        speed *= factor if config[axis] == value else 1.0
    return speed


class EvenPool:
    """Workers that run trials for real, but no longer than they must be timed, and say that they were as fast as the
    formula."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.site, self.cannot, self.close = pool.site, pool.cannot, pool.close

    @property
    def size(self) -> int:
        """As many as there are."""
        return self._pool.size

    def submit(self, request: TrialRequest) -> None:
        """Start `request`."""
        self._pool.submit(replace(request, timing_seconds=0.0, rivals=()))

    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended."""
        return [even(done) for done in self._pool.wait(timeout)]


def even(done: Completed) -> Completed:
    """What a trial has shown, at the formula's speed."""
    if not isinstance(done.outcome, Fits):
        return done
    speed = tokens_per_second(done.request.config)
    seconds = done.request.job.workload.tokens_per_step / speed
    steps = StepSeconds(median=seconds, p95=seconds, relative_spread=0.0)
    measured = replace(done.outcome.measurement, tokens_per_second=speed, step_seconds=steps)
    return replace(done, outcome=Fits(measurement=measured))


if __name__ == "__main__":
    open_pool = searching.open_pool
    searching.open_pool = lambda request: EvenPool(open_pool(request))
    # No trial is too little worth.
    advice.WORTHWHILE_GAIN = advice.LUCK = 0.0
    program.main()
