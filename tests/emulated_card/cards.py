"""Emulated machines: which cards they have, what a process must be told to find them, and what happens to them."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from autofit.catalog.hardware import card as catalog_card
from autofit.core.errors import UsageError, unknown

DRIVER, CUDA = "580.95.05 (emulated)", 13000
"""Of the driver that is emulated."""
CONTEXT_BYTES = 400 * 1024**2
"""What a process takes of an H100 before it allocates anything; between 300 and 600 MiB on real ones, by driver."""
FACTS: dict[str, tuple[str, int, int, int]] = {
    # the driver's name, L2 in MiB, power limit in watts, boost clock in MHz: of data
    # sheets, but for the H100 PCIe and NVL, the H20, the GH200, the L4, the L40S, the RTX 3060, 4070 Ti, 4080 and 5090:
    # they are from memory
    "t4": ("Tesla T4", 4, 70, 1590),
    "v100-16g": ("Tesla V100-SXM2-16GB", 6, 300, 1530),
    "v100-32g": ("Tesla V100-SXM2-32GB", 6, 300, 1530),
    "a10": ("NVIDIA A10", 6, 150, 1695),
    "a10g": ("NVIDIA A10G", 6, 300, 1710),
    "a40": ("NVIDIA A40", 6, 300, 1740),
    "rtx-a6000": ("NVIDIA RTX A6000", 6, 300, 1800),
    "rtx-3060": ("NVIDIA GeForce RTX 3060", 3, 170, 1777),
    "rtx-3080": ("NVIDIA GeForce RTX 3080", 5, 320, 1710),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", 6, 350, 1695),
    "rtx-4070-ti": ("NVIDIA GeForce RTX 4070 Ti", 48, 285, 2610),
    "rtx-4080": ("NVIDIA GeForce RTX 4080", 64, 320, 2505),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", 72, 450, 2520),
    "l40": ("NVIDIA L40", 96, 300, 2490),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation", 96, 300, 2505),
    "rtx-pro-6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 128, 600, 2617),
    "l4": ("NVIDIA L4", 48, 72, 2040),
    "l40s": ("NVIDIA L40S", 96, 350, 2520),
    "rtx-5090": ("NVIDIA GeForce RTX 5090", 96, 575, 2407),
    "a100-40g": ("NVIDIA A100-SXM4-40GB", 40, 400, 1410),
    "a100-80g": ("NVIDIA A100-SXM4-80GB", 40, 400, 1410),
    "h100-80g": ("NVIDIA H100 80GB HBM3", 50, 700, 1980),
    "h100-pcie-80g": ("NVIDIA H100 PCIe", 50, 350, 1755),
    "h100-nvl-94g": ("NVIDIA H100 NVL", 60, 400, 1785),
    "gh200-96g": ("NVIDIA GH200 480GB", 60, 700, 1980),
    "h20": ("NVIDIA H20", 60, 400, 1980),
    "h200": ("NVIDIA H200", 50, 700, 1980),
    "b200": ("NVIDIA B200", 126, 1000, 1965),
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


MIG_PROFILES: dict[str, dict[str, tuple[float, int]]] = {
    # GiB and multiprocessors of an instance (`nvidia-smi mig -lgip`)
    "a100-40g": {"1g.5gb": (4.75, 14), "2g.10gb": (9.75, 28), "3g.20gb": (19.62, 42), "7g.40gb": (39.38, 98)},
    "a100-80g": {"1g.10gb": (9.5, 14), "2g.20gb": (19.5, 28), "3g.40gb": (39.25, 42), "7g.80gb": (78.75, 98)},
    "h100-80g": {"1g.10gb": (9.75, 16), "2g.20gb": (19.62, 32), "3g.40gb": (39.5, 60), "7g.80gb": (79.25, 132)},
}
NO_VIRTUAL_MEMORY = "no-vmm"
"""Of a card whose driver lacks the virtual memory functions, as under WSL2 and on a vGPU."""
MOST_CARDS, MOST_PROCESSES, MAGIC = 8, 128, 0x4544434152443032
"""As in card.h and machine.c."""


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
        *((name, ctypes.c_int) for name in ("most_clock_mhz", "memory_clock_mhz")),
        ("throttle_reasons", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("flops_wide", "flops_bf16", "flops_fp16")),
        *((name, ctypes.c_double) for name in ("bytes_per_second", "link_bytes_per_second")),
        ("taken_bytes", ctypes.c_uint64),
        ("fail_allocation_at", ctypes.c_int64),
        ("error", ctypes.c_int),
        ("memory_errors", ctypes.c_int),
        ("error_after", ctypes.c_int64),
        ("hangs", ctypes.c_bool),
        ("gone", ctypes.c_bool),
        ("lacks_virtual_memory", ctypes.c_bool),
        ("parent", ctypes.c_int8),
    ]


class Process(ctypes.Structure):
    """`struct process` of card.h."""

    _fields_ = [
        ("pid", ctypes.c_int),
        ("started", ctypes.c_uint64),
        ("held_bytes", ctypes.c_uint64 * MOST_CARDS),
        ("has_context", ctypes.c_bool * MOST_CARDS),
    ]


class Layout(ctypes.Structure):
    """`struct machine` of card.h."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("cards", ctypes.c_int),
        ("driver_version", ctypes.c_int),
        ("driver", ctypes.c_char * 32),
        ("card", Card * MOST_CARDS),
        ("process", Process * MOST_PROCESSES),
    ]


