"""What else went on with a trial's device while it was timed, and whether its time can be trusted for all that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autofit.core.device.hardware import Hardware
from autofit.core.document import Document, LastingDocument
from autofit.core.units import GIB, format_bytes

TOLERATED = 0.1
"""Share of a device's time that others may take. Executions of one config differ by 1 to 10 % anyway
(benchmarks/README.md, noise): less than this is lost among that."""
TICK_SECONDS = 0.01
"""Resolution of the kernel's counts of processor time (USER_HZ, proc(5)); each count may be off by one."""
THROTTLE_WORDS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""NVML's reasons for a lower clock that no config causes (nvmlClocksEventReasons; bits of the mask)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorState(LastingDocument):
    """The processor while a trial was timed, from the kernel's counters. Seconds are of processor time, all its cores'
    together."""

    cores: int
    """Logical cores on which the trial could run."""
    threads: int
    """Of those on which others would slow the trial down: all of each core on which it computed."""
    busy_seconds: float
    """What everybody used of those cores, the trial included."""
    own_seconds: float
    """What the trial's processes used."""
    stolen_seconds: float
    """What the hypervisor gave to other machines while somebody here wanted it (steal, proc(5))."""
    held_seconds: float | None = None
    """For how long the quota of a control group held its threads back; None without control groups."""
    heat_events: int | None = None
    """How often cores were slowed down for their heat; None where the kernel does not count it."""

    @property
    def others_seconds(self) -> float:
        return max(0.0, self.busy_seconds - self.own_seconds)

    def doubts(self, seconds: float) -> tuple[str, ...]:
        """Why a trial that took `seconds` cannot be trusted, each in a few words; empty if it can."""
        reasons = []
        # Others do no harm on cores that the trial left free.
        spare = (self.cores - self.threads) * seconds + TICK_SECONDS * (self.cores + 1)
        taken = (self.others_seconds - spare) / max(self.threads * seconds, TICK_SECONDS)
        if taken > TOLERATED:
            reasons.append(f"other processes took {taken:.0%} of its cores")
        stolen = (self.stolen_seconds - TICK_SECONDS * self.cores) / max(
            self.busy_seconds + self.stolen_seconds, TICK_SECONDS
        )
        if stolen > TOLERATED:
            reasons.append(f"steal {stolen:.0%}: the hypervisor gave the processor to others")
        held_back = (self.held_seconds or 0.0) / max(self.threads * seconds, TICK_SECONDS)
        if held_back > TOLERATED:
            reasons.append(f"the control group's quota held it back {held_back:.0%} of the time")
        if self.heat_events:
            reasons.append("the processor throttled: heat")
        return tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState(LastingDocument):
    """An NVIDIA card while a trial was timed, as NVML shows it; None for what the card or its driver does not say."""

    uuid: str
    sm_clock_mhz: int | None = None
    """Lowest clock of the multiprocessors that was seen."""
    sm_clock_max_mhz: int | None = None
    power_limit_watts: float | None = None
    """The limit that is enforced, whoever set it."""
    power_limit_default_watts: float | None = None
    throttle_mask: int | None = None
    """All of NVML's reasons for a lower clock that were seen, as bits."""
    others_bytes: int | None = None
    """Memory that other processes held before the trial began."""
    others_share: float | None = None
    """Share of the time in which the multiprocessors ran kernels of other processes, 0..1."""
    memory_errors: int | None = None
    """Uncorrected ECC errors since the trial began."""

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        """The reasons for a lower clock that no config causes, in words. A power limit (bit 0x4) is none: matrix
        products bring every card to it, and those of laptops to a third of their highest clock."""
        mask = self.throttle_mask or 0
        return tuple(words for bit, words in THROTTLE_WORDS.items() if mask & bit)

    def doubts(self, expected_watts: float | None) -> tuple[str, ...]:
        """Why a trial cannot be trusted, each in a few words; empty if it can. `expected_watts` is the power limit of
        the hardware that the trial is stored under; None for the card's default."""
        reasons = [f"throttled: {reason}" for reason in self.throttle_reasons]
        limit, usual = self.power_limit_watts, expected_watts or self.power_limit_default_watts
        if limit is not None and usual is not None and abs(limit / usual - 1.0) > TOLERATED:
            reasons.append(f"power limit of {limit:.0f} W in place of {usual:.0f} W")
        if (self.others_share or 0.0) > TOLERATED:
            reasons.append(f"another process used {self.others_share:.0%} of the card")
        # Where the driver does not say who computes: more than a desktop and the driver's own processes hold.
        if self.others_share is None and (self.others_bytes or 0) > 2 * GIB:
            memory = format_bytes(self.others_bytes or 0)
            reasons.append(
                f"another process held {memory} of the card's memory, and what it did cannot be seen from here"
            )
        if self.memory_errors:
            reasons.append(f"{self.memory_errors} uncorrected memory errors (ECC)")
        return tuple(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState(Document):
    """The state of a trial's device while it was timed, or during the whole of a trial that was not."""

    seconds: float
    """For how long it was observed."""
    processor: ProcessorState | None = None
    """None where the kernel does not say."""
    cards: tuple[CardState, ...] = ()
    """The cards of the trial's ranks, in their order; empty on the CPU, and where NVML does not say."""
    set_aside: str | None = None
    """Why the device is not what it is called: it is clearly slower than others of its type
    (`workers.slots.speeds`); None for one that is as fast, or was not compared."""

    def to_json(self) -> dict[str, Any]:
        """`set_aside` is said only where it is so: earlier versions do not read it."""
        body = super(DeviceState, self).to_json()
        return {name: value for name, value in body.items() if name != "set_aside" or value is not None}

    def doubts(self, hardware: Hardware) -> tuple[str, ...]:
        """Why a trial on `hardware` is not to be trusted in its speed, each reason in a few words; empty if it is. What
        it shows of memory can be trusted anyway. A card's host needs one core, to launch operations, however hot others
        are."""
        reasons = [] if self.set_aside is None else [self.set_aside]
        if hardware.kind == "cpu":
            return (*reasons, *(() if self.processor is None else self.processor.doubts(self.seconds)))
        reasons += [reason for card in self.cards for reason in card.doubts(hardware.power_limit_watts)]
        if self.processor is not None:
            launching = replace(self.processor, threads=1, heat_events=None)
            reasons += [f"the host launches late: {reason}" for reason in launching.doubts(self.seconds)]
        return tuple(dict.fromkeys(reasons))


def together(states: Sequence[DeviceState | None]) -> DeviceState | None:
    """The state of a trial's device from those of its ranks, in their order; None if none is known.

    Ranks on the CPU share one machine: each saw all that was used of it, and counted only its own processes.
    """
    observed = [state for state in states if state is not None]
    if not observed:
        return None
    processors = [state.processor for state in observed if state.processor is not None]
    longest = max(observed, key=lambda state: state.seconds)
    processor = longest.processor
    if processor is not None:
        processor = replace(
            processor,
            threads=min(processor.cores, sum(p.threads for p in processors)),
            own_seconds=sum(p.own_seconds for p in processors),
        )
    return replace(longest, processor=processor, cards=tuple(card for state in observed for card in state.cards))
