"""How far the speed of one config may be off: what its own steps show, and what another execution adds to it.

Variation has levels (Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time", ISMM): steps of one process
differ among themselves, and processes differ by more than their steps explain, because a machine drifts and memory is
laid out anew. An interval from the steps of one process leaves the second level out; it is learnt from configs that
ran more than once, and added in quadrature wherever speeds are compared or shown with their uncertainty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

INTERVAL_DEVIATIONS = 2 * 1.645
"""Standard deviations that a 90 % interval is wide, for a normal variable."""
PRIOR_FREEDOM = 4
"""Degrees of freedom that the assumption of no variation between executions is worth: a single pair that is far apart
by bad luck shows a fifth of what it seems to, and a dozen pairs show three quarters."""

Execution = tuple[float, float]
"""Of one execution: tokens per second, and the relative width of the 90 % interval that its own steps gave."""


def between_executions(configs: Iterable[Sequence[Execution]]) -> float:
    """Standard deviation of the logarithm of the speed between executions of one config; 0 where nothing was repeated.

    `configs`: the executions of each config, on one hardware. With y the logarithm of a speed and s the deviation that
    its own interval says, the squares of a config's n executions about their mean are expected to add up to
    (1 - 1/n) times the sum of (between² + s²): the method of moments for variance components (Searle, Casella and
    McCulloch 1992, chapter 3) with within-variances that are known, as DerSimonian and Laird (1986) pool studies. What
    is left of the squares is divided by the degrees of freedom, n - 1 of each config and the prior's, whose own squares
    are 0 (the scale of a scaled inverse chi-squared posterior; Gelman 2013, section 2.6).
    """
    beyond, freedom = 0.0, 0
    for executions in configs:
        count = len(executions)
        if count < 2:
            continue
        logarithms = [math.log(speed) for speed, _ in executions]
        mean = statistics.fmean(logarithms)
        within = math.fsum((spread / INTERVAL_DEVIATIONS) ** 2 for _, spread in executions)
        beyond += math.fsum((y - mean) ** 2 for y in logarithms) - (1 - 1 / count) * within
        freedom += count - 1
    return math.sqrt(max(0.0, beyond) / (PRIOR_FREEDOM + freedom))


def widened(relative_spread: float, between: float) -> float:
    """The relative width of the 90 % interval that an execution in another process is within, from that of the
    execution's own steps and `between_executions`."""
    return math.hypot(relative_spread, INTERVAL_DEVIATIONS * between)
