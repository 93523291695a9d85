"""Fake NVIDIA cards, as `pynvml` shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

MIB = 1024**2


class NVMLError(Exception):
    """Like pynvml's."""


class NVMLError_LibraryNotFound(NVMLError):
    """No driver."""


class NVMLError_DriverNotLoaded(NVMLError):
    """A driver that is not loaded."""


class NVMLError_GpuIsLost(NVMLError):
    """A card that no longer answers."""


class NVMLError_NotSupported(NVMLError):
    """A question that the device cannot answer."""


class NVMLError_NotFound(NVMLError):
    """A gap between MIG instances."""


@dataclass
class FakeCard:
    """A card or a MIG instance."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total: int = 81559 * MIB
    reserved: int = 470 * MIB
    used: int = 0
    capability: tuple[int, int] = (9, 0)
    divided: bool | None = False
    """Whether MIG is on; None for a card without MIG."""
    instances: list[FakeCard | None] = field(default_factory=list)
    knows_version_2: bool = True
    memory_failure: NVMLError | None = None
    """What whoever asks for its memory is told."""
    power_limit: int | None = 700_000
    """Milliwatts; None for a card that does not say."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the functions that ask for the card's state answer, by their names; one that is missing is not supported."""


class FakeNvml:
    """The functions of `pynvml` that the project calls."""

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_NotSupported = NVMLError_NotSupported
    nvmlMemory_v2 = 0x02000028

    def __init__(self, *cards: FakeCard, failure: NVMLError | None = None) -> None:
        self.cards = cards
        self.failure = failure
        self.sessions = 0

    def nvmlInit(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        assert self.sessions > 0
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return card.name

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        if card.divided is None:
            raise NVMLError("Not Supported")
        return [int(card.divided), int(card.divided)]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return len(card.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, index: int) -> FakeCard:
        instance = card.instances[index]
        if instance is None:
            raise NVMLError_NotFound
        return instance

    def nvmlDeviceGetCudaComputeCapability(self, card: FakeCard) -> tuple[int, int]:
        if card.uuid.startswith("MIG-"):
            raise NVMLError("Not Supported")
        return card.capability

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:
        if card.memory_failure is not None:
            raise card.memory_failure
        if version is None:
            used = card.used + card.reserved
            return SimpleNamespace(total=card.total, used=used, free=card.total - used)
        if not card.knows_version_2:
            raise NVMLError("Function Not Found")
        free = card.total - card.used - card.reserved
        return SimpleNamespace(total=card.total, reserved=card.reserved, used=card.used, free=free)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(card: FakeCard, *arguments: Any) -> Any:
            if name not in card.state:
                raise NVMLError("Not Supported")
            given = card.state[name]
            return given(*arguments) if callable(given) else given

        return answer

    def nvmlDeviceGetPowerManagementLimit(self, card: FakeCard) -> int:
        if card.power_limit is None:
            raise NVMLError("Not Supported")
        return card.power_limit

    def nvmlDeviceGetPowerManagementDefaultLimit(self, card: FakeCard) -> int:
        return 700_000


def install(monkeypatch: pytest.MonkeyPatch, *cards: FakeCard, failure: NVMLError | None = None) -> FakeNvml:
    """Make `import pynvml` find these cards, all visible."""
    fake = FakeNvml(*cards, failure=failure)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake
