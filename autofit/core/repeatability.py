"""Uncertainty of one config's speed: what its own steps show, and what variation between executions adds.

Variation has levels (Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time", ISMM): the steps of one
process differ, and processes differ by more than their steps explain, because a machine drifts and memory is laid out
afresh. An interval from the steps of one process misses the second level; that one is learnt from configs that ran more
than once, and added in quadrature wherever speeds are compared or shown with their uncertainty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

INTERVAL_DEVIATIONS = 2 * 1.645
"""Width of a normal variable's 90 % interval, in standard deviations."""

Execution = tuple[float, float]
"""One execution: tokens per second, and the relative width of the 90 % interval from its own steps."""


def between_executions(configs: Iterable[Sequence[Execution]]) -> float:
    """Standard deviation of the logarithm of the speed between executions of one config; 0 where nothing was repeated.

    `configs`: the executions of each config, on one hardware. With y the logarithm of a speed and s the standard
    deviation implied by its own interval, the squared deviations of a config's n executions from their mean have the
    expected sum (1 - 1/n) times the sum of (between² + s²): the method of moments for variance components (Searle,
    Casella and McCulloch 1992, chapter 3) with known within-variances, as DerSimonian and Laird (1986) pool studies.
    The excess of the squares is divided by the degrees of freedom, n - 1 for each config plus the prior's, whose own
    squares are 0 (the scale of a scaled inverse chi-squared posterior; Gelman 2013, section 2.6).
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
    # The assumption of no variation counts as 4 degrees of freedom: of the variance that a single pair, far apart by
    # bad luck, seems to show, a fifth counts; of a dozen pairs', three quarters.
    return math.sqrt(max(0.0, beyond) / (4 + freedom))


def widened(relative_spread: float, between: float) -> float:
    """Relative width of the 90 % interval for an execution in another process, from that of an execution's own steps
    and `between_executions`."""
    return math.hypot(relative_spread, INTERVAL_DEVIATIONS * between)
