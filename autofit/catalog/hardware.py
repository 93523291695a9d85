"""Accelerators as data: what each has, which one a driver's device name stands for, and which would hold a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from autofit.core.device.hardware import EMULATED
from autofit.core.document import Document
from autofit.core.errors import UsageError, unknown
from autofit.core.units import GIB, format_bytes

_IGNORED_WORDS = re.compile(r"nvidia|geforce|tesla|amd|instinct|sxm\d?")
_SIZE = re.compile(r"\d+(\.\d+)?\s*gi?b", re.IGNORECASE)
_OPTIONAL_WORDS = re.compile(r"\b(\d+g|apple|rtx|pcie|nvl)\b")
"""What users leave out of a catalog name and mean the same card. Without `ti` or `max`, another card may be meant."""
_POWER_LIMIT = re.compile(r"-\d+w$")
"""What the name of hardware ends with if its card has another power limit than its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Document):
    """A connection of a device."""

    name: str
    """`NVLink 4`, `PCIe 4.0 x16`, ..."""
    bytes_per_second: float
    """Peak bytes per second in one direction, all links of the device together, as stated by the vendor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Document):
    """One accelerator of the catalog. Figures are data-sheet peaks; measured ones are lower."""

    name: str
    """Catalog name, such as `h100-80g`."""
    vendor: str
    """`nvidia`, `amd` or `apple`."""
    kind: str = "cuda"
    """Torch device type: `cuda` (NVIDIA and ROCm) or `mps`."""
    memory_bytes: int
    """Most bytes that a program can use, after the driver's own share; what torch reports as the total."""
    marketed_memory_bytes: int
    """Bytes stated by the vendor; with unified memory, those of the largest configuration sold."""
    unified_memory: bool = False
    """Whether the device shares the host's memory, in which case some machines have less than stated here."""
    bandwidth_bytes_per_second: float
    """Bandwidth of the device's memory, bytes per second."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s per number format (`fp32`, `tf32`, `fp16`, `bf16`, `fp8`), with fp32 accumulation; formats in which
    the device cannot compute are absent."""
    capability: str
    """Compute capability (`9.0`), gfx name (`gfx942`) or Metal family (`apple9`)."""
    multiprocessors: int | None = None
    """Streaming multiprocessors; None for other vendors' cards."""
    interconnect: Link | None = None
    """Between devices of one machine; None if machines have only one."""
    host_link: Link | None = None
    """Between device and host memory; None if they are the same memory."""
    ray_accelerator_type: str | None = None
    """Ray's name for it on a node (`ray.util.accelerators`); None if Ray has none."""
    device_names: tuple[str, ...]
    """Regular expressions that match the whole name reported by the driver."""
    source: str
    """The vendor's document that the figures come from."""

    @property
    def bf16(self) -> bool:
        return "bf16" in self.peak_flops

    @property
    def training_peak_flops(self) -> float | None:
        """Dense FLOP/s in bf16, or in fp16 where bf16 is not native: the denominator of MFU."""
        return self.peak_flops.get("bf16") or self.peak_flops.get("fp16")

    @property
    def supports(self) -> tuple[str, ...]:
        """What autofit can do for it: `estimate` and `search`, `search` alone, or nothing yet."""
        return {"nvidia": ("estimate", "search"), "amd": ("search",)}.get(self.vendor, ())

    def to_json(self) -> dict[str, Any]:
        return {**Document.to_json(self), "supports": list(self.supports)}


@cache
def cards() -> tuple[Card, ...]:
    """Every card of the catalog, in file order."""
    import yaml

    text = resources.files("autofit.catalog").joinpath("hardware.yaml").read_text(encoding="utf-8")
    return tuple(map(Card.from_json, yaml.safe_load(text)))


def card(name: str) -> Card:
    """The one card that a user may mean by `name`; raises `UsageError` if `matching_cards` has several, or none."""
    if _SIZE.fullmatch(name.strip()):
        raise UsageError(f"hardware {name!r} is a size of memory: {_of_size(name)}")
    matches = matching_cards(name)
    if len(matches) == 1:
        return matches[0]
    if matches:
        sizes = " or ".join(f"{card.name} ({format_bytes(card.memory_bytes)})" for card in matches)
        raise UsageError(f"hardware {name!r} may be {sizes}: name one of them")
    if near := [card.name for card in cards() if _words(name) and _words(name) <= _words(card.name)]:
        raise UsageError(f"the catalog has no {name!r}; near it are: {', '.join(near)}")
    several = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(.+?)(?:\s*[x*]\s*(\d+))?", name.strip(), re.IGNORECASE)
    if several and (count := several[1] or several[3]) and (of_kind := matching_cards(several[2])):
        which = " or ".join(card.name for card in of_kind)
        raise UsageError(f"hardware {name!r} is several cards: write --devices {count} with --hardware {which}")
    names = [card.name for card in cards()]
    if not any(word.isdigit() for word in _words(name)):
        raise unknown("hardware", name, names)
    # A number that is wrong in one place is a slip; with less in common it is mostly another card.
    stand_in = (
        "for a card that is not listed, name one with at least its memory, and --memory-limit for the memory of yours"
    )
    if difflib.get_close_matches(name.lower(), names, cutoff=0.75):
        raise UsageError(f"{unknown('hardware', name, names)} {stand_in.capitalize()}")
    raise UsageError(f"unknown hardware {name!r}: {stand_in}")


