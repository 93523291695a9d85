"""A config's memory and time on hardware that need not be here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.catalog.hardware import Card, card, cards
from autofit.errors import UsageError
from autofit.estimate.estimate import Estimate
from autofit.hardware import Hardware, Stack
from autofit.lattice import Config
from autofit.operations.requests import WorkloadOptions, memory_limit
from autofit.techniques import unsupported
from autofit.trial.site import detect, installed_stack

if TYPE_CHECKING:
    from autofit.estimate.speed import Rates


def estimate(
    options: WorkloadOptions,
    config: Config,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    exact: bool = False,
) -> Estimate:
    """Predict what `config` takes and gives on a catalog card, or with `auto` on this machine's device.

    The libraries are those installed here. `exact` traces every decoder layer instead of repeating a few. Raises
    `UsageError` for a config that cannot work there, saying why.
    """
    from autofit.estimate.estimator import estimate as predicted

    device, stack, rates = _site(hardware)
    job = options.job((device, stack))
    reason = unsupported(config, job) or _not_traced(config)
    if reason is not None:
        raise UsageError(reason)
    return predicted(config, job, memory_limit_bytes=memory_limit(memory_limit_bytes, device), rates=rates, exact=exact)


NOT_TRACED = {
    ("optimizer", "paged-adamw-8bit"): "how many of its states are paged out depends on what else needs the memory",
    ("checkpointing", "offload"): "the trace runs on the host, where moving activations there is nothing",
    ("compile", True): "what a compiled graph keeps is the compiler's choice",
    ("loss", "fused"): "Liger's kernel runs on a device only",
    ("attention", "flash"): "flash-attn's kernel runs on a device only; sdpa takes the same memory",
}
"""Values whose memory the trace does not show yet, each with the reason."""


def _not_traced(config: Config) -> str | None:
    for (axis, value), reason in NOT_TRACED.items():
        if config.get(axis) == value:
            return f"{axis}={str(value).lower()} cannot be estimated yet: {reason}"
    return None


def _site(hardware: str) -> tuple[Hardware, Stack, Rates | None]:
    if hardware == "auto":
        device, stack = detect()
        if device.kind == "cuda" and not (device.capability or "")[:1].isdecimal():
            raise UsageError(f"estimates are for NVIDIA cards and this machine's CPU; {device.name} is neither")
        return device, stack, _rates(card(device.name)) if device.name in {c.name for c in cards()} else None
    found = card(hardware)
    if found.kind != "cuda" or found.vendor != "nvidia":
        raise UsageError(f"estimates are for NVIDIA cards and this machine's CPU; {found.name} is neither")
    return _device(found), installed_stack(), _rates(found)


def _device(found: Card) -> Hardware:
    """A card of the catalog as the device of a job."""
    return Hardware(
        name=found.name,
        kind=found.kind,
        device_name=found.name,
        memory_bytes=found.memory_bytes,
        capability=found.capability,
        bf16=found.bf16,
        peak_flops=found.training_peak_flops,
    )


def _rates(found: Card) -> Rates | None:
    from autofit.estimate.speed import guess

    peak = found.training_peak_flops
    if peak is None:
        return None
    wide = found.peak_flops.get("fp32", peak)
    return guess(flops=peak, wide_flops=wide, bandwidth=found.bandwidth_bytes_per_second)
