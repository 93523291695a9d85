"""What a probe means to a person: one sentence for each thing worth knowing, and a short table."""

from __future__ import annotations

from autofit.core.device.probe import Probe
from autofit.core.device.work_kinds import (
    FLOP,
    FORMATS,
    LAUNCH,
    LAYOUTS,
    attention,
    batched,
    four_bit,
    memory_bound,
    product,
    unit,
    update,
)

SLOW_FORMAT = 1.5
"""From this factor on, a difference between the speeds of products in two formats is worth saying. A 16-bit format that
is slower than fp32 is emulated, or has slow instructions, as Intel's for bf16 without AMX are."""
_UNITS = {", bytes per second": "GB/s", ", FLOP per second": "GFLOP/s", ", bytes": "GB"}
"""By how a figure's name ends. FLOP: speeds of attention kernels, which stored probes of this version have measured."""

_ROWS = {
    **{f"products, {role}": [product(f, layout) for f in FORMATS] for layout, role in LAYOUTS.items()},
    "products, batched": [batched(f) for f in FORMATS],
    "attention, forward": [attention(f, "forward") for f in FORMATS],
    "attention, backward": [attention(f, "backward") for f in FORMATS],
    "elementwise": [memory_bound("elementwise", f, "far") for f in FORMATS],
    "softmax": [memory_bound("softmax", f, "far") for f in FORMATS],
    "4-bit unpacking": [four_bit(f) for f in FORMATS],
    "AdamW update": [update(f) for f in FORMATS],
}
"""Operation to its kinds of work, one for each format."""


def findings(probe: Probe) -> list[str]:
    """One sentence each, the most important first."""
    launch = probe.seconds_per.get(LAUNCH)
    return [
        *(f"The device was not free: {reason}. The figures may be off by a lot." for reason in probe.doubts[:1]),
        *(_sentence(name, ratio) for name, ratio in times_as_slow_as_fp32(probe).items()),
        *([] if launch is None else [f"Launching one operation takes {launch * 1e6:.0f} us of the host's time."]),
        *(_figure(name, value) for name, value in probe.figures.items()),
        *(f"Not measured: {part.name} ({part.failure})." for part in probe.parts if part.failure is not None),
    ]


def _figure(name: str, value: float) -> str:
    # A shared store may hold probes of later versions, which measure something else: such a figure is shown as it is.
    ending, unit, one = next(((e, f" {u}", 1e9) for e, u in _UNITS.items() if name.endswith(e)), ("", "", 1.0))
    label = name.removesuffix(ending)
    return f"{label[0].upper()}{label[1:]}: {value / one:,.3g}{unit}."


def slow_formats(probe: Probe) -> dict[str, str]:
    """The 16-bit formats that are slower than fp32 on the device, each with a sentence that says so."""
    ratios = times_as_slow_as_fp32(probe)
    return {name: _sentence(name, ratio) for name, ratio in ratios.items() if ratio > SLOW_FORMAT}


def times_as_slow_as_fp32(probe: Probe) -> dict[str, float]:
    """How many times as long the three products of a linear layer take in each 16-bit format as in fp32. What was not
    measured is left out."""
    measured = probe.seconds_per
    seconds = {f: [measured[kind] for layout in LAYOUTS if (kind := product(f, layout)) in measured] for f in FORMATS}
    sums = {f: sum(rates) for f, rates in seconds.items() if len(rates) == len(LAYOUTS)}
    return {f: sums[f] / sums["fp32"] for f in ("bf16", "fp16") if {f, "fp32"} <= sums.keys()}


def _sentence(name: str, ratio: float) -> str:
    if ratio > SLOW_FORMAT:
        return f"{name} is {_times(ratio)} slower than fp32 here."
    if ratio < 1.0 / SLOW_FORMAT:
        return f"{name} is {_times(1 / ratio)} faster than fp32."
    return f"{name} is about as fast as fp32."


def link_finding(rate: float, within: float, *, measured: bool) -> str:
    """What ranks on several machines send each other, beside what they do `within` one, which is `measured` there or
    assumed; both in bytes per second of each rank."""
    than = "than within one" if measured else "than is assumed within one"
    less = f"{_times(within / rate)} less" if within > rate else "no less"
    return f"between machines: {rate / 1e9:,.3g} GB/s, {less} {than}"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def table(probe: Probe) -> list[tuple[str, ...]]:
    """Rows of an operation, its speed in each format and the unit."""
    rows = []
    for name, kinds in _ROWS.items():
        speeds = [probe.seconds_per.get(kind) for kind in kinds]
        if any(speeds):
            speed_unit = "GFLOP/s" if unit(kinds[0]) == FLOP else "GB/s"
            rows.append((name, *(f"{1e-9 / s:,.3g}" if s else "-" for s in speeds), speed_unit))
    return rows
