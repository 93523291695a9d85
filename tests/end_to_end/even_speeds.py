"""The program with real trials whose speeds come from a formula, and searches that end once every config is measured.

Real speeds vary with whatever else runs on the machine, and with them the configs that are tried and those on the
frontier: two searches could only be compared within noise, which on a busy machine is tenfold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quiet_machine import never_too_busy

from autofit.cli import main as program
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, StepSeconds
from autofit.operations.searching import search as searching
from autofit.search.acquisition import acquisition as advice
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed, Pool

EFFECTS = {("method", "lora"): 1.1, ("micro_batch", 4): 1.4, ("checkpointing", "none"): 1.2}
"""Speed factors by which configs that need more memory are faster, so that every config may be on the frontier."""


def tokens_per_second(config: Config) -> float:
    """The speed of a config, whatever else the machine does."""
    speed = 2000.0
    for (axis, value), factor in EFFECTS.items():
        speed *= factor if config[axis] == value else 1.0
    return speed


class EvenPool:
    """Workers that run real trials, timed no longer than necessary, and report the formula's speed for them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.site, self.cannot, self.claim, self.close = pool.site, pool.cannot, pool.claim, pool.close
        self.leave_out = pool.leave_out

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._pool.size

    @property
    def set_aside(self) -> Mapping[str, str]:
        """The workers that are slower than their type."""
        return self._pool.set_aside

    def submit(self, request: TrialRequest) -> None:
        """Start `request`."""
        self._pool.submit(replace(request, timing_seconds=0.0, rivals=()))

    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended."""
        return [even(done) for done in self._pool.wait(timeout)]


def even(done: Completed) -> Completed:
    """A completed trial, with the formula's speed in place of the measured one."""
    request, attempt = done
    if not isinstance(attempt.outcome, Fits):
        return done
    speed = tokens_per_second(request.config)
    seconds = request.job.workload.tokens_per_step / speed
    steps = StepSeconds(median=seconds, p95=seconds, relative_spread=0.0)
    measured = replace(attempt.outcome.measurement, tokens_per_second=speed, step_seconds=steps)
    return request, replace(attempt, outcome=Fits(measurement=measured))


if __name__ == "__main__":
    never_too_busy()
    open_pool = searching.open_pool
    searching.open_pool = lambda request: EvenPool(open_pool(request))
    # Every trial counts as worthwhile.
    advice.WORTHWHILE_GAIN = advice.LUCKY_HALF_WIDTHS = 0.0
    program.main()
