"""How far measured memory has been from predicted memory, and how sure that makes a predicted fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autofit.core.device.hardware import Hardware
from autofit.core.document import Document

ONE_CARD = 0.05
"""Deviation of the logarithm of measured over predicted memory on one NVIDIA card where nothing was compared yet. The
46 configs of an H200 and an H100 took within 0.014 of what is predicted with their context (test_real_card.py). Of
what trained on emulated cards, 19 in 20 reserve what is predicted within 0.02 (benchmarks/README.md), and the
worst published run allocated it within 0.002 (published-estimates.json)."""
UNKNOWN = 0.12
"""The deviation on all other hardware. The worst recorded errors are 0.073 of what is allocated on two cards
(published-estimates.json), and 0.22 of what a processor's trials took (estimate-cpu.json): both within two of these
deviations. A processor's sharded trials, off by up to 0.38 (cpu-zen5-2c-sharded-memory.json), are not."""
CERTAINTIES = ((2.0, "sure"), (1.0, "likely"))
"""By how many deviations memory must be clear of the limit: a normal variable is so in 98 % and 84 % of cases. With
less room than either, a fit is `unsure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDeviation(Document):
    """The logarithm of measured over predicted memory, as a normal variable."""

    mean: float
    """Above 0 where trials needed more than was predicted."""
    deviation: float
    """Standard deviation; assumed where nothing was compared."""
    compared_on: int
    """Number of trials that predictions were compared with; 0 where the deviation is an assumption."""

    def certainty(self, device_bytes: int, memory_limit_bytes: int) -> str:
        """How sure it is on which side of the limit a prediction falls: `sure`, `likely` or `unsure`."""
        room = math.log(memory_limit_bytes / device_bytes)
        clear = math.copysign(1.0, room) * (room - self.mean) / self.deviation
        return next((word for least, word in CERTAINTIES if clear >= least), "unsure")


NOTHING_COMPARED = MemoryDeviation(mean=0.0, deviation=UNKNOWN, compared_on=0)


def nothing_compared(hardware: Hardware, devices: int) -> MemoryDeviation:
    """What to expect of so many devices on hardware where nothing was compared yet."""
    return replace(NOTHING_COMPARED, deviation=ONE_CARD) if hardware.is_nvidia and devices == 1 else NOTHING_COMPARED