class Machine:
    """A machine with cards that are not there.

    It lives in a file without a name, which is gone when the process that made it has closed it, or has ended in
    whatever way. Tests change what its cards do while programs run on them. A card is named by its place: whole cards
    in the order in which they were given, then MIG instances.
    """

    def __init__(self, home: Path, *cards: str, driver_version: int = CUDA) -> None:
        """With cards as `described` takes them; `home` is what `build.py` has filled.

        Raises `UsageError` for a card that is not known and where nothing is built.
        """
        pairs = [described(card, slot) for slot, card in enumerate(cards)]
        every = [card for card, _ in pairs]
        every += [instance for _, instances in pairs for instance in instances]
        if len(every) > MOST_CARDS:
            raise UsageError(f"a machine has {MOST_CARDS} cards and instances at most, and these are {len(every)}")
        if not (home / "lib" / "libemulated.so").exists():
            raise UsageError(f"no emulated card is built in {home}: make emulated-card")
        self._home = home
        self.file = os.memfd_create("emulated-machine")
        os.truncate(self.file, ctypes.sizeof(Layout))
        self._layout = Layout.from_buffer(mmap.mmap(self.file, ctypes.sizeof(Layout)))
        self._layout.magic, self._layout.cards = MAGIC, len(every)
        self._layout.driver, self._layout.driver_version = DRIVER.encode(), driver_version
        self._layout.card[: len(every)] = every

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.file)
        for meeting in Path("/dev/shm").glob("emulated-nccl-*"):  # of ranks that were killed before all had joined
            if not Path("/proc", meeting.name.split("-")[2]).exists():
                meeting.unlink(missing_ok=True)

    @property
    def cards(self) -> int:
        """How many it has, MIG instances included."""
        return int(self._layout.cards)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to run on the machine, while this process lives."""
        return {
            "EMULATED_CARDS": f"/proc/{os.getpid()}/fd/{self.file}",
            "LD_LIBRARY_PATH": str(self._home / "lib"),
            "PYTHONPATH": os.pathsep.join([str(self._home / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def uuid(self, card: int) -> str:
        """`GPU-...`, or `MIG-...` of an instance."""
        return str(self._layout.card[card].uuid.decode())

    def held_bytes(self, card: int) -> int:
        """Memory that the machine's living processes hold together, with their contexts."""
        return sum(process.held_bytes[card] for process in self._living())

    def processes(self, card: int) -> list[int]:
        """The numbers of the living processes that have a context on the card."""
        return [process.pid for process in self._living() if process.has_context[card]]

    def take_memory(self, card: int, size: int) -> None:
        """From now on a process of somebody else holds so many bytes."""
        self._layout.card[card].taken_bytes = size

    def fail_allocation(self, card: int, at: int = 1) -> None:
        """The so many-th allocation from now fails as if memory had run out, and so do all after it; 0 ends that."""
        self._layout.card[card].fail_allocation_at = at

    def error(self, card: int, code: int, after_launches: int = 0) -> None:
        """A kernel that is launched after so many others meets an error of CUDA's, such as 214 (ECC) or 700 (illegal
        access). Its process meets it from then on in every call; others do not."""
        self._layout.card[card].error_after = after_launches
        self._layout.card[card].error = code

    def hang(self, card: int, hangs: bool = True) -> None:
        """Whether calls that wait for the card, or for an instance of it, never come back."""
        for one in self._with_instances(card):
            one.hangs = hangs

    def take_away(self, card: int) -> None:
        """The card falls off the bus, with its instances."""
        for one in self._with_instances(card):
            one.gone = True

    def throttle(self, card: int, reasons: int, clock_mhz: int) -> None:
        """The card's clock is held down, for reasons of NVML's (`nvmlClocksEventReasons`)."""
        self._layout.card[card].clock_mhz = clock_mhz
        self._layout.card[card].throttle_reasons = reasons

    def _with_instances(self, card: int) -> list[Card]:
        return [self._layout.card[card], *(one for one in self._layout.card if one.parent == card + 1)]

    def _living(self) -> Iterator[Process]:
        for process in self._layout.process:
            with suppress(OSError, ValueError):
                # After the name, which may hold anything, the state is the first field and the start the twentieth.
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[19]) == process.started and fields[0] not in "ZX":
                    yield process