def matching_cards(name: str) -> tuple[Card, ...]:
    """The cards that a user may mean by `name`: a catalog name, what a driver reports, or part of either, in any case
    (`H100`, `A100-SXM4-80GB`, `NVIDIA GeForce RTX 4090`, `rtx4090`). A size of memory alone names none, nor does a name
    without what tells a model from another (`RTX 4070` is no `rtx-4070-ti`)."""
    if _SIZE.fullmatch(name.strip()):
        return ()
    words = _words(name)
    for matches in (
        [card for card in cards() if card.name == name.lower()],
        [card for card in cards() if _words(card.name) == words],
        [card for card in cards() if _has_driver_name(card, name.strip()) and _words(card.name) <= words],
        [card for card in cards() if _has_driver_name(card, name.strip())],
        [card for card in cards() if _words(_OPTIONAL_WORDS.sub(" ", card.name)) <= words <= _words(card.name)],
    ):
        if matches:
            # Catalog names leave the usual socket out, and say the others.
            of_socket = [card for card in matches if "sxm" in name.lower() and not _words(card.name) & {"pcie", "nvl"}]
            return tuple(of_socket or matches)
    return ()


def _of_size(size: str) -> str:
    """What to write in place of a size, as one sentence; sizes are taken as vendors state them."""
    number = float(size.lower().rstrip("gib "))
    names = [card.name for card in cards() if card.marketed_memory_bytes == number * GIB]
    description = f"a card that has it ({', '.join(names)})" if names else "a card"
    return f"name {description}; --memory-limit {size.replace(' ', '')} beside a larger card uses only so much of it"


def _words(name: str) -> frozenset[str]:
    """The words and numbers of a card's name without the maker and the socket, which catalog names leave out."""
    sized = re.sub(r"(?<=\d)\s*gi?b\b", "g", name.lower())
    return frozenset(re.findall(r"[a-z]+|\d+", _IGNORED_WORDS.sub(" ", sized)))


def card_of(hardware_name: str) -> Card | None:
    """The card that hardware of this name has or emulates, at whatever power limit (`h100-80g-500w`,
    `emulated-h100-80g`); None if it is not in the catalog."""
    name = _POWER_LIMIT.sub("", hardware_name.removeprefix(EMULATED))
    return next((card for card in cards() if card.name == name), None)


def match(device_name: str, memory_bytes: int) -> Card | None:
    """The card that a driver reports as `device_name` with `memory_bytes` in total; None if it is not in the catalog,
    as no slice of a card (MIG, vGPU) is."""
    same_name = [card for card in cards() if _has_driver_name(card, device_name.strip())]
    sized = [card for card in same_name if _has_memory(card, memory_bytes)]
    return min(sized, key=lambda card: abs(card.memory_bytes - memory_bytes), default=None)


def fitting(bytes_needed: int) -> tuple[Card, ...]:
    """The cards whose memory holds `bytes_needed`, smallest first; among equals, slowest memory first."""
    large_enough = [card for card in cards() if card.memory_bytes >= bytes_needed]
    return tuple(sorted(large_enough, key=lambda card: (card.memory_bytes, card.bandwidth_bytes_per_second)))


def cards_of_size(total_bytes: int) -> tuple[Card, ...]:
    """NVIDIA's cards whose drivers report about so much memory in total, the nearest first. Drivers report less than
    `Card.memory_bytes`, and not more: cards with less than `total_bytes`, which may be rounded, come last."""

    def unlikeness(card: Card) -> tuple[bool, int]:
        return card.memory_bytes < total_bytes - GIB // 100, abs(card.memory_bytes - total_bytes)

    nearest = sorted(cards(), key=unlikeness)
    return tuple(c for c in nearest if c.vendor == "nvidia" and abs(total_bytes / c.memory_bytes - 1) <= 0.015)


def _has_driver_name(card: Card, device_name: str) -> bool:
    return any(re.fullmatch(pattern, device_name, re.IGNORECASE) for pattern in card.device_names)


def _has_memory(card: Card, memory_bytes: int) -> bool:
    if card.unified_memory:
        return 0 < memory_bytes <= card.marketed_memory_bytes
    # Drivers reserve up to 9 % for error correction and firmware; cards with the same chip differ by half.
    return abs(memory_bytes - card.memory_bytes) <= 0.12 * card.memory_bytes
