"""NVIDIA devices as the driver's management library sees them: nothing here initialises CUDA, so forks stay safe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import EnvironmentLacks
from autofit.core.units import MIB

_MIG_PROFILE = re.compile(r" MIG (\S+)$")
"""The profile in the driver's name of an instance."""
BUSY_BYTES = 256 * MIB
"""Memory that others (a display, the driver itself) may hold of a device that counts as free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDevice:
    """A card, or a MIG instance of one."""

    uuid: str
    """`GPU-...` or `MIG-...`: CUDA_VISIBLE_DEVICES accepts it, and it does not depend on the order of devices."""
    name: str
    marketed_bytes: int
    """All memory, including the driver's own share."""
    memory_bytes: int
    """Memory that programs can use."""
    held_bytes: int
    """Memory that all programs together hold now."""
    capability: str
    """Compute capability, such as `9.0`."""
    power_limit_watts: int | None = None
    """The power limit that was set in place of the default; None for the default, and where the driver does not say."""
    mig_profile: str | None = None
    """The size of a MIG instance, such as `1g.10gb`; None for a whole card."""
    shares_host: bool = False
    """Whether its memory is the host's, as that of GB10 (DGX Spark) is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDevices:
    """The NVIDIA devices of one machine."""

    driver: str
    visible: tuple[NvidiaDevice, ...]
    """In the order of CUDA_VISIBLE_DEVICES, or else in that of their slots (PCI), which is CUDA's own order only if
    CUDA_DEVICE_ORDER is PCI_BUS_ID: by default CUDA begins with the fastest card."""

    @property
    def is_emulated(self) -> bool:
        """Whether the driver says of itself that its cards are not there."""
        return "emulated" in self.driver


def devices() -> NvidiaDevices | None:
    """The machine's devices; None without an NVIDIA driver. Raises `EnvironmentLacks` if the driver does not answer."""
    import pynvml

    try:
        with _session():
            driver = pynvml.nvmlSystemGetDriverVersion()
            return NvidiaDevices(driver=driver, visible=tuple(_describe(*handle) for handle in _visible()))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise EnvironmentLacks(
            f"the NVIDIA driver does not answer: {error}", remedy="check nvidia-smi, or use --device cpu"
        ) from error


def visible(number: int) -> NvidiaDevice | None:
    """This process's visible device `number`; None where there is none or the driver does not say."""
    try:
        machine = devices()
    except EnvironmentLacks:
        return None
    return machine.visible[number] if machine is not None and number < len(machine.visible) else None


def held_bytes() -> int | None:
    """Memory of the first visible device that all processes together hold; None where the driver does not say."""
    device = visible(0)
    return None if device is None else device.held_bytes


def shares_host() -> bool:
    """Whether the first visible device has no memory but the host's."""
    device = visible(0)
    return device is not None and device.shares_host


def is_not_loaded() -> bool:
    """Whether NVIDIA's libraries are here, and its driver is not loaded, as after an update of the kernel."""
    import pynvml

    try:
        with _session():
            return False
    except pynvml.NVMLError_DriverNotLoaded:
        return True
    except pynvml.NVMLError:
        return False


class Unreachable(Exception):
    """NVML is absent or has no answer; the message is the driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCard:
    """A device that NVML answers questions about, as long as `first_card` is open."""

    uuid: str
    """The id of the device: that of the instance, if it is a MIG instance."""
    handle: Any
    """The card's handle: for a MIG instance, NVML answers only what concerns its memory."""
    instance: Any
    """The device's handle: a container may not ask for the memory of the card that its MIG instance is part of."""

    def ask(self, function: str, *arguments: Any) -> Any:
        """The answer of one of NVML's functions about the card; None where the card or its driver has none."""
        import pynvml

        with suppress(pynvml.NVMLError, AttributeError):
            return getattr(pynvml, function)(self.handle, *arguments)
        return None


@contextmanager
def first_card() -> Iterator[OpenCard]:
    """This process's first visible device. Raises `Unreachable` where there is none or the driver does not say."""
    import pynvml

    try:
        with _session():
            handles = _visible()
            if not handles:
                raise Unreachable("there is no visible device")
            device, card = handles[0]
            yield OpenCard(uuid=pynvml.nvmlDeviceGetUUID(device), handle=card, instance=device)
    except pynvml.NVMLError as error:
        raise Unreachable(str(error)) from error


def own_bytes() -> int | None:
    """Memory that this process holds of its first visible device; None where the driver does not say, as in most
    containers, whose processes it knows by other numbers."""
    with suppress(Unreachable), first_card() as card:
        holders = card.ask("nvmlDeviceGetComputeRunningProcesses") or ()
        return next((holder.usedGpuMemory for holder in holders if holder.pid == os.getpid()), None)
    return None


