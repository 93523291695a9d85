"""The longest sequences on which a config trains within a card's memory, predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autofit.catalog.models import load, positions, shape
from autofit.core.lattice import Config
from autofit.estimate.estimate import Estimate
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimation import Estimation

STEP = 128
"""Tokens: lengths are multiples of it, and the answer is less than one step below the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """The longest sequences that fit."""

    seq_len: int
    """Tokens per sequence."""
    estimate: Estimate
    """At `seq_len`. It has room for the prediction's error, unless even the shortest length tried has not."""
    most: int
    """The longest that could be asked for: the model's positions, or the data's longest sequence."""

    def to_json(self) -> dict[str, Any]:
        fits = self.estimate.likely_fits
        return {"seq_len": self.seq_len if fits else None, "most": self.most, "estimate": self.estimate.short_json()}


def longest_sequence(
    options: WorkloadOptions,
    config: Config,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> Longest:
    """The longest sequences on which `config` trains there, whatever `options.seq_len` is.

    `report` is called with how many lengths have been predicted. Raises `UsageError` as `Estimation.of` does.
    """
    estimates: dict[int, Estimate] = {}

    def estimate_at(tokens: int) -> Estimate:
        options_at = replace(options, seq_len=tokens)
        estimation = Estimation.of(options_at, config, hardware=hardware, memory_limit_bytes=memory_limit_bytes)
        estimates[tokens] = estimation.estimate()
        report(len(estimates))
        return estimates[tokens]

    most = positions(load(options.model)) or 2**20  # longer ones are not tried where no position is the last
    if options.lengths is not None:
        most = min(most, options.lengths.longest)
    # A sequence that is no longer than the model is wide has no tiles.
    without_tiles = shape(load(options.model)).hidden_size if config.get("mlp") == "tiled" else 0
    short, long = min(without_tiles // STEP * STEP + STEP, most), most
    if not estimate_at(short).likely_fits or long == short or estimate_at(long).likely_fits:
        seq_len = long if long in estimates and estimates[long].likely_fits else short
        return Longest(seq_len=seq_len, estimate=estimates[seq_len], most=most)
    halve = False
    while long - short > STEP:
        between = short + (long - short) // 2 if halve else _crossing(estimates[short], estimates[long], short, long)
        tokens = min(max(between // STEP * STEP, short // STEP * STEP + STEP), (long - 1) // STEP * STEP)
        before = long - short
        if estimate_at(tokens).likely_fits:
            short = tokens
        else:
            long = tokens
        halve = 2 * (long - short) > before  # where memory is far from linear in the length, a line creeps
    return Longest(seq_len=short, estimate=estimates[short], most=most)


def _crossing(fits: Estimate, exceeds: Estimate, short: int, long: int) -> int:
    """The length at which the limit would be reached, with room for the error, if memory grew linearly between two."""
    deviation = fits.memory_deviation
    limit = fits.memory_limit_bytes / (1.0 if deviation is None else 1.0 + deviation.deviation)
    share = (limit - fits.device_bytes) / max(1, exceeds.device_bytes - fits.device_bytes)
    return short + round(min(1.0, max(0.0, share)) * (long - short))
