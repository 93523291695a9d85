"""The GPUs of makers whose drivers need not be asked: what the kernel lists, whether torch can use it or not."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
_CLASSES = {"AMD": ("0x0380", "0x12"), "Intel": ("0x03",)}
"""Beginnings of PCI class codes (include/linux/pci_ids.h): displays and, of AMD, processing accelerators, as which the
MI300 counts. Those of Intel are no GPUs. AMD's of class 0x0300, with a screen, may be inside of a processor."""
_MAKERS = {"0x1002": "AMD", "0x8086": "Intel"}


def gpus() -> Counter[str]:
    """How many GPUs of AMD and Intel there are, without those inside of Intel's processors, which are on the first
    bus; empty where the kernel lists none."""
    counts: Counter[str] = Counter()
    for device in DEVICES.glob("*"):
        with suppress(OSError):
            maker = _MAKERS.get((device / "vendor").read_text().strip())
            is_inside = maker == "Intel" and device.name.startswith("0000:00:")
            if maker is not None and not is_inside and (device / "class").read_text().startswith(_CLASSES[maker]):
                counts[maker] += 1
    return counts