def why_unreachable() -> str | None:
    """Why the first visible device does not answer any more, in the driver's words; None if it does."""
    import pynvml

    try:
        with first_card() as card:
            _memory(card.instance)
    except (Unreachable, pynvml.NVMLError) as error:
        return str(error)
    return None


def visible_ids(value: str | None, cards: list[str], instances: dict[str, list[str]]) -> list[str]:
    """The ids that CUDA_VISIBLE_DEVICES=`value` leaves visible, in order.

    `cards` are the cards' ids in PCI order, by which numbers count, and `instances` the MIG instances of the
    partitioned ones. As in CUDA, the list ends at the first word that names no device, naming a device twice leaves
    none visible, ids may be abbreviated, and a partitioned card stands for its first instance. (CUDA programming
    guide, "CUDA environment variables".)
    """
    words = [str(i) for i in range(len(cards))] if value is None else [word.strip() for word in value.split(",")]
    uuids = [*cards, *(uuid for of_card in instances.values() for uuid in of_card)]
    chosen: list[str] = []
    for word in words:
        if word.isdecimal():
            matches = cards[int(word) : int(word) + 1]
        else:
            matches = [uuid for uuid in uuids if uuid.startswith(word)] if word.startswith(("GPU-", "MIG-")) else []
        if len(matches) != 1:
            break
        device = (instances.get(matches[0]) or matches)[0]
        if device in chosen:
            return []
        chosen.append(device)
    return chosen


@contextmanager
def _session() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _visible() -> list[tuple[Any, Any]]:
    """Handles of the visible devices, each paired with its card's."""
    import pynvml

    handles: dict[str, tuple[Any, Any]] = {}
    cards: list[str] = []
    instances: dict[str, list[str]] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(card)
        cards.append(uuid)
        handles[uuid] = (card, card)
        for instance in _mig_instances(card):
            name = pynvml.nvmlDeviceGetUUID(instance)
            instances.setdefault(uuid, []).append(name)
            handles[name] = (instance, card)
    return [handles[uuid] for uuid in visible_ids(os.environ.get("CUDA_VISIBLE_DEVICES"), cards, instances)]


def _mig_instances(card: Any) -> list[Any]:
    import pynvml

    try:
        enabled, _ = pynvml.nvmlDeviceGetMigMode(card)
    except pynvml.NVMLError:  # cards that cannot be partitioned
        return []
    if not enabled:
        return []
    instances = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        with suppress(pynvml.NVMLError_NotFound):  # indices have gaps
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index))
    return instances


def _memory(device: Any) -> dict[str, Any]:
    """The device's memory, as fields of `NvidiaDevice`."""
    import pynvml

    with suppress(pynvml.NVMLError):  # of drivers before 510, which count what they reserve as used
        memory = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
        usable = int(memory.total) - int(memory.reserved)
        return {"marketed_bytes": int(memory.total), "memory_bytes": usable, "held_bytes": int(memory.used)}
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    except pynvml.NVMLError_NotSupported:
        # Of a device that shares the host's memory, NVML reports what processes hold, but no total.
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        holders = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        held = sum(holder.usedGpuMemory or 0 for holder in holders)
        usable = int(0.8 * total)  # as much of it as programs may have on a processor
        return {"marketed_bytes": total, "memory_bytes": usable, "held_bytes": held, "shares_host": True}
    total = int(memory.total)
    return {"marketed_bytes": total, "memory_bytes": total, "held_bytes": int(memory.used)}


def _describe(device: Any, card: Any) -> NvidiaDevice:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    name = pynvml.nvmlDeviceGetName(device)
    profile = _MIG_PROFILE.search(name)
    return NvidiaDevice(
        uuid=pynvml.nvmlDeviceGetUUID(device),
        name=name,
        **_memory(device),
        capability=f"{major}.{minor}",
        power_limit_watts=_changed_power_limit(card),
        mig_profile=profile[1] if profile else None,
    )


def _changed_power_limit(card: Any) -> int | None:
    """Watts of the power limit that was set, if it is not the default. The enforced limit is not used: other limits,
    such as a laptop's, move it from moment to moment."""
    import pynvml

    try:
        limit = pynvml.nvmlDeviceGetPowerManagementLimit(card)
        default = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(card)
    except pynvml.NVMLError:
        return None
    return None if round(limit / 1000) == round(default / 1000) else round(limit / 1000)
