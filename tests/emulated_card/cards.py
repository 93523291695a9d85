"""Emulated machines: the file that says which cards they have, and what a process must be told to find them."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autofit.catalog.hardware import card as catalog_card

DRIVER, CUDA = "580.95.05 (emulated)", 13000
"""Of the driver that is emulated."""
CONTEXT_BYTES = 400 * 1024**2
"""What a process takes of an H100 before it allocates anything; between 300 and 600 MiB on real ones, by driver."""
FACTS: dict[str, tuple[str, int, int, int, int]] = {
    # the driver's name, streaming multiprocessors, L2 in MiB, power limit in watts, boost clock in MHz (data sheets)
    "t4": ("Tesla T4", 40, 4, 70, 1590),
    "v100-16g": ("Tesla V100-SXM2-16GB", 80, 6, 300, 1530),
    "v100-32g": ("Tesla V100-SXM2-32GB", 80, 6, 300, 1530),
    "a10g": ("NVIDIA A10G", 80, 6, 300, 1710),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", 82, 6, 350, 1695),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", 128, 72, 450, 2520),
    "a100-40g": ("NVIDIA A100-SXM4-40GB", 108, 40, 400, 1410),
    "a100-80g": ("NVIDIA A100-SXM4-80GB", 108, 40, 400, 1410),
    "h100-80g": ("NVIDIA H100 80GB HBM3", 132, 50, 700, 1980),
    "h200": ("NVIDIA H200", 132, 50, 700, 1980),
    "b200": ("NVIDIA B200", 148, 126, 1000, 1965),
}
SHARED: dict[int, tuple[int, int]] = {
    # by capability: KiB of shared memory that a block may opt in to, and that a multiprocessor has (CUDA programming
    # guide, "Technical Specifications per Compute Capability")
    70: (96, 96),
    75: (64, 64),
    80: (163, 164),
    86: (99, 100),
    89: (99, 100),
    90: (227, 228),
    100: (227, 228),
    120: (99, 100),
}


class Card(ctypes.Structure):
    """`struct card` of card.h."""

    _fields_ = [
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 48),
        ("pci", ctypes.c_char * 32),
        *((name, ctypes.c_int) for name in ("major", "minor", "multiprocessors", "l2_bytes", "shared_per_block")),
        *((name, ctypes.c_int) for name in ("shared_per_multiprocessor", "bus_bits", "link_generation")),
        *((name, ctypes.c_uint64) for name in ("total_bytes", "marketed_bytes", "context_bytes")),
        *((name, ctypes.c_int) for name in ("power_limit_watts", "default_power_limit_watts", "clock_mhz")),
        *((name, ctypes.c_int) for name in ("most_clock_mhz", "memory_clock_mhz", "temperature")),
        ("throttle_reasons", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("flops_wide", "flops_tensor_wide", "flops_bf16", "flops_fp16")),
        *((name, ctypes.c_double) for name in ("bytes_per_second", "link_bytes_per_second")),
        ("taken_bytes", ctypes.c_uint64),
        ("fail_allocation_at", ctypes.c_int64),
        ("error", ctypes.c_int),
        ("error_after", ctypes.c_int64),
        ("hangs", ctypes.c_bool),
        ("gone", ctypes.c_bool),
    ]


def described(name: str, number: int) -> Card:
    """A card of the catalog, in the slot of that number."""
    known = catalog_card(name)
    driver_name, multiprocessors, l2_mib, watts, mhz = FACTS[name]
    major, minor = map(int, known.capability.split("."))
    per_block, per_multiprocessor = SHARED[10 * major + minor]
    flops, emulated = known.peak_flops, known.peak_flops["fp32"] / 2
    return Card(
        name=driver_name.encode(),
        uuid=f"GPU-{number + 1:08x}-0000-0000-0000-{sum(name.encode()):012x}".encode(),
        pci=f"0000:{number + 1:02X}:00.0".encode(),
        major=major,
        minor=minor,
        multiprocessors=multiprocessors,
        l2_bytes=l2_mib * 1024**2,
        shared_per_block=per_block * 1024,
        shared_per_multiprocessor=per_multiprocessor * 1024,
        bus_bits=5120,
        link_generation=4 if known.interconnect and "NVLink" in known.interconnect.name else 0,
        total_bytes=known.memory_bytes,
        marketed_bytes=known.marketed_memory_bytes,
        context_bytes=CONTEXT_BYTES,
        power_limit_watts=watts,
        default_power_limit_watts=watts,
        clock_mhz=mhz,
        most_clock_mhz=mhz,
        memory_clock_mhz=2619,
        temperature=45,
        flops_wide=flops["fp32"],
        flops_tensor_wide=flops.get("tf32", flops["fp32"]),
        flops_bf16=flops.get("bf16", emulated),
        flops_fp16=flops.get("fp16", emulated),
        bytes_per_second=known.bandwidth_bytes_per_second,
        link_bytes_per_second=known.host_link.bytes_per_second if known.host_link else 1.6e10,
    )


def create(path: Path, libraries: Path, cards: Sequence[Card]) -> None:
    """Write the file of a machine that has these cards."""
    made = ctypes.CDLL(str(libraries / "libemulated.so"))
    if made.emulated_card_size() != ctypes.sizeof(Card):
        raise ValueError("cards.py and card.h differ: build the emulated card again")
    if made.emulated_create(str(path).encode(), (Card * len(cards))(*cards), len(cards), DRIVER.encode(), CUDA):
        raise OSError(f"{path} cannot be written")


def environment(path: Path, libraries: Path, site: Path) -> dict[str, str]:
    """What a process needs in its environment to run on a machine."""
    return {
        "EMULATED_CARDS": str(path),
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": str(site),
    }


def main() -> None:
    """Run a command on a machine with the given cards: `cards.py --home FOLDER h100-80g,h100-80g COMMAND ...`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the folder with `lib` and `site`")
    parser.add_argument("cards", help="names of the catalog, with commas between them")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    file = asked.home / f"machine-{os.getpid()}"
    create(file, asked.home / "lib", [described(name, n) for n, name in enumerate(asked.cards.split(","))])
    told = environment(file, asked.home / "lib", asked.home / "site")
    os.execvpe(asked.command[0], asked.command, {**os.environ, **told})


if __name__ == "__main__":
    sys.exit(main())
