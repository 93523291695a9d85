"""What the estimator's figures for a processor are held to (estimate_cpu.py), and what these targets leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autofit.outcome import Fits, Trial

MEMORY_ERROR, FIT_MISJUDGED, SPEED_ERROR, TAU = 0.03, 0.02, 0.15, 0.85
"""The targets of every table: median error of memory and share of fits misjudged, at most; of tokens/s after
calibration, median error at most, and Kendall's tau at least."""
NEAR = 0.5
"""Share of a limit below which nothing can be misjudged at it: no prediction is off by a factor of two."""
LEAST_CONFIGS = 60
"""Configs that a table must have to be held to the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure beside its target."""

    name: str
    found: float
    target: float
    reached: bool

    @classmethod
    def at_most(cls, name: str, found: float, target: float) -> Target:
        """A target that is an upper limit."""
        return cls(name=name, found=found, target=target, reached=found <= target)

    def __str__(self) -> str:
        return f"{self.name}: {self.found:.3f} (target: {self.target:g}){'' if self.reached else ', missed'}"


def held_to_targets(figures: dict[str, Any]) -> list[Target]:
    """The figures of one table beside their targets; none for a table of too few configs."""
    if figures["configs"] < LEAST_CONFIGS:
        return []
    memory, time = figures["memory"], figures["time"]
    tau = time["kendall_tau"]["median"]
    speed = time["tokens_per_second_error"]["median"]
    return [
        Target.at_most("memory, median absolute error", memory["median_absolute_error"], MEMORY_ERROR),
        Target.at_most("fit misjudged at the trials' limit", memory["fit_misjudged_at_the_limit"], FIT_MISJUDGED),
        Target.at_most("tokens/s after calibration, median absolute error", speed, SPEED_ERROR),
        Target(name="Kendall's tau after calibration", found=tau, target=TAU, reached=tau >= TAU),
    ]


def beside_the_targets(figures: dict[str, Any]) -> list[str]:
    """What the targets alone do not show: how near any trial came to its limit, and fit at limits that configs are near
    to."""
    memory = figures["memory"]
    nearest, between = memory["nearest_to_the_limit"], memory["fit_misjudged"]
    idle = "; so far from it, no prediction could misjudge one" if nearest < NEAR else ""
    return [
        f"the trials' limit: the largest config took {nearest:.0%} of it (100% where one ran out of memory){idle}",
        f"fit misjudged at limits between neighbouring sizes: {between:.3f}, which has no target; "
        f"{'within' if between <= FIT_MISJUDGED else 'above'} {FIT_MISJUDGED:g}",
    ]


def nearest_to_the_limit(trials: Sequence[Trial]) -> float:
    """The largest share of its limit that a trial took; 1 for one that ran out of memory."""
    return max(
        t.outcome.measurement.device_bytes / t.memory_limit_bytes if isinstance(t.outcome, Fits) else 1.0
        for t in trials
    )
