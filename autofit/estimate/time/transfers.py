"""What a rank transfers, and how fast: between ranks, to and from host memory, to and from a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.catalog.hardware import card_of
from autofit.core.device.hardware import Hardware
from autofit.core.device.work_kinds import DISK_READ, DISK_WRITTEN, HOST_LINK, HOST_UPDATE, LINK

if TYPE_CHECKING:
    from autofit.estimate.sharding.library import Traffic

LINK_EFFICIENCY = 0.75
"""Share of a link's data-sheet bandwidth that collectives and copies of many megabytes reach; a guess."""
PCIE_BYTES_PER_SECOND = 32e9
"""Of PCIe 4.0 x16 one way (PCI-SIG, PCI Express Base Specification 4.0: 16 GT/s times 16 lanes), for a device whose
links are unknown."""
DISK_READ_BYTES_PER_SECOND, DISK_WRITTEN_BYTES_PER_SECOND = 7.0e9, 5.0e9
"""Round figures of one NVMe drive on PCIe 4.0 x4, as the drive is unknown (data sheets: Samsung PM9A3 6.9 and 4.1 GB/s,
990 PRO 7.45 and 6.9). All ranks of a machine use the same drive."""
DRAM_BYTES_PER_SECOND = 50e9
"""Bandwidth of a CPU's memory to the optimizers of all ranks on it together; a guess: a quarter of eight channels of
DDR4-3200 (JEDEC JESD79-4: 25.6 GB/s each)."""
LOOPBACK_BYTES_PER_SECOND = 2e9
"""Between two processes on one CPU through gloo; an order of magnitude."""


def amounts(traffic: Traffic, hardware: Hardware, *, ranks_per_host: int) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes that move beside the arithmetic, bytes that it waits for) of a rank's `traffic`, by kind.

    The ranks on one host share its disk and its memory; a GPU has a link to the host of its own.
    """
    linked = {LINK: traffic.linked} if traffic.linked else {}
    waits = {
        HOST_LINK: traffic.hosted * (ranks_per_host if hardware.kind == "cpu" else 1),
        DISK_READ: traffic.disk_read * ranks_per_host,
        DISK_WRITTEN: traffic.disk_written * ranks_per_host,
        HOST_UPDATE: traffic.updated_on_host * ranks_per_host,
    }
    waits = {kind: float(size) for kind, size in waits.items() if size}
    return (linked, waits) if traffic.overlapped else ({}, linked | waits)


def seconds_per_byte(hardware: Hardware) -> dict[str, float]:
    """Seconds per byte of each kind of transfer: the data sheets' figures less losses. A card without a link to others
    goes through its host."""
    if hardware.kind == "cpu":
        link, host_link = LOOPBACK_BYTES_PER_SECOND, DRAM_BYTES_PER_SECOND
    else:
        card = card_of(hardware.name)
        host_link = card.host_link.bytes_per_second if card is not None and card.host_link else PCIE_BYTES_PER_SECOND
        link = card.interconnect.bytes_per_second if card is not None and card.interconnect else host_link
        link, host_link = LINK_EFFICIENCY * link, LINK_EFFICIENCY * host_link
    return {
        LINK: 1.0 / link,
        HOST_LINK: 1.0 / host_link,
        DISK_READ: 1.0 / DISK_READ_BYTES_PER_SECOND,
        DISK_WRITTEN: 1.0 / DISK_WRITTEN_BYTES_PER_SECOND,
        HOST_UPDATE: 1.0 / DRAM_BYTES_PER_SECOND,
    }


def why_no_host_link(hardware: Hardware) -> str | None:
    """Why the link between a device and its host is taken to be PCIe 4.0 x16; None where it is known, and on a CPU."""
    if hardware.kind == "cpu":
        return None
    card = card_of(hardware.name)
    if card is None:
        return f"{hardware.name} is not in the catalog"
    return None if card.host_link is not None else f"the catalog lacks the host link (host_link) of {hardware.name}"