def described(text: str, slot: int) -> tuple[Card, list[Card]]:
    """A card of the catalog in the slot of that number, and its MIG instances.

    `text` is the card's name, followed by a colon and the profile for each instance (`h100-80g:3g.40gb:1g.10gb`), or by
    `:no-vmm` for a card without the virtual memory functions. Raises `UsageError` for what is not known.
    """
    name, *traits = text.lower().split(":")
    if name not in FACTS:
        raise unknown("emulated card", name, FACTS)
    card = whole(name, slot)
    card.lacks_virtual_memory = NO_VIRTUAL_MEMORY in traits
    profiles = MIG_PROFILES.get(name, {})
    instances = []
    for number, profile in enumerate(trait for trait in traits if trait != NO_VIRTUAL_MEMORY):
        if profile not in profiles:
            raise unknown(f"trait of {name}", profile, [*profiles, NO_VIRTUAL_MEMORY])
        instances.append(instance(card, profile, number, *profiles[profile]))
        instances[-1].parent = slot + 1
    return card, instances


def instance(card: Card, profile: str, number: int, gib: float, multiprocessors: int) -> Card:
    """A MIG instance of a card, with its share of everything."""
    made = Card.from_buffer_copy(card)
    made.name += f" MIG {profile}".encode()
    made.uuid = f"MIG-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{card.uuid.decode()} {number}')}".encode()
    made.multiprocessors = multiprocessors
    made.marketed_bytes = made.total_bytes = int(gib * 1024**3)
    for field in ("flops_wide", "flops_bf16", "flops_fp16"):
        setattr(made, field, getattr(card, field) * multiprocessors / card.multiprocessors)
    made.bytes_per_second = card.bytes_per_second * made.total_bytes / card.total_bytes
    made.l2_bytes = card.l2_bytes * made.total_bytes // card.total_bytes
    made.link_generation = 0
    return made


def whole(name: str, slot: int) -> Card:
    """A card of the catalog, in the slot of that number."""
    known = catalog_card(name)
    driver_name, l2_mib, watts, mhz = FACTS[name]
    major, minor = map(int, known.capability.split("."))
    per_block, per_multiprocessor = SHARED[10 * major + minor]
    flops, emulated = known.peak_flops, known.peak_flops["fp32"] / 2
    return Card(
        name=driver_name.encode(),
        uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{name} {slot}')}".encode(),
        pci=f"0000:{slot + 1:02X}:00.0".encode(),
        major=major,
        minor=minor,
        multiprocessors=known.multiprocessors,
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
        flops_wide=flops["fp32"],
        flops_bf16=flops.get("bf16", emulated),
        flops_fp16=flops.get("fp16", emulated),
        bytes_per_second=known.bandwidth_bytes_per_second,
        link_bytes_per_second=known.host_link.bytes_per_second if known.host_link else 1.6e10,
    )


def main() -> None:
    """Run a command on a machine with the given cards: `cards.py --home FOLDER h100-80g,h100-80g COMMAND ...`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the folder with `lib` and `site`")
    parser.add_argument("cards", help="names of the catalog, with commas between them; see `described`")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    try:
        machine = Machine(asked.home, *asked.cards.split(","))
    except UsageError as error:
        parser.error(str(error))
    os.set_inheritable(machine.file, True)  # the command keeps the machine open, and nothing is left when it ends
    os.execvpe(asked.command[0], asked.command, {**os.environ, **machine.environment})


if __name__ == "__main__":
    main()
