"""Configs in a number format that the device only emulates: predicted from the same ones in fp32, without a trace.

Two thirds of a space are in 16 bits. Where fp32 is many times faster, such a config is worth a trial only if nothing
else fits; tracing them all would take most of the time before the first trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autofit.core.device.probe import Probe
from autofit.core.device.probe_findings import times_as_slow_as_fp32
from autofit.core.frontier import PRACTICAL
from autofit.core.lattice import Config
from autofit.core.prediction import Prediction
from autofit.techniques.axes.precision import product_format

WIDE = "fp32"


@dataclass(frozen=True, slots=True)
class Emulated:
    """A config in an emulated format."""

    twin: Config
    """The same config in fp32."""
    slower: float
    """How many times slower products are than in fp32."""

    def predicted(self, config: Config, of_twin: Prediction) -> Prediction:
        """The prediction for `config`, from that of its twin. It has no work, so that no trial of it corrects the
        device's rates."""
        # Training in 16 bits throughout takes half the memory of fp32, and what does not shrink.
        share = 0.6 if config["precision"] in ("bf16", "fp16") else 1.0
        return replace(
            of_twin,
            peak_allocated_bytes=int(share * of_twin.peak_allocated_bytes),
            peak_reserved_bytes=None,
            device_bytes=int(share * of_twin.device_bytes),
            step_seconds=of_twin.step_seconds and self.slower * of_twin.step_seconds,
            micro_step_seconds=of_twin.micro_step_seconds and self.slower * of_twin.micro_step_seconds,
            work=None,
            # Mixed precision keeps weights in fp32 and activations in 16 bits.
            memory_error=0.5,
        )


def emulated_configs(configs: Iterable[Config], probe: Probe | None) -> Mapping[Config, Emulated]:
    """The configs that are too slow to be practical for their format, if the same in fp32 is among `configs`."""
    if probe is None:
        return {}
    every = dict.fromkeys(configs)
    ratios = times_as_slow_as_fp32(probe)
    slow = {}
    for config in every:
        ratio = ratios.get(product_format(config), 1.0)
        twin = config.replace(precision=WIDE)
        if ratio * PRACTICAL > 1.0 and twin in every:
            slow[config] = Emulated(twin, ratio)
    return slow
