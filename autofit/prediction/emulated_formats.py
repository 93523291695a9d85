"""Configs in a number format that the device only emulates: predicted from the same ones in fp32, without a trace.

Two thirds of a space are in 16 bits. Where fp32 is many times faster, such a config is worth a trial only if nothing
else fits; tracing them all would take most of the time before the first trial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autofit.core.device.probe import Probe
from autofit.core.device.probe_findings import times_as_slow_as_fp32
from autofit.core.frontier import PRACTICAL
from autofit.core.lattice import Config
from autofit.core.outcome import Prediction
from autofit.techniques.axes.precision import product_format


def in_fp32(config: Config) -> Config:
    return config.replace(precision="fp32")


def emulated_configs(configs: Iterable[Config], probe: Probe | None) -> dict[Config, float]:
    """The configs that are too slow to be practical for their format, if the same in fp32 is among `configs`, each with
    how many times slower products are than in fp32."""
    if probe is None:
        return {}
    every = dict.fromkeys(configs)
    ratios = times_as_slow_as_fp32(probe)
    slower = {config: ratios.get(product_format(config), 1.0) for config in every}
    return {c: ratio for c, ratio in slower.items() if ratio * PRACTICAL > 1.0 and in_fp32(c) in every}


def from_fp32(config: Config, same_in_fp32: Prediction, slower: float) -> Prediction:
    """The prediction for `config` from that for the same config in fp32, in which products are so many times faster. It
    has no work, so that no trial of it corrects the device's rates."""
    # Training in 16 bits throughout takes half the memory of fp32, and what does not shrink.
    share = 0.6 if config["precision"] in ("bf16", "fp16") else 1.0
    return replace(
        same_in_fp32,
        peak_allocated_bytes=int(share * same_in_fp32.peak_allocated_bytes),
        peak_reserved_bytes=None,
        device_bytes=int(share * same_in_fp32.device_bytes),
        step_seconds=same_in_fp32.step_seconds and slower * same_in_fp32.step_seconds,
        micro_step_seconds=same_in_fp32.micro_step_seconds and slower * same_in_fp32.micro_step_seconds,
        work=None,
        # Mixed precision keeps weights in fp32 and activations in 16 bits.
        memory_error=0.5,
    )
